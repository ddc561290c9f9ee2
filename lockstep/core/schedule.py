"""The schedule says which version collects which rollout, and which rollouts an iteration learns from.

Version v is the state after v iterations. A scheme's lag k says that rollout i of every shard is collected with version
max(0, i - k), and learned from in iteration i. None of this depends on timing. If timing decides instead
(lockstep.transport.free_running), the ledger records its decisions, and a Recorded schedule repeats them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.config.settings import SettingsError

Acting = tuple[tuple[int, int], ...]
"""(first step, version) for each version that acts in a rollout, in order."""


class LapId(NamedTuple):
    """A shard's rollout by its lap. Laps count rollouts since buffers were allocated, so they determine the buffer."""

    shard: int
    lap: int


class RolloutId(NamedTuple):
    """A shard's rollout by its number, counted over the whole run. Rollouts fill the batch slots of iterations."""

    shard: int
    number: int

    @property
    def scheduled_lap(self) -> LapId:
        """The lap that collects this rollout, unless timing decides. A schedule's laps have the numbers of rollouts."""
        return LapId(*self)


@dataclass(frozen=True)
class Schedule:
    """Says which version collects each rollout, and which rollouts each iteration learns from."""

    lag: int
    """The largest number of versions that data may be behind."""
    iterations: int
    """Iterations of the whole run."""
    shards: int = 1
    by_shard: bool = False
    """Only used if timing decides. True (replay): a batch slot takes any number of rollouts, all from its own shard.
    False: it takes exactly one rollout from any shard."""

    def check(self, timing_decides: bool) -> None:
        """Raise SettingsError unless this schedule can be followed. A rollout must not wait for a version that learns
        from this rollout."""
        versions = [self.collects_with(i) for i in range(min(self.iterations, 10_000))]
        allowed = all(max(0, i - self.lag) <= version <= i for i, version in enumerate(versions))
        if timing_decides or not allowed or versions != sorted(versions):
            raise SettingsError(
                f"The schedule {type(self).__qualname__} collects rollouts with the versions {versions[:8]} …. With "
                f"scheme.lag={self.lag}, rollout i must be collected with a version from i - {self.lag} to i, later "
                "rollouts with the same version or a newer one, and no setting may let timing decide (lag or "
                "gradient_lag async, preempt)."
            )

    def iterations_from(self, start: int, stop_after: int | None = None) -> range:
        """The iterations from `start` to the end of the run, or to stop_after if it comes first."""
        end = self.iterations if stop_after is None else min(self.iterations, stop_after)
        return range(start, end)

    def collects_with(self, rollout: int) -> int:
        """The version that acts in a rollout; if timing decides, the oldest version that may act."""
        return max(0, rollout - self.lag)

    def acting(self, rollout_id: RolloutId) -> Acting:
        """The versions that act in a rollout."""
        return ((0, self.collects_with(rollout_id.number)),)

    def noise(self, rollout_id: RolloutId) -> int | None:
        """The number that seeds the model's noise in a rollout. None: the rollout's own number."""
        return None

    def rollout_ids(self, iteration: int) -> list[RolloutId]:
        """The rollouts that an iteration learns from, in order of batch slots."""
        return [RolloutId(shard, iteration) for shard in range(self.shards)]

    def slot(self, rollout_id: RolloutId) -> int:
        """The batch slot that a rollout fills, in any iteration."""
        return rollout_id.shard

    def by_slot(self, iteration: int, slots: range) -> dict[int, list[RolloutId]]:
        """The rollouts that an iteration learns from in some batch slots, in order."""
        rollout_ids: dict[int, list[RolloutId]] = {slot: [] for slot in slots}
        for rollout_id in self.rollout_ids(iteration):
            if self.slot(rollout_id) in rollout_ids:
                rollout_ids[self.slot(rollout_id)].append(rollout_id)
        return rollout_ids


@dataclass(frozen=True)
class Recorded(Schedule):
    """A schedule that repeats the timing decisions that a run recorded."""

    events: Sequence[Sequence[Mapping[str, Any]]] = ()
    """By iteration, in order of batch slots, as in the ledger: `shard`, `rollout`, the `versions` that acted in it, and
    the number that seeded its `noise` if this is not the rollout's own. Empty if the lag is a number, which determines
    all of this."""
    origin: str = ""
    """The folder of the recorded run."""
    cuts: Sequence[Sequence[Sequence[int]]] = ()
    """By iteration: (shard, steps) of every rollout that was preempted, as in the ledger."""
    updates: Sequence[Sequence[tuple[int, int]]] = ()
    """By iteration: (slot, behind) of all updates in order, as in the ledger. Empty if gradients are synchronous."""

    def iterations_from(self, start: int, stop_after: int | None = None) -> range:
        recorded = max(len(self.events), len(self.cuts), len(self.updates))
        return super().iterations_from(start, recorded if stop_after is None else min(recorded, stop_after))

    def acting(self, rollout_id: RolloutId) -> Acting:
        return self._acting[rollout_id] if self.events else super().acting(rollout_id)

    def noise(self, rollout_id: RolloutId) -> int | None:
        return self._noise.get(rollout_id)

    def slot(self, rollout_id: RolloutId) -> int:
        return self._slots[rollout_id] if self.events and not self.by_shard else rollout_id.shard

    def rollout_ids(self, iteration: int) -> list[RolloutId]:
        if not self.events:
            return super().rollout_ids(iteration)
        return [RolloutId(event["shard"], event["rollout"]) for event in self.events[iteration]]

    @functools.cached_property
    def preempted_after(self) -> dict[RolloutId, int]:
        """By rollout that was preempted: its number of steps."""
        return {RolloutId(shard, i): steps for i, cuts in enumerate(self.cuts) for shard, steps in cuts}

    @functools.cached_property
    def _slots(self) -> dict[RolloutId, int]:
        return {
            rollout_id: slot for i in range(len(self.events)) for slot, rollout_id in enumerate(self.rollout_ids(i))
        }

    @functools.cached_property
    def _noise(self) -> dict[RolloutId, int]:
        return {
            RolloutId(event["shard"], event["rollout"]): event["noise"]
            for slots in self.events
            for event in slots
            if "noise" in event
        }

    @functools.cached_property
    def _acting(self) -> dict[RolloutId, Acting]:
        return {
            RolloutId(event["shard"], event["rollout"]): tuple((t, v) for t, v in event["versions"])
            for slots in self.events
            for event in slots
        }
