"""Shared memory between the collectors and learners of one machine. A learner takes its rollouts from
SharedMemoryRollouts. A collector communicates with the learners through a CollectorConnection.

Rollouts and parameters are in memory that both sides map, and messages say what is ready. No process can overwrite
what another still reads. With a lag of k, there are k + 1 buffers and k + 1 places for versions. Rollout i reuses the
buffer of rollout i - k - 1, and begins only when version i - k exists, which was learned from rollout i - k - 1.
Free-running processes have max_lag + 1 of both, and take no rollout that is more than max_lag behind
(lockstep.transport.free_running). The versions are in a lockstep.transport.version_board. The first learner of the
machine sends them, and requests, to the collectors.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.agent import Agent
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.collectors.collectors import Collectors
from lockstep.core.rollout import RolloutInfo
from lockstep.core.schedule import LapId, Schedule
from lockstep.distributed.channels import Channels
from lockstep.distributed.device_memory import Attempt, report_transfer
from lockstep.distributed.groups import Group
from lockstep.models.versions import Version, Versions
from lockstep.run.checkpoint import Checkpoint
from lockstep.transport.free_running import Admission, RolloutChooser
from lockstep.transport.rollouts import Parts, buffers_of, restore_shards, save_shards
from lockstep.transport.version_board import VersionBoard

_FIRST = 0
"""The machine's first learner."""


class RunEnded(Exception):
    """The learners need no more rollouts."""


def collector_buffers(agent: Agent, channels: Channels, index: int, schedule: Schedule) -> list[RolloutBuffers]:
    """The buffers of one collector of a split layout, mapped into the calling process."""
    return channels.rollouts[index].map(
        lambda arena: buffers_of(agent, channels.collects[index], schedule, arena, ahead=True),
        pinned=agent.device.type != "cpu",
    )


def admission(agent: Agent, channels: Channels) -> Admission:
    """The Admission of free-running processes, mapped into the calling process."""
    scheme = agent.experiment.scheme
    return Admission(channels.admission, scheme.shards, scheme.buffers)


