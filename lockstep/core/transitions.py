"""Items that are drawn from replay, and the minibatches of off-policy losses.

Shape legend: n items, K core state, Z numbers of noise, J steps that are predicted, and for sequences L steps of
burn-in, M steps that are learned from, N steps of a return.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from lockstep.core.arrays import ArrayTuple


class Drawn(ArrayTuple):
    """n items that have been drawn from a replay memory, but not read yet."""

    time: Tensor
    """int64 [n]: the number of each item's first step."""
    environment: Tensor
    """int64 [n]: the environment of each item in its shard."""
    rollout: Tensor | None
    """int64 [n]: the place of the rollout that a sequence begins with; None for single steps."""
    weight: Tensor
    """fp32 [n]: importance weight, not yet divided by the largest of the minibatch."""
    noise: Tensor | None
    """fp32 [Z], uniform in [0, 1): for losses and models that draw numbers."""
    deviation: Tensor | None
    """fp32 [1]: the deviation of returns, by which rewards are divided."""

    def part(self, index: int | Tensor, of: int) -> Drawn:
        """As Transitions.part."""
        if isinstance(index, Tensor):
            rest = self.replace(deviation=None).map(functools.partial(_selected, axis=0, index=index, of=of))
        else:
            rest = self.replace(deviation=None).map(lambda x: x.unflatten(0, (of, -1))[index])
        return rest.replace(deviation=self.deviation)


class Future(ArrayTuple):
    """The J steps that begin with an item's first one."""

    obs: Any
    """[J, n, ...]: the observation after each step."""
    action: Tensor
    """[J, n, *action_shape]"""
    valid: Tensor
    """bool [J, n]: whether the episode had not ended before the step. Its last observation is valid, too."""


class Transitions(ArrayTuple):
    """n items with a leading time axis of length 1. Each leads from a step to the step that it is bootstrapped from.

    Losses may also treat the steps of sequences as items, with a core's outputs as observations. Then this axis is
    longer, and `weight` has it, too.
    """

    obs: Any
    """[1, n, ...]"""
    action: Tensor
    """[1, n, *action_shape]"""
    reward: Tensor
    """fp32 [1, n]: discounted sum of the rewards in between."""
    discount: Tensor
    """fp32 [1, n]: γ to the power of the number of steps in between; 0 if the episode terminated."""
    next_obs: Any
    """[1, n, ...]: the observations that are bootstrapped from."""
    weight: Tensor
    """fp32 [n]: importance weight, not yet divided by the largest of the minibatch."""
    valid: Tensor
    """bool [1, n]: always True, since only valid steps are drawn."""
    noise: Tensor | None
    """fp32 [Z], uniform in [0, 1): for losses and models that draw numbers."""
    future: Future | None = None
    """What followed each item's first observation, for losses that predict it."""

    def part(self, index: int | Tensor, of: int) -> Transitions:
        """Part `index` of the items, which are split into this many equal parts.

        Args:
            index: a number, or int64 [1] on the items' device, which a CUDA graph can read.
        """
        if isinstance(index, Tensor):
            along = functools.partial(_selected, index=index, of=of)
            rest = self.replace(weight=None, noise=None).map(functools.partial(along, axis=1))
            noise = None if self.noise is None else along(self.noise, axis=0)
            return rest.replace(weight=along(self.weight, axis=0), noise=noise)
        items, numbers = len(self.weight) // of, 0 if self.noise is None else len(self.noise) // of
        noise = None if self.noise is None else self.noise[index * numbers : (index + 1) * numbers]
        chosen = slice(index * items, (index + 1) * items)
        rest = self.replace(weight=None, noise=None)[:, chosen]
        return rest.replace(weight=self.weight[chosen], noise=noise)


def _selected(x: Tensor, axis: int, index: Tensor, of: int) -> Tensor:
    return x.unflatten(axis, (of, -1)).index_select(axis, index).squeeze(axis)


class Sequences(ArrayTuple):
    """n sequences of L + M + N steps: L steps of burn-in, which only advance the core's state, M steps that are learned
    from, and N steps after them that returns are bootstrapped from."""

    obs: Any
    """[L+M+N, n, ...]"""
    start: Tensor
    """bool [L+M+N, n]: whether obs_t is the first of its episode, before which the core's state is reset."""
    prev_action: Tensor | None
    """[L+M+N, n, *action_shape], for models that see it."""
    prev_reward: Tensor | None
    """fp32 [L+M+N, n]"""
    state: Tensor
    """fp32 [n, K]: the core's state before the first step, as it was when the sequence was collected."""
    action: Tensor
    """[M, n, *action_shape]"""
    reward: Tensor
    """fp32 [M, n]: discounted sum of the rewards before the step that the return is bootstrapped from."""
    discount: Tensor
    """fp32 [M, n]: γ to the power of the number of steps until there; 0 if the episode terminated."""
    ahead: Tensor
    """int64 [M, n]: this number of steps, N unless the episode ended before."""
    weight: Tensor
    """fp32 [n]: importance weight, not yet divided by the largest of the minibatch."""
    valid: Tensor
    """bool [M, n]: False on reset steps."""
    noise: Tensor | None
    """fp32 [Z], uniform in [0, 1): for losses and models that draw numbers."""
