"""Initial weights in portable arithmetic."""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.math import ndtri, sqrt


@compiled
def _orthogonalize(vectors: np.ndarray) -> None:
    """Make the rows of a float64 matrix orthogonal and of length 1, by Gram and Schmidt's procedure, twice."""
    few, long = vectors.shape
    for i in range(few):
        for _ in range(2):
            for k in range(i):
                product = 0.0
                for j in range(long):
                    product += vectors[i, j] * vectors[k, j]
                for j in range(long):
                    vectors[i, j] -= product * vectors[k, j]
        square = 0.0
        for j in range(long):
            square += vectors[i, j] * vectors[i, j]
        length = sqrt(square)
        for j in range(long):
            vectors[i, j] /= length


@compiled
def orthogonal_rows(matrix: np.ndarray) -> np.ndarray:
    """The rows of a float32 matrix, with no more rows than columns, made orthogonal and of length 1."""
    vectors = matrix.astype(np.float64)
    _orthogonalize(vectors)
    return vectors.astype(np.float32)


@compiled
def orthogonal(uniform: np.ndarray, gain: float) -> np.ndarray:
    """A matrix with orthogonal rows or columns, whichever are fewer, of length gain: drawn uniformly among these
    (Saxe et al. 2014, https://arxiv.org/abs/1312.6120).

    By Gram and Schmidt's procedure in float64, twice, on normal numbers. It is the QR decomposition whose R has a
    positive diagonal, as in torch.nn.init.orthogonal_.

    Args:
        uniform: numbers in (0, 1), float32 [M, K].
        gain: the length.

    Returns:
        float32 [M, K].
    """
    rows, columns = uniform.shape
    few, long = min(rows, columns), max(rows, columns)
    vectors = np.empty((few, long))
    for i in range(few):
        for j in range(long):
            u = uniform[i, j] if rows < columns else uniform[j, i]
            vectors[i, j] = np.float64(ndtri(min(max(u, np.float32(1e-7)), np.float32(1 - 1e-7))))
    _orthogonalize(vectors)
    out = np.empty((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            out[i, j] = np.float32(gain * (vectors[i, j] if rows < columns else vectors[j, i]))
    return out
