"""A perfect player of Tic-Tac-Toe, to measure trained ones against.

    lockstep eval RUN --opponents benchmarks/tic_tac_toe.py:perfect --episodes 200

Who plays as well as can be draws with it: the best score is 0.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from gymnasium import spaces

LINES = [0b111, 0b111000, 0b111000000, 0b1001001, 0b10010010, 0b100100100, 0b100010001, 0b1010100]
FULL = (1 << 9) - 1


def perfect(observation: Any, space: spaces.Discrete, draw: np.random.Generator) -> int:
    """One of the moves that keep what can be had against any player, drawn among these."""
    planes = np.asarray(observation["observation"], bool).reshape(9, 2)
    own, other = (sum(1 << int(cell) for cell in np.flatnonzero(planes[:, i])) for i in (0, 1))
    moves = {cell: -value(other, own | 1 << cell) for cell in range(9) if not (own | other) >> cell & 1}
    best = max(moves.values())
    return int(draw.choice([cell for cell, worth in moves.items() if worth == best]))


@functools.cache
def value(own: int, other: int) -> int:
    """What best play leads to for who is to move: 1, 0 or -1."""
    if any(line & other == line for line in LINES):
        return -1
    if own | other == FULL:
        return 0
    return max(-value(other, own | 1 << cell) for cell in range(9) if not (own | other) >> cell & 1)
