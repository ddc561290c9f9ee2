"""The tree of lockstep.distributed.tree inside one process.

Shape legend: S shards, P numbers of each.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled


@compiled
def add_up(values: np.ndarray) -> None:
    """Write the sum of float32 [S, P] over a complete subtree of shards into values[0]. The rest is overwritten, too.

    Args:
        values: of S shards, a power of two.
    """
    width = 1
    while width < len(values):
        for left in range(0, len(values), 2 * width):
            a, b = values[left], values[left + width]
            for i in range(len(a)):
                a[i] += b[i]
        width *= 2
