"""One shard's rollout, T steps of B environments in preallocated memory, and the facts about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lockstep.core.arrays import ArrayTuple
from lockstep.core.schedule import Acting, LapId, RolloutId


class Rollout(ArrayTuple):
    """Time runs over the first axis, environments over the second; index t is always "at step t".

    If obs_t was the last observation of its episode, the environment spends step t on its reset: the action and reward
    of step t mean nothing, and valid_t is False.

    A rollout that was preempted (lockstep.collectors.preemption) is padded with copies of its last observation and
    action. valid_t is False in the padding. truncated_t is True at the last step, so that the return is bootstrapped
    from the last observation, although the episode continues in the next rollout.
    """

    obs: Any
    """[T+1, B, ...] raw observations; the last one serves only for bootstrapping."""
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
    """bool [T, B]: False on reset steps and in padding, which no loss and no statistic counts."""
    core_state: Tensor
    """fp32 [B, K]: core state before obs_0."""
    policy: Tensor | None = None
    """fp32 [T, B, P]: parameters of the distributions that actions were drawn from, if the algorithm needs them."""


class Episode(NamedTuple):
    """The numbers of a training episode."""

    score: float
    """Sum of its raw rewards."""
    length: int
    """In environment steps."""
    metrics: tuple[float, ...] = ()
    """What the environment reported of it, in the order of env.metrics; NaN where it reported nothing."""


@dataclass(frozen=True)
class RolloutInfo:
    """The facts about a collected rollout; the buffer holds its data."""

    shard: int
    number: int
    """Which of the shard's rollouts this is, counted from 0 over the whole run."""
    lap: int
    """The same, counted since buffers were allocated. It differs from number in a resumed free-running run."""
    versions: Acting
    moments: np.ndarray
    """float64: what it adds to the normalizers. An array, since torch would send a tensor through files and sockets."""
    digests: dict[str, str]
    """The digest of each field."""
    episodes: list[Episode]
    """The episodes that ended in it."""
    preempted_after: int | None = None
    """The number of its steps if it was preempted; None if it has all of them."""
    noise: int | None = None
    """The number that seeded the model's noise, unless it is this rollout's own. Shards that act together share their
    noise, and in a resumed free-running run their rollouts may have different numbers."""
    not_finite: str = ""
    """Which environment first returned NaN or an infinity since the process began, and when; empty if none did."""

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
