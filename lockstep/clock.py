"""The clock: which version collects which rollout, and which rollouts an iteration learns from.

Version v is the state after v iterations. A scheme's lag k says that rollout i of every shard is collected with version
max(0, i - k), and learned from in iteration i. Nothing of that depends on time. Where timing decides instead
(lockstep.handover.freerun), the ledger records what it decided, and a Recorded clock says it again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.settings import SettingsError

if TYPE_CHECKING:
    from lockstep.agent import Version
    from lockstep.experiment import Experiment

Acting = tuple[tuple[int, int], ...]
"""(step, version) for each version that acts in a rollout, from its first step on."""


class Fill(NamedTuple):
    """What fills a batch slot of an iteration: a shard's rollout, by its number."""

    shard: int
    number: int


@dataclass(frozen=True)
class Clock:
    """Counts iterations and names versions."""

    lag: int
    """Most versions that data may be behind."""
    iterations: int
    shards: int = 1
    by_shard: bool = False
    """Where timing decides: if True (replay), a batch slot takes any number of rollouts, all of its own shard, which
    remembers them; if False exactly one, of any shard."""

    @staticmethod
    def of(experiment: Experiment) -> Clock:
        """The clock of an experiment. Where timing decides it only counts iterations and bounds the lag."""
        clock = experiment.scheme.clock(experiment)
        if type(clock) is not Clock:
            clock.check(experiment.scheme.timing_decides)
        return clock

    def check(self, timing_decides: bool) -> None:
        """Raise SettingsError unless this schedule can be kept: a rollout that waits for a version that is learned from
        itself would never begin."""
        versions = [self.collects_with(i) for i in range(min(self.iterations, 10_000))]
        allowed = all(max(0, i - self.lag) <= version <= i for i, version in enumerate(versions))
        if timing_decides or not allowed or versions != sorted(versions):
            raise SettingsError(
                f"The clock {type(self).__qualname__} has rollouts collected with the versions {versions[:8]} …. With "
                f"scheme.lag={self.lag}, rollout i must be collected with a version from i - {self.lag} to i, later "
                "rollouts with no older one, and no setting may let timing decide (lag or gradient_lag async, preempt)."
            )

    def ticks(self, start: int, stop_after: int | None = None) -> range:
        """Iterations from start to the end, or until stop_after of them exist in all."""
        end = self.iterations if stop_after is None else min(self.iterations, stop_after)
        return range(start, end)

    def collects_with(self, rollout: int) -> int:
        """The version that acts in a rollout, or the oldest that may."""
        return max(0, rollout - self.lag)

    def acting(self, fill: Fill) -> Acting:
        """The versions that act in a rollout."""
        return ((0, self.collects_with(fill.number)),)

    def noise(self, fill: Fill) -> int | None:
        """The number by which the model's noise is drawn in a rollout. None: that of the rollout."""
        return None

    def fills(self, iteration: int) -> list[Fill]:
        """What an iteration learns from, in order of batch slots."""
        return [Fill(shard, iteration) for shard in range(self.shards)]

    def slot(self, fill: Fill) -> int:
        """The batch slot that a rollout fills, whichever the iteration."""
        return fill.shard

    def by_slot(self, iteration: int, slots: range) -> dict[int, list[Fill]]:
        """What an iteration learns from in some batch slots, in order."""
        fills: dict[int, list[Fill]] = {slot: [] for slot in slots}
        for fill in self.fills(iteration):
            if self.slot(fill) in fills:
                fills[self.slot(fill)].append(fill)
        return fills


@dataclass(frozen=True)
class Recorded(Clock):
    """A clock that repeats what a run recorded of what timing decided."""

    events: Sequence[Sequence[Mapping[str, Any]]] = ()
    """By iteration, in order of batch slots: `shard`, `rollout`, the `versions` that acted in it, and the `noise` that
    it was collected with if that is not its own, as in the ledger. None where the lag is a number, which says all
    that."""
    origin: str = ""
    """The run's folder."""
    cuts: Sequence[Sequence[Sequence[int]]] = ()
    """By iteration: (shard, steps) of every rollout that was cut, as in the ledger."""
    updates: Sequence[Sequence[tuple[int, int]]] = ()
    """By iteration, in order: (slot, behind) of all updates, as in the ledger; none where gradients are synchronous."""

    def ticks(self, start: int, stop_after: int | None = None) -> range:
        recorded = max(len(self.events), len(self.cuts), len(self.updates))
        return super().ticks(start, recorded if stop_after is None else min(recorded, stop_after))

    def acting(self, fill: Fill) -> Acting:
        return self._acting[fill] if self.events else super().acting(fill)

    def noise(self, fill: Fill) -> int | None:
        return self._noise.get(fill)

    def slot(self, fill: Fill) -> int:
        return self._slots[fill] if self.events and not self.by_shard else fill.shard

    def fills(self, iteration: int) -> list[Fill]:
        if not self.events:
            return super().fills(iteration)
        return [Fill(event["shard"], event["rollout"]) for event in self.events[iteration]]

    @functools.cached_property
    def cut_after(self) -> dict[Fill, int]:
        """The steps of every rollout that was cut."""
        return {Fill(shard, i): steps for i, cuts in enumerate(self.cuts) for shard, steps in cuts}

    @functools.cached_property
    def _slots(self) -> dict[Fill, int]:
        return {fill: slot for i in range(len(self.events)) for slot, fill in enumerate(self.fills(i))}

    @functools.cached_property
    def _noise(self) -> dict[Fill, int]:
        return {
            Fill(event["shard"], event["rollout"]): event["noise"]
            for slots in self.events
            for event in slots
            if "noise" in event
        }

    @functools.cached_property
    def _acting(self) -> dict[Fill, Acting]:
        return {
            Fill(event["shard"], event["rollout"]): tuple((t, v) for t, v in event["versions"])
            for slots in self.events
            for event in slots
        }


class Versions:
    """The versions that some coming rollout is still to be collected with, or learned with the statistics of."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[int, Version] = {}

    def __getitem__(self, number: int) -> Version:
        return self._held[number]

    def publish(self, version: Version) -> None:
        """Add a version and forget those that no rollout from there on needs."""
        self._held[version.number] = version
        oldest = self._clock.collects_with(version.number)
        self._held = {number: held for number, held in self._held.items() if number >= oldest}

    def held(self) -> dict[int, Version]:
        """All held versions by number, oldest first."""
        return dict(sorted(self._held.items()))
