"""The interface that brings rollouts to learners and versions to collectors. In one process, these are calls
(LocalRollouts). Processes of one machine use shared memory (lockstep.transport.processes), and different machines use
messages (lockstep.transport.messages)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from lockstep.agent import Agent
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.collectors.collectors import Collectors
from lockstep.core.schedule import Acting, Recorded, RolloutId, Schedule
from lockstep.distributed.shared_memory import Arena
from lockstep.models.versions import Version, Versions
from lockstep.run.checkpoint import Checkpoint, write_part

Parts = list[dict[str, Any]]
"""For each part of a checkpoint: the record that lockstep.run.checkpoint.finish needs."""


class RolloutSource(Protocol):
    """A learner's source of rollouts."""

    versions: Versions
    """The versions that will still collect rollouts, or whose statistics are still needed to learn."""
    waited: float
    """Seconds spent waiting for rollouts since it was last set to 0."""
    frames_per_step: int
    """The environments' frames per step."""
    keeps_versions: bool
    """Whether a version may still be used while learning changes the parameters."""

    def start(self, saved: Checkpoint | None) -> int:
        """Start the environments, or restore them. Returns the number of environment steps that were replayed."""
        ...

    def take(self, iteration: int) -> dict[int, list[CollectedRollout]]:
        """The rollouts that fill each of this learner's batch slots in an iteration, in order."""
        ...

    def publish(self, version: Version) -> None:
        """Let collectors act with a version. Rollouts that were taken before may be overwritten from now on."""
        ...

    def own_times(self) -> dict[str, float]:
        """Seconds that this process spent on each activity for the rollouts that were last taken."""
        ...

    def collector_times(self) -> list[dict[str, float]]:
        """The same for processes that only collect. One learner reports each of them."""
        ...

    def save(self, directory: Path, iterations: int) -> Parts:
        """Write the shards' parts of a checkpoint after this many iterations."""
        ...

    def close(self) -> None:
        """End collecting."""
        ...


def acting_with(acting: Acting, version: Callable[[int], Version]) -> Callable[[int], Version]:
    """The version_at of Collector.collect for (step, version) pairs that were decided before.

    Args:
        version: looks up a version by its number.
    """
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
    """Write shards' states into a checkpoint. number: by shard, the number of the next rollout."""
    return [
        write_part(directory, iterations, f"shard-{shard:03d}", state, {"rollouts": number[shard]})
        for shard, state in sorted(states.items())
    ]


def restore_shards(saved: Checkpoint, collectors: Collectors, lap: int) -> int:
    """Load shards from a checkpoint, to continue with this lap. Returns the number of environment steps that were
    replayed."""
    parts = {shard: saved.part(f"shard-{shard:03d}") for shard in collectors.shards}
    states = {shard: tensors for shard, (tensors, _) in parts.items()}
    return collectors.load(states, {shard: meta["rollouts"] - lap for shard, (_, meta) in parts.items()})


def buffers_of(agent: Agent, shards: range, schedule: Schedule, arena: Arena, *, ahead: bool) -> list[RolloutBuffers]:
    """Rollout buffers for each collector of one process. It has one collector if its shards always act with the same
    version, else one per shard.

    Args:
        ahead: whether rollouts are collected before their predecessors have been learned from.
    """
    if isinstance(schedule, Recorded) and schedule.events:
        return [RolloutBuffers(agent, range(shard, shard + 1), schedule.lag + 1, arena) for shard in shards]
    return [RolloutBuffers(agent, shards, schedule.lag + 1 if ahead else 1, arena)]


class LocalRollouts:
    """Rollouts that the learner's own process collects between its updates."""

    def __init__(self, collectors: Collectors, slots: range, schedule: Schedule, versions: Versions) -> None:
        self._collectors, self._slots, self._schedule, self.versions = collectors, slots, schedule, versions
        self._collected: dict[RolloutId, CollectedRollout] = {}
        self._next = dict.fromkeys(collectors.shards, 0)
        self.waited = 0.0
        self.frames_per_step = collectors.frames_per_step
        self.keeps_versions = schedule.lag > 0

    def start(self, saved: Checkpoint | None) -> int:
        if saved is not None:
            self._next = dict.fromkeys(self._collectors.shards, saved.iteration)
            return restore_shards(saved, self._collectors, saved.iteration)
        self._collectors.reset()
        return 0

    def take(self, iteration: int) -> dict[int, list[CollectedRollout]]:
        rollout_ids = self._schedule.by_slot(iteration, self._slots)
        return {slot: [self._take(rollout_id) for rollout_id in of_slot] for slot, of_slot in rollout_ids.items()}

    def _take(self, rollout_id: RolloutId) -> CollectedRollout:
        if rollout_id not in self._collected:
            acting = acting_with(self._schedule.acting(rollout_id), self.versions.__getitem__)
            for each in self._collectors.collect(rollout_id.scheduled_lap, acting, self._schedule.noise(rollout_id)):
                self._collected[each.info.rollout_id] = each
        self._next[rollout_id.shard] = rollout_id.number + 1
        return self._collected.pop(rollout_id)

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
