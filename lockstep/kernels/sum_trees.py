"""Sum trees (lockstep.buffers.sum_tree), with the bits of NumPy's sums.

Shape legend: L levels, N nodes with 16 children each, those of the first level first and the root last, n items.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled

FANOUT = 16
"""Children of a node."""
_LANES = 8


@compiled
def sum_of_children(children: np.ndarray) -> float:
    """Sum of 16 numbers, float64 [16], as NumPy adds them: eight partial sums, and these in pairs."""
    sums = np.empty(_LANES)
    for lane in range(_LANES):
        sums[lane] = children[lane] + children[lane + _LANES]
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))


@compiled
def set_priorities(nodes: np.ndarray, begins: np.ndarray, items: np.ndarray, priorities: np.ndarray) -> None:
    """Set priorities, and renew the sums above them.

    Args:
        nodes: the children of each node, float64 [N, 16].
        begins: the first node of each level, int64 [L].
        items: int64 [n]. If one occurs twice, its last priority counts.
        priorities: float64 [n].
    """
    flat = nodes.reshape(nodes.size)
    for i in range(len(items)):
        flat[items[i]] = priorities[i]
    places = items.copy()
    for level in range(len(begins) - 1):
        above = begins[level + 1] * FANOUT
        for i in range(len(places)):
            place = places[i] // FANOUT
            if i == 0 or place != places[i - 1]:
                flat[above + place] = sum_of_children(nodes[begins[level] + place])
            places[i] = place


@compiled
def find_items(nodes: np.ndarray, begins: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The items [n] at which the running sum of priorities first exceeds sums, float64 [n]."""
    found, running = np.empty(len(sums), np.int64), np.empty(FANOUT)
    for i in range(len(sums)):
        node, left = 0, sums[i]
        for level in range(len(begins) - 1, -1, -1):
            children, total, passed, last = nodes[begins[level] + node], 0.0, 0, FANOUT - 1
            for j in range(FANOUT):
                total += children[j]
                running[j] = total
                passed += total <= left
            # Rounding may leave more than the sum of all children. Then take the last child that is not empty.
            while last > 0 and not children[last] > 0:
                last -= 1
            child = min(passed, last)
            if child > 0:
                left -= running[child - 1]
            node = node * FANOUT + child
        found[i] = node
    return found
