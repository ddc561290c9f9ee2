"""A learner's source of rollouts that arrive in messages."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import torch

from lockstep.agent import Agent
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.core.rollout import RolloutInfo
from lockstep.core.schedule import LapId, Schedule
from lockstep.core.shards import block
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.models.versions import Version, Versions
from lockstep.run.checkpoint import Checkpoint
from lockstep.transport.free_running import RolloutChooser
from lockstep.transport.inbox import Inbox
from lockstep.transport.messages import RolloutMessage
from lockstep.transport.rollouts import Parts, save_shards


class MessageRollouts:
    """Rollouts that a learner takes from its inbox. Learner 0 also publishes versions."""

    def __init__(
        self, agent: Agent, inbox: Inbox, group: Group, schedule: Schedule, versions: Versions, groups: int
    ) -> None:
        self._inbox, self._group, self._schedule, self.versions = inbox, group, schedule, versions
        self._groups = groups
        """The number of groups of shards that are collected together."""
        self._is_first = group.rank == 0
        self._experiment, self._shards = agent.experiment, agent.experiment.scheme.shards
        self._slots = block(self._shards, group.size, group.rank)
        free = inbox.admission is not None
        self._any_shard = free and not schedule.by_shard
        """Whether a batch slot takes a rollout of any shard."""
        # The memory layout is that of other transports, since strides and alignment may decide which kernel computes.
        self._buffers = RolloutBuffers(
            agent,
            range(self._shards) if self._any_shard else self._slots,
            schedule.lag + 1 if free else 1,
            PrivateArena(pinned=agent.device.type != "cpu"),
        )
        self._chooser: RolloutChooser | None = None
        self._arrived: dict[LapId, RolloutInfo] = {}
        """Learner 0: the rollouts that it chooses from, in order of arrival."""
        self._taken: list[RolloutInfo] = []
        """If collectors run freely: the rollouts of this iteration in all learners' batch slots, in their order."""
        self._last: dict[int, int] = {}
        """By shard: the last lap that was learned from."""
        self._times: dict[int, Counter[str]] = {}
        """By the first shard of each group: the seconds that its collector spent on each activity."""
        self.waited = 0.0
        self.frames_per_step = 0
        self.keeps_versions = True

    def start(self, saved: Checkpoint | None) -> int:
        lap = 0
        if self._inbox.admission is not None:
            self._chooser = RolloutChooser.of(self._experiment, self._schedule, self._inbox.admission, saved)
        elif saved is not None:
            lap = saved.iteration
        self._last = dict.fromkeys(range(self._shards), lap - 1)
        for shard in self._slots:
            tensors, meta = ({}, {"rollouts": 0}) if saved is None else saved.part(f"shard-{shard:03d}")
            self._inbox.offsets[shard] = meta["rollouts"] - lap
            self._inbox.remember(shard, lap, {name: tensor.numpy() for name, tensor in tensors.items()})
        if not self._is_first:
            return 0
        held = list(self.versions.held().values())
        for version in held if self._chooser is None else held[-1:]:
            self._inbox.publish(version, 0, [])
        ready = self._inbox.ready(self._groups)
        self.frames_per_step = ready[0][1]
        return sum(replayed for replayed, _ in ready)

    def take(self, iteration: int) -> dict[int, list[CollectedRollout]]:
        if self._chooser is None:
            laps = {slot: [LapId(slot, iteration)] for slot in self._slots}
            self._last.update(dict.fromkeys(self._slots, iteration))
        else:
            self._taken = self._group.broadcast(self._choose(iteration, self._chooser) if self._is_first else None)
            laps = {slot: self._of_slot(slot) for slot in self._slots}
            self._last.update({info.shard: info.lap for info in self._taken})
        wanted = {lap_id for of_slot in laps.values() for lap_id in of_slot}
        if self._any_shard:  # all learners receive all rollouts, and drop those of others
            wanted |= {info.lap_id for info in self._taken}
        begin = time.perf_counter()
        messages = {message.info.lap_id: message for message in self._inbox.take(sorted(wanted))}
        self.waited += time.perf_counter() - begin
        self._times = {}
        if self._is_first or not self._any_shard:
            for shard, spent in ((message.info.shard, message.spent) for message in messages.values()):
                if spent:
                    self._times.setdefault(shard, Counter()).update(spent)
        filled: Counter[int] = Counter()
        return {slot: [self._collected(messages[lap_id], filled) for lap_id in laps[slot]] for slot in self._slots}

    def _choose(self, iteration: int, chooser: RolloutChooser) -> list[RolloutInfo]:
        def receive(*, block: bool = True) -> None:
            self._arrived |= self._inbox.announced(block=block)

        receive(block=False)
        begin = time.perf_counter()
        chosen = chooser.choose(iteration, self._arrived, receive)
        self.waited += time.perf_counter() - begin
        return chosen

    def _of_slot(self, slot: int) -> list[LapId]:
        """The laps of a batch slot, from those that all learners take."""
        if self._any_shard:
            return [self._taken[slot].lap_id]
        return [info.lap_id for info in self._taken if info.shard == slot]

    def _collected(self, message: RolloutMessage, filled: Counter[int]) -> CollectedRollout:
        """Copy a rollout into a buffer of its shard. filled: by shard, how many buffers hold rollouts of this
        iteration."""
        info = message.info
        rollout = message.unpack(self._buffers.rollout(info.shard, filled[info.shard]))
        filled[info.shard] += 1
        return CollectedRollout(info, rollout, self.versions[info.first_version].normalizers)

    def publish(self, version: Version) -> None:
        self.versions.publish(version)
        if self._is_first:
            oldest = self._schedule.collects_with(version.number)
            self._inbox.publish(version, oldest, [info.shard for info in self._taken])

    def own_times(self) -> dict[str, float]:
        return {}

    def collector_times(self) -> list[dict[str, float]]:
        return [dict(spent) for spent in self._times.values()]

    def save(self, directory: Path, iterations: int) -> Parts:
        tensors, numbers = {}, {}
        for shard in self._slots:
            lap = self._last[shard] + 1
            state = self._inbox.states([shard], lap, begun=True)[shard]
            tensors[shard] = {name: torch.from_numpy(array) for name, array in state.items()}
            numbers[shard] = self._inbox.offsets[shard] + lap
        return save_shards(directory, iterations, tensors, numbers)

    def close(self) -> None:
        """Nothing to do: the launcher ends the collectors."""
