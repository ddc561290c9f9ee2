"""Numba kernels whose results have identical bits on every CPU."""