class SharedMemoryRollouts:
    """Rollouts that other processes collect for one of the learners. The first learner of a machine also exchanges
    messages with the collectors for all of the machine's learners."""

    def __init__(
        self,
        agent: Agent,
        channels: Channels,
        group: Group,
        schedule: Schedule,
        versions: Versions,
        *,
        free: bool,
        ipc: bool,
        quiet: bool = False,
    ) -> None:
        self._channels, self._group, self._schedule, self.versions = channels, group, schedule, versions
        self._may_lend, self._quiet = ipc and agent.device.type != "cpu", quiet
        self._experiment, self._shards = agent.experiment, agent.experiment.scheme.shards
        self._slots = channels.learns[channels.index]
        self._buffers = {
            shard: buffers
            for c in range(channels.collectors)
            for buffers in collector_buffers(agent, channels, c, schedule)
            for shard in buffers.shards
        }
        self._collectors = range(channels.collectors)
        self._is_first = channels.index == _FIRST
        self._board = VersionBoard(agent, channels, schedule.lag + 1) if self._is_first else None
        self._admission = admission(agent, channels) if free else None
        self._delivered: dict[LapId, RolloutInfo] = {}
        """By lap, in order of arrival: rollouts that have not been taken yet."""
        self._chooser: RolloutChooser | None = None
        self._taken: list[RolloutInfo] = []
        """If timing decides: the rollouts of this iteration in all learners' batch slots, in their order."""
        self._last = dict.fromkeys(range(self._shards), -1)
        """By shard: the last lap that was learned from."""
        self._answers: dict[int, Any] = {}
        self._times: dict[int, Counter[str]] = {}
        self.waited = 0.0
        self.frames_per_step = 0
        self.keeps_versions = True

    def start(self, saved: Checkpoint | None) -> int:
        if self._admission is not None:
            self._chooser = RolloutChooser.of(self._experiment, self._schedule, self._admission, saved)
        elif saved is not None:
            self._last = dict.fromkeys(self._last, saved.iteration - 1)
        ready = self._ask() if self._is_first else {}
        self.frames_per_step = ready[0][1] if ready else 0
        if self._board is not None and self._may_lend and all(on_gpu for *_, on_gpu in ready.values()):
            self._board.lends = self._try_lending(self._board)
        held = list(self.versions.held().values())
        for version in held[-1:] if self._admission is not None else held:
            self._send_out(version)
        return sum(replayed for replayed, *_ in ready.values())

    def take(self, iteration: int) -> dict[int, list[CollectedRollout]]:
        if self._chooser is not None:
            self._taken = self._group.broadcast(self._choose(iteration, self._chooser) if self._is_first else None)
            taken = {slot: self._of_slot(slot) for slot in self._slots}
        else:
            rollout_ids = self._schedule.by_slot(iteration, self._slots)
            laps = {slot: [each.scheduled_lap for each in of_slot] for slot, of_slot in rollout_ids.items()}
            self._await(lambda: all(lap_id in self._delivered for of_slot in laps.values() for lap_id in of_slot))
            taken = {slot: [self._delivered.pop(lap_id) for lap_id in of_slot] for slot, of_slot in laps.items()}
            self._last.update(each.scheduled_lap for each in self._schedule.rollout_ids(iteration))
        return {slot: [self._collected(each) for each in of_slot] for slot, of_slot in taken.items()}

    def publish(self, version: Version) -> None:
        self.versions.publish(version)
        self._last.update({info.shard: info.lap for info in self._taken})
        self._send_out(version)

    def own_times(self) -> dict[str, float]:
        return {}

    def collector_times(self) -> list[dict[str, float]]:
        times, self._times = self._times, {}
        return [dict(spent) for spent in times.values()] if self._is_first else []

    def save(self, directory: Path, iterations: int) -> Parts:
        if self._is_first:
            for collector in self._collectors:
                self._channels.send(("save", directory, iterations, self._last), collector)
        # All learners keep reading. A collector that waits to deliver to one would not read the request to save.
        return [part for parts in self._ask().values() for part in parts]

    def close(self) -> None:
        if self._is_first:
            for collector in self._collectors:
                with contextlib.suppress(ConnectionError):  # the loss of this collector may have ended the run
                    self._channels.send(("end",), collector)

    def _collected(self, info: RolloutInfo) -> CollectedRollout:
        rollout = self._buffers[info.shard].rollout(info.shard, info.lap)
        return CollectedRollout(info, rollout, self.versions[info.first_version].normalizers)

    def _of_slot(self, slot: int) -> list[RolloutInfo]:
        """The rollouts of a batch slot, from those that all learners take."""
        if self._schedule.by_shard:
            return [info for info in self._taken if info.shard == slot]
        return [self._taken[slot]]

    def _choose(self, iteration: int, chooser: RolloutChooser) -> list[RolloutInfo]:
        self._receive(block=False)
        return chooser.choose(iteration, self._delivered, self._await_more)

    def _await_more(self) -> None:
        arrived = len(self._delivered)
        self._await(lambda: len(self._delivered) > arrived)

    def _send_out(self, version: Version) -> None:
        if self._board is not None:
            handles = self._board.write(version)
            if self._admission is not None:
                self._admission.publish(version.number, [info.shard for info in self._taken])
            for collector, handle in enumerate(handles):
                self._channels.send(("version", version.number, handle), collector)

    def _try_lending(self, board: VersionBoard) -> bool:
        """Whether every collector can open the memory of this process's GPU."""
        attempt = Attempt()
        for collector, trial in enumerate(board.offer(attempt)):
            self._channels.send(("trial", trial), collector)
        problem = next((each for each in (attempt.problem, *self._ask().values()) if each), None)
        if not self._quiet:
            report_transfer("Collectors get parameters", problem)
        return problem is None

    def _await(self, met: Callable[[], bool]) -> None:
        """Receive messages until a condition is met."""
        begin = time.perf_counter()
        while not met():
            self._receive()
        self.waited += time.perf_counter() - begin

    def _ask(self) -> dict[int, Any]:
        """Wait for every collector's answer."""
        while not all(collector in self._answers for collector in self._collectors):
            self._receive()
        answers, self._answers = self._answers, {}
        return answers

    def _receive(self, *, block: bool = True) -> None:
        for collector, (kind, *content) in self._channels.receive(self._collectors, block=block):
            if kind == "rollout":
                infos, spent = content
                self._times.setdefault(collector, Counter()).update(spent)
                self._delivered |= {info.lap_id: info for info in infos}
            else:
                self._answers[collector] = content[0]


