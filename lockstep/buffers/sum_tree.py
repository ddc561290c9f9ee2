"""A sum tree: draws items in proportion to their priorities, and updates many priorities at once.

Every inner node is the sum of its children and is recomputed whenever a child changes. So the sums depend only on the
current priorities, not on the order of changes, and rounding errors do not accumulate.

Shape legend: n items, F children of a node.
"""

from __future__ import annotations

import numpy as np


class SumTree:
    """Priorities of a fixed number of items, in float64.

    Args:
        size: the number of items. Their initial priority is 0.
    """

    def __init__(self, size: int) -> None:
        from lockstep.kernels import sum_trees  # which need Numba

        self._kernels, self.size = sum_trees, size
        rows = [-(-size // sum_trees.FANOUT)]
        while rows[-1] > 1:
            rows.append(-(-rows[-1] // sum_trees.FANOUT))
        self._nodes = np.zeros((sum(rows), sum_trees.FANOUT))
        self._begins = np.cumsum([0, *rows[:-1]])
        """The first node of each level, from the parents of items to the root."""

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return self._kernels.sum_of_children(self._nodes[-1])

    @property
    def nbytes(self) -> int:
        """The tree's size in bytes."""
        return self._nodes.nbytes

    @property
    def priorities(self) -> np.ndarray:
        """Priorities of all items [size]."""
        return self._nodes.reshape(-1)[: self.size].copy()

    def __getitem__(self, items: np.ndarray) -> np.ndarray:
        """Priorities of items [n]."""
        return self._nodes.reshape(-1)[items]

    def set(self, items: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities [n] of items [n]. If an item occurs twice, its last priority counts."""
        self._kernels.set_priorities(self._nodes, self._begins, items, priorities)

    def find(self, sums: np.ndarray) -> np.ndarray:
        """Items [n] at which the running sum of priorities first exceeds sums [n], each in [0, total).

        Items of priority 0 are never found.
        """
        return self._kernels.find_items(self._nodes, self._begins, sums)
