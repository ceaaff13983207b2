"""Fused operations as calls of the hand-written kernels."""
