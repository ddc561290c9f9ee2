"""Rollouts and versions in messages between machines, which lockstep.launchers.ray sends.

A CollectorService collects one rollout after the other on request, and answers with a RolloutMessage for each of its
shards. An Inbox receives those in a learner's process, and MessageRollouts is where the learner takes them from.
Every message names its shard and rollout, or its version, so messages may arrive in any order, and twice. A rollout
comes with the state of its shard: a replacement for a lost collector continues from there, and learners write it into
checkpoints.

If collectors run freely, learner 0's inbox admits each of their rollouts (lockstep.transport.free_running), and
learner 0 chooses among those that were announced to it, which every learner that may need them has received.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.agent import Agent
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.collectors.collectors import Collectors
from lockstep.core.rollout import Rollout, RolloutInfo
from lockstep.core.schedule import LapId, Schedule
from lockstep.core.shards import block
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.models.versions import Version, Versions
from lockstep.run.checkpoint import Checkpoint
from lockstep.transport.free_running import Admission, Choice
from lockstep.transport.rollouts import Parts, save_shards

State = dict[str, np.ndarray]
"""A shard between two rollouts; empty before its first."""


@dataclass(frozen=True)
class VersionMessage:
    """A version, as it is sent to collectors."""

    number: int
    parameters: np.ndarray
    """fp32 [N], flat."""
    normalizers: State
    options: np.ndarray
    """float64 [K]"""

    @staticmethod
    def of(version: Version) -> VersionMessage:
        normalizers = {name: tensor.numpy() for name, tensor in version.normalizers.state().items()}
        parameters, options = version.parameters.cpu().numpy(), version.options.numpy()
        return VersionMessage(version.number, parameters, normalizers, options)


@dataclass(frozen=True)
class RolloutMessage:
    """A shard's rollout, as it is sent to the learner that holds the shard."""

    info: RolloutInfo
    fields: list[Any]
    """The rollout's arrays in canonical order, or the compressed bytes of each."""
    state: State
    """The shard's state after the rollout."""
    spent: dict[str, float]
    """Seconds that its collector spent on each activity; empty except for the collector's first shard."""

    def unpack(self, rollout: Rollout) -> Rollout:
        """Copy the arrays into the rollout, and return it."""
        for to, field in zip(rollout.leaves(), self.fields, strict=True):
            place = to.numpy()
            place[...] = (
                np.frombuffer(zlib.decompress(field), place.dtype).reshape(place.shape)
                if isinstance(field, bytes)
                else field
            )
        return rollout


def _packed(rollout: Rollout, *, compress: bool) -> list[Any]:
    arrays = [np.ascontiguousarray(leaf.numpy()) for leaf in rollout.leaves()]
    return [zlib.compress(array.tobytes(), 1) for array in arrays] if compress else arrays


