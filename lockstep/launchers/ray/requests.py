"""What the driver of a run has requested from the actors (lockstep.launchers.ray.driver)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Actor:
    """A process, as the driver knows it."""

    name: str
    handle: Any
    steps: int = -1
    """Its progress when it was last polled; -1 until it answers."""
    poll: Any = None
    """The reference to its answer while a poll is open."""
    last: Any = None
    """The reference to a collector's last task, which must end before the next one begins."""
    generation: int = 0
    """Of a collector: higher than those of its predecessors."""


@dataclass(frozen=True)
class Start:
    """The start of a collector's work."""

    collector: Actor
    index: int


@dataclass(frozen=True)
class Delivery:
    """Rollouts on their way from a collector to a learner or, if collectors run freely, to all that may need them."""

    collector: Actor
    number: int
    answers: dict[int, Any]
    """By shard: the reference to its rollout."""


@dataclass(frozen=True)
class NextLap:
    """A lap that a free-running collector waits to begin."""

    collector: Actor
    index: int
    lap: Any
    """Its number, or the reference to it."""


Request = Start | Delivery | NextLap
"""A request that is repeated if it did not come through."""
