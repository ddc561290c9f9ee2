"""A sum tree: draws items in proportion to their priorities, and changes many priorities at once.

Every inner node is the sum of its two children, computed anew whenever one changes. So the sums depend on the present
priorities alone, not on the order in which they came, and rounding errors do not add up.
"""

from __future__ import annotations

import numpy as np


class SumTree:
    """Priorities of a fixed number of items, in float64.

    Args:
        size: number of items, which have priority 0 at first.
    """

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(0, (size - 1).bit_length())
        self._nodes = np.zeros(2 * self._leaves)
        self._levels = self._leaves.bit_length() - 1
        self.size = size

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._nodes[1])

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self._nodes.nbytes

    @property
    def priorities(self) -> np.ndarray:
        """Of all items [size]."""
        return self._nodes[self._leaves : self._leaves + self.size].copy()

    def __getitem__(self, items: np.ndarray) -> np.ndarray:
        """Priorities of items [n]."""
        return self._nodes[self._leaves + items]

    def set(self, items: np.ndarray, priorities: np.ndarray | float) -> None:
        """Change the priorities of items [n]; of an item that is named twice, the last one counts."""
        nodes = self._leaves + items
        self._nodes[nodes] = priorities
        for _ in range(self._levels):
            nodes = nodes >> 1
            if len(nodes) > 64:
                nodes = np.unique(nodes)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: np.ndarray) -> np.ndarray:
        """Items [n] at which the running sum of priorities first exceeds sums [n], each in [0, total).

        Items of priority 0 are never found.
        """
        nodes, left = np.ones(len(sums), np.int64), sums.astype(np.float64)
        for _ in range(self._levels):
            nodes = 2 * nodes
            below = self._nodes[nodes]
            # Rounding may leave a remainder for a branch that is empty: then it is the other's.
            right = (left >= below) & (self._nodes[nodes + 1] > 0) | (below == 0)
            left = np.where(right, left - below, left)
            nodes += right
        return nodes - self._leaves
