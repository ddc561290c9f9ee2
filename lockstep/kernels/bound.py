"""The functions that models and environments provide for compiled rollouts. This module does not import Numba.

Shape legend: B environments of a shard, N noise numbers, W parameters of a distribution, E extra
features and K numbers of the state of cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Bound(NamedTuple):
    """A compiled function and its first arguments."""

    function: Any
    arguments: tuple[Any, ...]


class ActionKernels(NamedTuple):
    """What a distribution of actions computes, as compiled functions."""

    sample: Any
    """Writes actions: policy float32 [B, W], noise float32 [B, N], action [B, ...]."""
    log_prob: Any
    """Writes log-probabilities: policy float32 [B, W], action [B, ...], out float32 [B]."""
    send: Any
    """Writes what environments receive: action [B, ...], limits, sent [B, ...]."""
    encode: Any
    """Writes what models see of actions: action [B, ...], out float32 [B, E or more], whose other numbers stay."""
    limits: Any
    """An array that `send` takes."""


class PolicyKernels(NamedTuple):
    """What a model computes when it acts, as compiled functions."""

    evaluate: Bound
    """From raw observations [B, ...] to policy float32 [B, W] and value float32 [B]. It also takes, for cores, extra
    features float32 [B, E], where episodes start, bool [B], and the state, float32 [B, K], which it replaces by that
    after the step."""
    extra: int
    """E: 0, or the numbers of an encoded action and a reward."""
    actions: ActionKernels

    def arguments(self, noise: Any, obs: Any, fields: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arrays that a step and a whole rollout read and write, in the order of lockstep.kernels.rollout.

        Args:
            noise: float32 [T, A, N].
            obs: [T+1, A, ...].
            fields: arrays of the acting batch: start, actions and rewards, log_prob and value, and the state of cores.
        """
        memory = self.extra, fields["state"], fields["start"]
        return noise, memory, obs, *(fields[name] for name in ("actions", "rewards", "log_prob", "value"))
