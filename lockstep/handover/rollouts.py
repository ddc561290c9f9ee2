"""How rollouts get to learners, and versions to collectors: in one process (OwnRollouts) that is a call; between
processes it is shared memory and messages (lockstep.handover.remote)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from lockstep.agent import Agent, Version
from lockstep.clock import Acting, Clock, Fill, Recorded, Versions
from lockstep.collecting.collectors import Collectors, Delivery
from lockstep.runtime.checkpoint import Checkpoint, write_part
from lockstep.runtime.shared import Arena
from lockstep.storage.batches import Filled
from lockstep.storage.slabs import Slabs

Parts = list[dict[str, Any]]
"""What runtime.checkpoint.finish wants to know of each part of a checkpoint."""


@dataclass(frozen=True)
class Arrival:
    """A rollout in the batch slot that it fills."""

    delivery: Delivery
    filled: Filled


class Rollouts(Protocol):
    """Where a learner's rollouts come from."""

    versions: Versions
    """Those that rollouts are still to be collected with, or learned with the statistics of."""
    waited: float
    """Seconds spent waiting for rollouts since it was last set to 0."""
    frames_per_step: int

    def start(self, saved: Checkpoint | None) -> int:
        """Start the environments, or restore them; returns the environment steps that were replayed."""
        ...

    def take(self, iteration: int) -> dict[int, list[Arrival]]:
        """What fills each of this learner's batch slots in an iteration, in order."""
        ...

    def publish(self, version: Version) -> None:
        """Let collectors act with a version. What was taken before may be overwritten from now on."""
        ...

    def own_times(self) -> dict[str, float]:
        """Seconds that this process spent on the rollouts that were last taken, by what on."""
        ...

    def collector_times(self) -> list[dict[str, float]]:
        """The same of processes that only collect, each of which is reported by one learner."""
        ...

    def save(self, directory: Path, iterations: int) -> Parts:
        """Write the shards' parts of a checkpoint after so many iterations."""
        ...

    def close(self) -> None:
        """End collecting."""
        ...


def acting_with(acting: Acting, version: Callable[[int], Version]) -> Callable[[int], Version]:
    """The version_at of Collector.collect where (step, version) pairs were decided before; version looks a version up
    by its number."""
    begins = dict(acting)
    present: list[Version] = []

    def at(t: int) -> Version:
        if t in begins:
            present[:] = [version(begins[t])]
        return present[0]

    return at


def save_shards(
    directory: Path, iterations: int, states: dict[int, dict[str, Tensor]], number: dict[int, int]
) -> Parts:
    """Write shards' states into a checkpoint; number: by shard, of the rollout that comes next."""
    return [
        write_part(directory, iterations, f"shard-{shard:03d}", state, {"rollouts": number[shard]})
        for shard, state in sorted(states.items())
    ]


def restore_shards(saved: Checkpoint, collectors: Collectors, lap: int) -> int:
    """Load shards from a checkpoint, to go on with this lap; returns the environment steps that were replayed."""
    replayed = 0
    for shard in collectors.shards:
        tensors, meta = saved.part(f"shard-{shard:03d}")
        replayed += collectors.load(shard, tensors, meta["rollouts"] - lap)
    return replayed


def slabs_of(agent: Agent, shards: range, clock: Clock, arena: Arena, *, ahead: bool) -> list[Slabs]:
    """Slabs for each collector of one process: one collector if its shards always act with the same version.

    ahead: whether rollouts are collected before the ones before them were learned from.
    """
    if isinstance(clock, Recorded) and clock.events:
        return [Slabs(agent, range(shard, shard + 1), clock.lag + 1, arena) for shard in shards]
    return [Slabs(agent, shards, clock.lag + 1 if ahead else 1, arena)]


class OwnRollouts:
    """Collected in the learner's own process, between its updates."""

    def __init__(self, collectors: Collectors, slots: range, clock: Clock, versions: Versions) -> None:
        self._collectors, self._slots, self._clock, self.versions = collectors, slots, clock, versions
        self._collected: dict[Fill, Delivery] = {}
        self._next = dict.fromkeys(collectors.shards, 0)
        self.waited = 0.0
        self.frames_per_step = collectors.frames_per_step

    def start(self, saved: Checkpoint | None) -> int:
        if saved is not None:
            self._next = dict.fromkeys(self._collectors.shards, saved.iteration)
            return restore_shards(saved, self._collectors, saved.iteration)
        self._collectors.reset()
        return 0

    def take(self, iteration: int) -> dict[int, list[Arrival]]:
        fills = self._clock.by_slot(iteration, self._slots)
        return {slot: [self._take(fill) for fill in of_slot] for slot, of_slot in fills.items()}

    def _take(self, fill: Fill) -> Arrival:
        if fill not in self._collected:
            acting = acting_with(self._clock.acting(fill), self.versions.__getitem__)
            for delivery in self._collectors.collect(fill, acting, self._clock.noise(fill)):
                self._collected[Fill(delivery.shard, delivery.number)] = delivery
        delivery = self._collected.pop(fill)
        self._next[delivery.shard] = delivery.number + 1
        normalizers = self.versions[delivery.first_version].normalizers
        return Arrival(delivery, Filled(self._collectors.rollout(delivery), normalizers))

    def publish(self, version: Version) -> None:
        self.versions.publish(version)

    def own_times(self) -> dict[str, float]:
        return self._collectors.take_times()

    def collector_times(self) -> list[dict[str, float]]:
        return []

    def save(self, directory: Path, iterations: int) -> Parts:
        return save_shards(directory, iterations, self._collectors.state(self._collectors.shards), self._next)

    def close(self) -> None:
        self._collectors.close()
