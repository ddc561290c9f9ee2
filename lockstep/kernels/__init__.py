"""Numba kernels whose results have equal bits on every CPU (extra `compiled`)."""
