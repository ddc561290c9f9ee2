"""Embedded fractions of implicit quantiles (lockstep.models.q.ImplicitQHead), with the bits of torch's replaced
operations (lockstep.portable).

Shape legend: n samples, K fractions of each, F features, E cosines.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.math import cos32
from lockstep.kernels.sums import middle_sums


@compiled
def cosines(tau: np.ndarray, multiples: np.ndarray) -> np.ndarray:
    """The cosines of multiples [E] of fractions [n, K] -> [nK, E]"""
    flat, size = tau.reshape(tau.size), len(multiples)
    out = np.empty((len(flat), size), np.float32)
    for r in range(len(flat)):
        to, fraction = out[r], flat[r]
        for e in range(size):
            to[e] = cos32(fraction * multiples[e])
    return out


@compiled
def embed(features: np.ndarray, embedded: np.ndarray, each: int) -> np.ndarray:
    """Multiply features [n, F] by embedded fractions [nK, F], or [K, F] for all samples -> [nK, F]

    Args:
        each: K.
    """
    n, size = features.shape
    out = np.empty((n * each, size), np.float32)
    for r in range(n * each):
        to, a, b = out[r], features[r // each], embedded[r % len(embedded)]
        for j in range(size):
            to[j] = a[j] * b[j]
    return out


@compiled
def embed_back(features: np.ndarray, embedded: np.ndarray, by_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gradients by features [n, F] and by embedded fractions [nK, F], given that by their products [nK, F]."""
    (n, size), rows = features.shape, len(by_out)
    each = rows // n
    terms, by_features, by_embedded = np.empty_like(by_out), np.empty_like(features), np.empty_like(by_out)
    for r in range(rows):
        grad, a, b, term, to = by_out[r], features[r // each], embedded[r], terms[r], by_embedded[r]
        for j in range(size):
            term[j] = grad[j] * b[j]
            to[j] = grad[j] * a[j]
    middle_sums(terms.reshape((n, each, size)), by_features)
    return by_features, by_embedded
