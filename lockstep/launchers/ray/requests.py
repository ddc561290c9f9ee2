"""The requests of a run's driver to the actors (lockstep.launchers.ray.driver)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Process:
    """The driver's information about a process."""

    name: str
    handle: Any
    steps: int = -1
    """Its progress when it was last polled; -1 until it answers."""
    poll: Any = None
    """The reference to its answer while a poll is open."""
    answered: float = 0.0
    """When it last answered (time.monotonic)."""
    delivered: bool = False
    """Whether one of its rollouts has arrived."""


@dataclass(eq=False)
class Collector:
    """One group of shards that one of the processes collects."""

    index: int
    """The number of the group."""
    shards: range
    process: Process
    generation: int
    """Higher than the generations of its predecessors, whose results are ignored."""
    last: Any = None
    """The reference to its last task, which must end before the next one begins."""


@dataclass(frozen=True)
class Start:
    """The start of a collector."""

    collector: Collector


@dataclass(frozen=True)
class Delivery:
    """Rollouts on their way from a collector to a learner or, if collectors run freely, to all learners that may need
    them."""

    collector: Collector
    number: int
    answers: dict[int, Any]
    """By shard: the reference to its rollout."""
    tries: int = 0
    """How often the delivery failed while the collector was alive."""


@dataclass(frozen=True)
class NextLap:
    """A lap that a free-running collector waits to begin."""

    collector: Collector
    lap: Any
    """Its number, or the reference to it."""
    tries: int = 0


Request = Start | Delivery | NextLap
"""A request that is repeated if it fails."""