class CollectorService:
    """A collector that collects on request.

    Args:
        collectors: with one buffer each, since a rollout is sent before the next one begins.
        compress: whether rollouts are sent compressed.
    """

    def __init__(self, agent: Agent, collectors: Collectors, *, compress: bool = False) -> None:
        self._initial, self._collectors, self._compress = agent.normalizers, collectors, compress
        self._since = time.perf_counter()

    def start(self, states: dict[int, State], offsets: Mapping[int, int] | None = None) -> tuple[int, int]:
        """Start the environments, or restore each shard from its state if it has one.

        Args:
            offsets: by shard: the number of the rollout that lap 0 collects; by default 0.

        Returns:
            Environment steps that were replayed, and frames of a step.
        """
        replayed = 0
        if any(states.values()):
            copies = {
                shard: {name: torch.from_numpy(array.copy()) for name, array in state.items()}
                for shard, state in states.items()
            }
            replayed = self._collectors.load(copies, offsets or dict.fromkeys(copies, 0))
        else:
            self._collectors.reset()
        self._since = time.perf_counter()
        return replayed, self._collectors.frames_per_step

    def states(self) -> dict[int, State]:
        """The present state of each shard."""
        return {shard: _arrays(state) for shard, state in self._collectors.state(self._collectors.shards).items()}

    def collect(self, lap: int, published: VersionMessage) -> list[RolloutMessage]:
        """Collect a rollout of each shard. The next one may be written into the same arrays, so send them first."""
        begin = time.perf_counter()
        normalizers = {name: torch.from_numpy(array.copy()) for name, array in published.normalizers.items()}
        parameters = torch.from_numpy(published.parameters.copy())  # arrays of a message may be read-only
        options = torch.from_numpy(published.options.copy())
        version = Version(published.number, parameters, self._initial.loaded(normalizers), options)
        collected = self._collectors.collect(LapId(self._collectors.shards[0], lap), lambda _: version)
        states = self.states()
        packed = [_packed(each.rollout, compress=self._compress) for each in collected]
        spent, end = self._collectors.take_times(), time.perf_counter()
        spent |= {"waiting": begin - self._since, "other": max(0.0, end - begin - sum(spent.values()))}
        self._since = end
        return [
            RolloutMessage(each.info, fields, states[each.info.shard], {} if index else spent)
            for index, (each, fields) in enumerate(zip(collected, packed, strict=True))
        ]

    def close(self) -> None:
        self._collectors.close()


def _arrays(state: dict[str, torch.Tensor]) -> State:
    return {name: tensor.cpu().numpy().copy() for name, tensor in state.items()}