class CollectorConnection:
    """A collector's connection to the learners of its machine. It delivers rollouts to all of them. The first one sends
    versions and requests."""

    def __init__(
        self, agent: Agent, channels: Channels, collectors: Collectors, schedule: Schedule, *, free: bool
    ) -> None:
        self._channels, self._collectors, self._schedule = channels, collectors, schedule
        self._board = VersionBoard(agent, channels, schedule.lag + 1)
        self._admission = admission(agent, channels) if free else None
        self._published = -1
        self._on_gpu = agent.device.type != "cpu"
        self._newest: Version | None = None
        self._states: dict[int, dict[int, tuple[int, dict[str, Tensor]]]] = {shard: {} for shard in collectors.shards}
        """By shard and lap: the number of the next rollout, and the shard's state. Several laps are kept, since
        collection may be ahead of the iteration that is to be saved."""
        self.waited = 0.0
        """Seconds spent waiting for versions or free buffers since the last delivery."""
        self._since = time.perf_counter()

    def start(self, saved: Checkpoint | None, started: Callable[[], None] = lambda: None) -> int:
        """Start the environments, or restore them; call `started`; tell the first learner. Returns the next lap."""
        replayed, lap = 0, 0
        if saved is None:
            self._collectors.reset()
        else:
            lap = 0 if self._admission is not None else saved.iteration
            replayed = restore_shards(saved, self._collectors, lap)
        self._remember(lap - 1, {shard: lap + self._collectors.offset(shard) for shard in self._collectors.shards})
        started()
        self._channels.send(("ready", (replayed, self._collectors.frames_per_step, self._on_gpu)), _FIRST)
        return lap

    def version(self, number: int) -> Version:
        """Wait for a version.

        Raises:
            RunEnded: the learners need no more rollouts, so the version will not come.
        """
        begin = time.perf_counter()
        self.listen()
        while self._published < number:
            self.listen(block=True)
        self.waited += time.perf_counter() - begin
        return self._read(number)

    def admit(self, lap: int) -> Version:
        """Wait for a free buffer of every shard. Returns the version to begin the rollout with.

        Raises:
            RunEnded: the learners need no more rollouts.
        """
        admission, begun = self._admission, None
        assert admission is not None
        begin = time.perf_counter()
        self.listen()
        while self._published < 0 or (begun := admission.begin(self._collectors.shards, lap)) is None:
            self.listen(block=True)
        self.waited += time.perf_counter() - begin
        self._newest = self._read(begun)
        return self._newest

    def newest(self) -> Version:
        """The newest version, during a rollout that `admit` has admitted."""
        assert self._admission is not None and self._newest is not None
        number = self._admission.newest
        if number != self._newest.number:
            self._newest = self._read(number)
        return self._newest

    def _read(self, number: int) -> Version:
        """A version that has been published."""
        assert number >= self._published - self._schedule.lag
        while not self._board.has(number):
            self.listen(block=True)
        return self._board.read(number)

    def deliver(self, infos: list[RolloutInfo]) -> None:
        """Tell the learners that rollouts are in their buffers, and how long each activity took.

        Raises:
            RunEnded: the learners need no more rollouts.
        """
        self._remember(infos[0].lap, {info.shard: info.number + 1 for info in infos})
        now = time.perf_counter()
        times = {**self._collectors.take_times(), "waiting": self.waited}
        times["other"] = max(0.0, now - self._since - sum(times.values()))
        self._since, self.waited = now, 0.0
        for learner, slots in enumerate(self._channels.learns):
            for_it = [info for info in infos if self._slot(info) in slots]
            if for_it or learner == _FIRST:  # which reports the times
                try:
                    self._channels.send(("rollout", for_it, times), learner)
                except ConnectionError:  # it has ended; listen raises when the first learner says so or has ended, too
                    while True:
                        self.listen(block=True)

    def _slot(self, info: RolloutInfo) -> int:
        """The batch slot whose learner gets a message about the rollout. If timing decides, the first learner."""
        return 0 if self._admission is not None else self._schedule.slot(info.rollout_id)

    def listen(self, *, block: bool = False) -> None:
        """Handle the requests of the first learner. block: wait for a request.

        Raises:
            RunEnded: the learners need no more rollouts.
        """
        for _, (kind, *content) in self._channels.receive([_FIRST], block=block):
            if kind == "version":
                self._published, handle = content
                self._board.receive(self._published, handle)
            elif kind == "trial":
                self._channels.send(("tried", self._board.try_out(content[0])), _FIRST)
            elif kind == "save":
                directory, iterations, laps = content
                states = {shard: states[laps[shard]] for shard, states in self._states.items()}
                tensors = {shard: state for shard, (_, state) in states.items()}
                parts = save_shards(directory, iterations, tensors, {s: number for s, (number, _) in states.items()})
                for learner in range(len(self._channels.peers)):
                    self._channels.send(("saved", parts if learner == _FIRST else []), learner)
            else:
                raise RunEnded

    def _remember(self, lap: int, numbers: dict[int, int]) -> None:
        """Keep the states of as many laps as there are buffers, and of the lap before them."""
        states = self._collectors.state(numbers)
        for shard, number in numbers.items():
            self._states[shard][lap] = number, states[shard]
            self._states[shard].pop(lap - self._schedule.lag - 2, None)
