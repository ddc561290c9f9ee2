"""One shard's rollout: T steps of B environments in preallocated memory, written once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.arrays import ArrayTuple


class Rollout(ArrayTuple):
    """Time runs over the first axis, environments over the second; index t is always "at step t".

    A slot whose observation was the last of its episode holds the step that the environment spent on its reset:
    its action and reward mean nothing, and valid_t is False.

    A rollout that was cut (lockstep.collecting.preemption) holds copies of its last observation behind it, and of the
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