class Inbox:
    """Joins a learner's thread and those that receive messages for its process. It waits without a limit: the launcher
    ends the process if a message will not come.

    Args:
        laps: rollouts of a shard that may be under way at a time.
        admission: of collectors that run freely.
    """

    def __init__(self, laps: int, admission: Admission | None = None) -> None:
        self.admission = admission
        self._changed = threading.Condition()
        self._messages: dict[LapId, RolloutMessage] = {}
        self._next: dict[int, int] = defaultdict(int)
        """By shard: the lap that is learned from next."""
        self._announced: dict[LapId, RolloutInfo] = {}
        """In order of arrival: what was not asked for yet."""
        self._early: dict[LapId, RolloutInfo] = {}
        """What was announced before an earlier lap of its shard."""
        self._listed: dict[int, int] = defaultdict(int)
        """By shard: the lap that is announced next."""
        self._generation: dict[int, int] = defaultdict(int)
        """By shard: increases with each new collector."""
        self.offsets: dict[int, int] = {}
        """By shard: the number of the rollout that lap 0 collects. Known as soon as a state of the shard is."""
        self._states: dict[int, dict[int, State]] = defaultdict(dict)
        """By shard and the lap that comes next."""
        self._kept = laps + 1
        self._versions: dict[int, VersionMessage] = {}
        self._ready: dict[int, tuple[int, int]] = {}

    def deliver(self, message: RolloutMessage) -> None:
        """Receive a rollout."""
        shard, lap = message.info.lap_id
        with self._changed:
            if lap < self._next[shard]:
                return  # a duplicate
            self._messages[message.info.lap_id] = message
            self.remember(shard, lap + 1, message.state)

    def take(self, lap_ids: list[LapId]) -> list[RolloutMessage]:
        """Wait for rollouts."""
        with self._changed:
            self._changed.wait_for(lambda: all(lap_id in self._messages for lap_id in lap_ids))
            self._next.update({shard: max(self._next[shard], lap + 1) for shard, lap in lap_ids})
            return [self._messages.pop(lap_id) for lap_id in lap_ids]

    def take_over(self, shards: list[int], generation: int) -> int:
        """Begin to listen to a new collector of these shards, and no longer to the one before it; returns the lap that
        it continues with. Neither that lap nor a later one was learned from, so its version and state are still there.
        """
        with self._changed:
            self._generation.update(dict.fromkeys(shards, generation))
            # Or these laps could be learned from before the new collector collects them again.
            self._early = {lap_id: info for lap_id, info in self._early.items() if lap_id.shard not in shards}
            return self._listed[shards[0]]

    def announce(self, infos: list[RolloutInfo], generation: int = 0) -> None:
        """Learn of a lap of all shards of a collector, which every learner that may need it has received."""
        with self._changed:
            for info in infos:
                if generation < self._generation[info.shard]:
                    continue  # its collector is lost, and another one collects the lap again
                if info.lap >= self._listed[info.shard]:  # or it is a duplicate
                    self._early[info.lap_id] = info
                while (lap_id := LapId(info.shard, self._listed[info.shard])) in self._early:
                    self._announced[lap_id] = self._early.pop(lap_id)
                    self._listed[info.shard] += 1
            self._changed.notify_all()

    def announced(self, *, block: bool) -> dict[LapId, RolloutInfo]:
        """What was announced since the last call, each shard's laps in order; block: wait for something."""
        with self._changed:
            if block:
                self._changed.wait_for(lambda: self._announced)
            announced, self._announced = self._announced, {}
            return announced

    def admit(self, shards: list[int], lap: int) -> int:
        """Wait for a free buffer of every shard; returns the version to begin the lap with."""
        admission, version = self.admission, None
        assert admission is not None
        with self._changed:
            while not self._versions or (version := admission.begin(shards, lap)) is None:
                self._changed.wait()
        return version

    def remember(self, shard: int, lap: int, state: State) -> None:
        """Keep a shard's state before one of its laps, and forget old ones."""
        with self._changed:
            # A view would keep all of the message that it came with in memory.
            self._states[shard][lap] = {name: array.copy() for name, array in state.items()}
            self._states[shard].pop(lap - self._kept - 1, None)
            self._changed.notify_all()

    def states(self, shards: list[int], lap: int, *, begun: bool = False) -> dict[int, State]:
        """Wait for the states of shards before one of their laps; begun: wait until their environments have started,
        and their states are not empty any more."""

        def known(shard: int) -> bool:
            return lap in self._states[shard] and not (begun and not self._states[shard][lap])

        with self._changed:
            self._changed.wait_for(lambda: all(map(known, shards)))
            return {shard: self._states[shard][lap] for shard in shards}

    def publish(self, version: Version, oldest: int, learned: list[int]) -> None:
        """Make a version available to collectors, and drop those before the oldest. If collectors run freely, give back
        a buffer for each entry of learned, a shard."""
        with self._changed:
            self._versions[version.number] = VersionMessage.of(version)
            self._versions = {number: each for number, each in self._versions.items() if number >= oldest}
            if self.admission is not None:
                self.admission.publish(version.number, learned)
            self._changed.notify_all()

    def version(self, number: int) -> VersionMessage:
        """Wait for a version."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._versions)
            return self._versions[number]

    def started(self, collector: int, ready: tuple[int, int]) -> None:
        """Receive what CollectorService.start returned."""
        with self._changed:
            self._ready[collector] = ready
            self._changed.notify_all()

    def ready(self, collectors: int) -> list[tuple[int, int]]:
        """Wait until so many have started."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) >= collectors)
            return list(self._ready.values())


