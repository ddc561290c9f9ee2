"""Records of the gradient steps of an iteration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lockstep.algorithms.base import ParameterGroup


class Applied(NamedTuple):
    """How a gradient was applied."""

    slot: int | None
    """The batch slot of the gradient; None for the global gradient."""
    behind: int
    """Updates between computing the gradient and applying it."""


class Computed(NamedTuple):
    """A global gradient that has not been applied yet."""

    gradient: Tensor
    iteration: int
    step: int
    """The number of its step, as Algorithm.groups counts."""
    groups: tuple[ParameterGroup, ...]
    """The parameters that it changes, and the rates, as decided when it was computed."""


@dataclass
class Steps:
    """Sums over the gradient steps of an iteration so far."""

    sums: Tensor
    """float64: the number of valid samples, then the sum of every metric."""
    updates: int = 0
    norms: float | Tensor = 0.0
    """The sum of norms of the gradients that were applied."""
    moved: int = 0
    """How many gradients were applied."""
    digests: dict[int, str] = field(default_factory=dict)
    """As LearningReport.gradient_digests."""
    applied: dict[int, Applied] = field(default_factory=dict)
    """As LearningReport.applied."""


@dataclass(frozen=True)
class LearningReport:
    """The outcome of one iteration's gradient steps. It is equal in every process, except for digests and the gradients
    that the process applied."""

    metrics: dict[str, float]
    updates: int
    gradient_digests: dict[int, str]
    """By batch slot: the digest of its gradient in the iteration's first step, before the reduction. Later steps follow
    from it, and hashing all of them would cost up to a tenth of the time for learning from small minibatches."""
    applied: dict[int, Applied]
    """By place among the iteration's updates: the gradients that this process applied."""
    seconds: float
    """Time spent learning, without waiting for other processes."""
