"""The replayed items that kernels learn from.

Shape legend: S slices, N items of all slices, D numbers of an observation, A of an action.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Items(NamedTuple):
    """Replayed items, one slice after the other. Kernels take them as a plain tuple, whose type Numba finds faster than
    that of a named one. Before, arrays may have another first axis, that of gradient steps."""

    obs: np.ndarray
    """As layers see it, float32 [N, D]."""
    action: np.ndarray
    """float32 [N, A], or int64 [N]."""
    reward: np.ndarray
    """float32 [N], like discount and weight."""
    discount: np.ndarray
    next_obs: np.ndarray
    """float32 [N, D]."""
    weight: np.ndarray
    """The weight of each item's loss."""
    noise: np.ndarray
    """Uniform numbers of every slice, one slice after the other: float32 [Z], in the order that the kernel names."""