class MessageRollouts:
    """Rollouts that a learner takes from its inbox. Learner 0 also publishes versions."""

    def __init__(
        self, agent: Agent, inbox: Inbox, group: Group, schedule: Schedule, versions: Versions, collectors: int
    ) -> None:
        self._inbox, self._group, self._schedule, self.versions = inbox, group, schedule, versions
        self._collectors = collectors if group.rank == 0 else 0
        self._speaks = group.rank == 0
        self._experiment, self._shards = agent.experiment, agent.experiment.scheme.shards
        self._slots = block(self._shards, group.size, group.rank)
        free = inbox.admission is not None
        self._any_shard = free and not schedule.by_shard
        """Whether a batch slot takes a rollout of any shard."""
        # In the same memory layout as elsewhere, since strides and alignment may decide which kernel computes.
        self._buffers = RolloutBuffers(
            agent,
            range(self._shards) if self._any_shard else self._slots,
            schedule.lag + 1 if free else 1,
            PrivateArena(pinned=agent.device.type != "cpu"),
        )
        self._choice: Choice | None = None
        self._arrived: dict[LapId, RolloutInfo] = {}
        """In order of arrival: what learner 0 chooses from."""
        self._taken: list[RolloutInfo] = []
        """In order of batch slots, of all learners: what the present iteration takes, if collectors run freely."""
        self._last: dict[int, int] = {}
        """By shard: the last lap that was learned from."""
        self._times: dict[int, Counter[str]] = {}
        """By the first shard of each collector."""
        self.waited = 0.0
        self.frames_per_step = 0

    def start(self, saved: Checkpoint | None) -> int:
        lap = 0
        if self._inbox.admission is not None:
            self._choice = Choice.of(self._experiment, self._schedule, self._inbox.admission, saved)
        elif saved is not None:
            lap = saved.iteration
        self._last = dict.fromkeys(range(self._shards), lap - 1)
        for shard in self._slots:
            tensors, meta = ({}, {"rollouts": 0}) if saved is None else saved.part(f"shard-{shard:03d}")
            self._inbox.offsets[shard] = meta["rollouts"] - lap
            self._inbox.remember(shard, lap, {name: tensor.numpy() for name, tensor in tensors.items()})
        if not self._speaks:
            return 0
        held = list(self.versions.held().values())
        for version in held if self._choice is None else held[-1:]:
            self._inbox.publish(version, 0, [])
        ready = self._inbox.ready(self._collectors)
        self.frames_per_step = ready[0][1]
        return sum(replayed for replayed, _ in ready)

    def take(self, iteration: int) -> dict[int, list[CollectedRollout]]:
        if self._choice is None:
            laps = {slot: [LapId(slot, iteration)] for slot in self._slots}
            self._last.update(dict.fromkeys(self._slots, iteration))
        else:
            self._taken = self._group.broadcast(self._choose(iteration, self._choice) if self._speaks else None)
            laps = {slot: self._of_slot(slot) for slot in self._slots}
            self._last.update({info.shard: info.lap for info in self._taken})
        wanted = {lap_id for of_slot in laps.values() for lap_id in of_slot}
        if self._any_shard:  # all learners received them: each drops what others learn from
            wanted |= {info.lap_id for info in self._taken}
        begin = time.perf_counter()
        messages = {message.info.lap_id: message for message in self._inbox.take(sorted(wanted))}
        self.waited += time.perf_counter() - begin
        self._times = {}
        if self._speaks or not self._any_shard:
            for shard, spent in ((message.info.shard, message.spent) for message in messages.values()):
                if spent:
                    self._times.setdefault(shard, Counter()).update(spent)
        filled: Counter[int] = Counter()
        return {slot: [self._collected(messages[lap_id], filled) for lap_id in laps[slot]] for slot in self._slots}

    def _choose(self, iteration: int, choice: Choice) -> list[RolloutInfo]:
        def receive(*, block: bool = True) -> None:
            self._arrived |= self._inbox.announced(block=block)

        receive(block=False)
        begin = time.perf_counter()
        chosen = choice.choose(iteration, self._arrived, receive)
        self.waited += time.perf_counter() - begin
        return chosen

    def _of_slot(self, slot: int) -> list[LapId]:
        """What a batch slot takes of what all take."""
        if self._any_shard:
            return [self._taken[slot].lap_id]
        return [info.lap_id for info in self._taken if info.shard == slot]

    def _collected(self, message: RolloutMessage, filled: Counter[int]) -> CollectedRollout:
        """Copy a rollout into a buffer of its shard; filled: by shard, how many hold rollouts of this iteration."""
        info = message.info
        rollout = message.unpack(self._buffers.rollout(info.shard, filled[info.shard]))
        filled[info.shard] += 1
        return CollectedRollout(info, rollout, self.versions[info.first_version].normalizers)

    def publish(self, version: Version) -> None:
        self.versions.publish(version)
        if self._speaks:
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
