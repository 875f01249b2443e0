"""Second-order statistics of features: moments, PCA, rank rules, A ≈ C·M·W, pooling (eq. 1–10).

Tensors in, tensors out; nothing here knows a network.
"""
