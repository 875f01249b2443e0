"""Compress the trained A of every site: Algorithm 1, the loss metric, joint mode, the SVD."""
