"""What losses off-policy are given: items drawn from replay."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.arrays import ArrayTuple


class Transitions(ArrayTuple):
    """n items, each from a step to the one that it is bootstrapped from, with a leading time axis of length 1."""

    obs: Any
    action: Tensor
    reward: Tensor
    """fp32 [1, n]: discounted sum of the rewards in between."""
    discount: Tensor
    """fp32 [1, n]: γ to the number of steps in between; 0 where the episode terminated."""
    next_obs: Any
    weight: Tensor
    """fp32 [n]: importance weight, not yet divided by the largest of the minibatch."""
    valid: Tensor
    """bool [1, n]: always True, since only valid steps are drawn."""
    noise: Tensor | None
    """fp32 [Z], uniform in (0, 1): for losses and models that draw numbers."""
