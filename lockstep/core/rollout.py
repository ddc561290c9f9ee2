"""One shard's rollout: T steps of B environments in preallocated memory, and information about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lockstep.core.arrays import ArrayTuple
from lockstep.core.schedule import Acting, LapId, RolloutId


class Rollout(ArrayTuple):
    """The first axis is time, and the second axis is environments. Index t always means "at step t".

    If obs_t was the last observation of its episode, the environment spends step t on its reset. The action and reward
    of step t have no meaning, and valid_t is False.

    A rollout that was preempted (lockstep.collectors.preemption) is padded with copies of its last observation and
    action. valid_t is False in the padding. truncated_t is True at the last step, so that the return is bootstrapped
    from the last observation, although the episode continues in the next rollout.
    """

    obs: Any
    """[T+1, B, ...]: raw observations. The last one is only used for bootstrapping."""
    start: Tensor
    """bool [T+1, B]: whether obs_t is the first of its episode. Under `classic`, a lost life also begins an episode for
    the agent."""
    action: Tensor
    """[T, B, *action_shape]"""
    reward: Tensor
    """fp32 [T, B]: the reward that a_t earned, clipped if the experiment says so, and never normalized."""
    prev_action: Tensor | None
    """[T+1, B, *action_shape], overlapping action: prev_action_t = action_{t-1}."""
    prev_reward: Tensor | None
    """fp32 [T+1, B], overlapping reward."""
    log_prob: Tensor
    """fp32 [T, B]: log-probability of a_t under the policy that collected it."""
    value: Tensor
    """fp32 [T+1, B]: value of obs_t under the version that collected it. The last row is only computed if targets or
    first priorities need it."""
    terminated: Tensor
    """bool [T, B]: whether the episode ended with a_t, so that nothing is bootstrapped."""
    truncated: Tensor
    """bool [T, B]: whether a time limit cut the episode after a_t, or preemption cut the rollout. obs_{t+1} is the true
    last observation."""
    valid: Tensor
    """bool [T, B]: False on reset steps and in padding, which losses and statistics ignore."""
    core_state: Tensor
    """fp32 [B, K]: core state before obs_0."""
    policy: Tensor | None = None
    """fp32 [T, B, P]: parameters of the distributions that actions were drawn from, if the algorithm needs them."""


class Episode(NamedTuple):
    """The numbers of a training episode."""

    score: float
    """The sum of its raw rewards."""
    length: int
    """Its number of environment steps."""
    metrics: tuple[float, ...] = ()
    """The environment's metrics of the episode, in the order of env.metrics; NaN for metrics that it did not report."""


@dataclass(frozen=True)
class RolloutInfo:
    """Information about a collected rollout. A buffer holds its data."""

    shard: int
    number: int
    """The number of the rollout among the shard's, counted from 0 over the whole run."""
    lap: int
    """The same, counted since buffers were allocated. It differs from number in a resumed free-running run."""
    versions: Acting
    """The versions that acted."""
    moments: np.ndarray
    """float64: the sums that it adds to the normalizers. This is an array, since torch would send a tensor to other
    processes through files and sockets."""
    digests: dict[str, str]
    """The digest of each field."""
    episodes: list[Episode]
    """The episodes that ended in it."""
    preempted_after: int | None = None
    """The number of its steps if it was preempted; None if it is complete."""
    noise: int | None = None
    """The number that seeded the model's noise; None if it is this rollout's own number. Shards that act together share
    their noise, and in a resumed free-running run, their rollouts may have different numbers."""
    not_finite: str = ""
    """Which environment first returned NaN or an infinity since the process began, and when; empty if none did."""

    @property
    def rollout_id(self) -> RolloutId:
        """The rollout's identity in the whole run."""
        return RolloutId(self.shard, self.number)

    @property
    def lap_id(self) -> LapId:
        """The lap that collected it, which determines its buffer."""
        return LapId(self.shard, self.lap)

    @property
    def first_version(self) -> int:
        """The number of the version that began to collect it."""
        return self.versions[0][1]
