"""Second-order statistics of features: moments, the eigensolver, rank rules, A ≈ C·M·W.

Tensors in, tensors out; nothing here knows a network.
"""
