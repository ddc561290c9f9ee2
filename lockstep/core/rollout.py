"""One shard's rollout: T steps of B environments in preallocated memory, and what is known of it beside that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.core.arrays import ArrayTuple
from lockstep.core.schedule import Acting, LapId, RolloutId


class Rollout(ArrayTuple):
    """Time runs over the first axis, environments over the second; index t is always "at step t".

    A slot whose observation was the last of its episode holds the step that the environment spent on its reset:
    its action and reward mean nothing, and valid_t is False.

    A rollout that was cut (lockstep.collectors.preemption) holds copies of its last observation behind it, and of the
    action on that. valid_t is False there, and truncated_t True at its last step, which is bootstrapped from that
    observation, although the episode goes on in the next rollout.
    """

    obs: Any
    """[T+1, B, ...] raw observations; the last one is only bootstrapped from."""
    start: Tensor
    """bool [T+1, B]: obs_t is the first of its episode (for the agent: a lost life counts under `classic`)."""
    action: Tensor
    """[T, B, *action_shape]"""
    reward: Tensor
    """fp32 [T, B]: the reward that a_t earned, clipped if the experiment says so, never normalised."""
    prev_action: Tensor | None
    """[T+1, B, *action_shape], overlapping action: prev_action_t = action_{t-1}."""
    prev_reward: Tensor | None
    """fp32 [T+1, B], overlapping reward."""
    log_prob: Tensor
    """fp32 [T, B]: log-probability of a_t under the policy that collected it."""
    value: Tensor
    """fp32 [T+1, B]: value of obs_t under the version that collected it; the last row only where targets are computed
    from it."""
    terminated: Tensor
    """bool [T, B]: the episode ended with a_t; nothing is bootstrapped."""
    truncated: Tensor
    """bool [T, B]: a time limit cut the episode after a_t, or preemption the rollout; obs_{t+1} is the true last
    observation."""
    valid: Tensor
    """bool [T, B]: False on reset steps, and behind a cut: they count in no loss and no statistic."""
    core_state: Tensor
    """fp32 [B, K]: core state before obs_0."""


@dataclass(frozen=True)
class RolloutInfo:
    """A shard's rollout that was collected: all that is known of it beside the buffer that holds it."""

    shard: int
    number: int
    """Which of the shard's rollouts this is, counted from 0 over the whole run."""
    lap: int
    """The same, counted since buffers were allocated. It differs from number in a resumed free-running run."""
    versions: Acting
    moments: np.ndarray
    """float64: what it adds to the normalizers. No tensor, which torch would send through files and sockets."""
    digests: dict[str, str]
    """Of each field."""
    episodes: list[tuple[float, int]]
    """(raw score, length in steps) of the episodes that ended in it."""
    cut: int | None = None
    """The steps that it has if it was cut, fewer than rollouts have."""
    noise: int | None = None
    """The number by which the model's noise was drawn, where that is not this rollout's: shards that act together share
    it, and after a free-running run was resumed their rollouts need not have one number."""
    not_finite: str = ""
    """The first number of environments, since the process began, that was NaN or infinite: whose, and when."""

    @property
    def rollout_id(self) -> RolloutId:
        """Which rollout this is, over the whole run."""
        return RolloutId(self.shard, self.number)

    @property
    def lap_id(self) -> LapId:
        """Which lap collected it, which tells its buffer."""
        return LapId(self.shard, self.lap)

    @property
    def first_version(self) -> int:
        """The number of the version that began to collect it."""
        return self.versions[0][1]
