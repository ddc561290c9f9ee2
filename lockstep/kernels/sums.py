"""Sums of shards: the tree of lockstep.distributed.tree inside one process, and what gradients carry.

Shape legend: S shards, P numbers of each.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled

_TOGETHER = 1024
"""Numbers of each shard that are added up together, so that they stay in the cache."""


@compiled
def add_up(values: np.ndarray, first: int, last: int) -> None:
    """Write the sum over a complete subtree of shards into the first row of float32 [S, P], for the numbers first to
    last - 1 of each. Those of the other rows are overwritten, too.

    Args:
        values: of S shards, a power of two.
    """
    shards = len(values)
    for begin in range(first, last, _TOGETHER):
        end, width = min(begin + _TOGETHER, last), 1
        while width < shards:
            for left in range(0, shards, 2 * width):
                a, b = values[left, begin:end], values[left + width, begin:end]
                for i in range(len(a)):
                    a[i] += b[i]
            width *= 2


@compiled
def write_sums(items: int, sums: np.ndarray, out: np.ndarray, place: int) -> None:
    """Write the number of a slice's items and its sums of metrics [S, ...] behind each gradient in out."""
    for s in range(len(out)):
        out[s, place] = np.float32(items)
        for j in range(sums.shape[1]):
            out[s, place + 1 + j] = np.float32(sums[s, j])
