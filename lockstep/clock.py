"""The clock: which version collects which rollout.

Version v is the state after v iterations. A scheme's lag k says that rollout i is collected with version
max(0, i - k). Nothing here depends on time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from lockstep.experiment import Experiment

T = TypeVar("T")


@dataclass(frozen=True)
class Clock:
    """Counts iterations and names versions."""

    lag: int
    iterations: int

    @staticmethod
    def of(experiment: Experiment) -> Clock:
        """The clock of an experiment."""
        return Clock(experiment.scheme.lag, experiment.iterations)

    def ticks(self, start: int, stop_after: int | None = None) -> Iterator[int]:
        """Iterations from start to the end, or until stop_after of them exist in all."""
        end = self.iterations if stop_after is None else min(self.iterations, stop_after)
        return iter(range(start, end))

    def collects_with(self, rollout: int) -> int:
        """The version that acts in a rollout."""
        return max(0, rollout - self.lag)


class Versions(Generic[T]):
    """The versions that some coming rollout is still to be collected with."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[int, T] = {}

    def __getitem__(self, version: int) -> T:
        return self._held[version]

    def publish(self, version: int, state: T) -> None:
        """Add the state after `version` iterations and forget those that no rollout from there on needs."""
        self._held[version] = state
        oldest = self._clock.collects_with(version)
        self._held = {v: held for v, held in self._held.items() if v >= oldest}

    def held(self) -> dict[int, T]:
        """All held versions, oldest first."""
        return dict(sorted(self._held.items()))
