"""Compress the trained A's: Algorithm 1, the loss metric, joint mode, the SVD, precision."""
