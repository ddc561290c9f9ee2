"""Players of Connect Four that look ahead, to measure trained ones against.

    lockstep eval RUN --opponents benchmarks/connect_four.py:two_plies --episodes 200

Each is what `--opponents` and `--env.opponents` take: (observation, action space, generator) -> action.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

COLUMNS, ROWS = 7, 6
_WIN = 1000
_SHIFTS = (1, ROWS, ROWS + 1, ROWS + 2)
"""Between neighbors of a line on a board whose columns have one cell more than they hold: up, and the three others."""


def one_ply(observation: Any, space: spaces.Discrete, draw: np.random.Generator) -> int:
    """Wins if it can, and plays at random otherwise."""
    return choose(observation, 1, draw)


def two_plies(observation: Any, space: spaces.Discrete, draw: np.random.Generator) -> int:
    """Also prevents that the other one wins at once."""
    return choose(observation, 2, draw)


def four_plies(observation: Any, space: spaces.Discrete, draw: np.random.Generator) -> int:
    """Two moves of each side."""
    return choose(observation, 4, draw)


def choose(observation: Any, plies: int, draw: np.random.Generator) -> int:
    """One of the columns that are best as far as so many plies show."""
    planes = np.asarray(observation["observation"], bool)
    heights = planes.any(-1).sum(0)
    own = other = 0
    for column in range(COLUMNS):
        for level in range(int(heights[column])):
            cell = 1 << (column * (ROWS + 1) + level)
            if planes[ROWS - 1 - level, column, 0]:
                own |= cell
            else:
                other |= cell
    values = {
        column: value_of(own, other, column, heights.tolist(), plies)
        for column in range(COLUMNS)
        if heights[column] < ROWS
    }
    best = max(values.values())
    return int(draw.choice([column for column, value in values.items() if value == best]))


def value_of(own: int, other: int, column: int, heights: list[int], plies: int) -> int:
    """What a move is worth for who makes it: positive if it wins within so many plies, the more the sooner."""
    own |= 1 << (column * (ROWS + 1) + heights[column])
    if has_won(own):
        return _WIN + plies
    if plies == 1:
        return 0
    after = [*heights[:column], heights[column] + 1, *heights[column + 1 :]]
    replies = [value_of(other, own, c, after, plies - 1) for c in range(COLUMNS) if after[c] < ROWS]
    return -max(replies, default=0)


def has_won(stones: int) -> bool:
    """Whether there are four in a row."""
    for shift in _SHIFTS:
        pairs = stones & stones >> shift
        if pairs & pairs >> 2 * shift:
            return True
    return False
