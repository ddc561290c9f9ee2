"""A sum tree: draws items in proportion to their priorities, and updates many priorities at once.

Every inner node is the sum of its children, recomputed whenever one changes. So the sums depend on the current
priorities alone, not on the order of changes, and rounding errors do not accumulate.

Shape legend: n items, F children of a node.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

_FANOUT = 16
"""F. A level costs a few calls of numpy, regardless of its nodes' children, so few levels are faster."""


class SumTree:
    """Priorities of a fixed number of items, in float64.

    Args:
        size: number of items, whose initial priority is 0.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        rows = [-(-size // _FANOUT)]
        while rows[-1] > 1:
            rows.append(-(-rows[-1] // _FANOUT))
        ends = np.cumsum(rows).tolist()
        self._nodes = np.zeros((ends[-1], _FANOUT))
        self._levels = [self._nodes[end - count : end] for count, end in zip(rows, ends, strict=True)]
        """[nodes of the level above, F] each: items first, the root's children last."""

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._levels[-1].sum())

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._nodes.nbytes

    @property
    def priorities(self) -> np.ndarray:
        """Priorities of all items [size]."""
        return self._levels[0].reshape(-1)[: self.size].copy()

    def __getitem__(self, items: np.ndarray) -> np.ndarray:
        """Priorities of items [n]."""
        return self._levels[0].reshape(-1)[items]

    def set(self, items: np.ndarray, priorities: np.ndarray | float) -> None:
        """Set the priorities of items [n]. If an item occurs twice, its last priority counts."""
        nodes = items
        self._levels[0].reshape(-1)[nodes] = priorities
        for below, level in pairwise(self._levels):
            nodes = nodes // _FANOUT
            if len(nodes) > 64:
                nodes = np.unique(nodes)
            level.reshape(-1)[nodes] = below[nodes].sum(1)

    def find(self, sums: np.ndarray) -> np.ndarray:
        """Items [n] at which the running sum of priorities first exceeds sums [n], each in [0, total).

        Items of priority 0 are never found.
        """
        nodes, left, rows = np.zeros(len(sums), np.int64), sums.astype(np.float64), np.arange(len(sums))
        for level in reversed(self._levels):
            children = level[nodes]
            running = children.cumsum(1)
            # Rounding may leave more than the sum of all children. Then take the last child that is not empty.
            last = _FANOUT - 1 - (children[:, ::-1] > 0).argmax(1)
            child = np.minimum((running <= left[:, None]).sum(1), last)
            left = left - np.where(child > 0, running[rows, child - 1], 0.0)
            nodes = nodes * _FANOUT + child
        return nodes
