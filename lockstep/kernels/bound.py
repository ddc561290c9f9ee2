"""What models and environments hand over for a rollout in one compiled call. Nothing here imports Numba.

Shape legend: B environments of a shard, N noise numbers, W parameters of a distribution, K numbers of a core's state.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Bound(NamedTuple):
    """A compiled function, and the arguments that it begins with."""

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
    limits: Any
    """An array that `send` takes."""


class PolicyKernels(NamedTuple):
    """What a model computes when it acts, as compiled functions."""

    evaluate: Bound
    """From raw observations [B, ...] to policy float32 [B, W] and value float32 [B]. It also takes where episodes
    start, bool [B], and the state of cores, float32 [B, K], which it replaces by that after the step."""
    actions: ActionKernels
