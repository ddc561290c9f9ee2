"""Rollouts and versions in messages between machines, which lockstep.launchers.ray sends.

A CollectorService collects one rollout after the other on request, and answers with a RolloutMessage for each of its
shards. An Inbox receives those in a learner's process, and MessageRollouts is where the learner takes them from.
Every message names its shard and rollout, or its version, so messages may arrive in any order, and twice. A rollout
comes with the state of its shard: a replacement for a lost collector continues from there, and learners write it into
checkpoints.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict
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
from lockstep.core.schedule import LapId, RolloutId, Schedule
from lockstep.core.shards import block
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.models.versions import Version, Versions
from lockstep.run.checkpoint import Checkpoint
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

    @staticmethod
    def of(version: Version) -> VersionMessage:
        normalizers = {name: tensor.numpy() for name, tensor in version.normalizers.state().items()}
        return VersionMessage(version.number, version.parameters.cpu().numpy(), normalizers)


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

    def start(self, states: dict[int, State]) -> tuple[int, int]:
        """Start the environments, or restore each shard from its state if it has one.

        Returns:
            Environment steps that were replayed, and frames of a step.
        """
        replayed = 0
        if any(states.values()):
            copies = {
                shard: {name: torch.from_numpy(array.copy()) for name, array in state.items()}
                for shard, state in states.items()
            }
            replayed = self._collectors.load(copies, dict.fromkeys(copies, 0))
        else:
            self._collectors.reset()
        self._since = time.perf_counter()
        return replayed, self._collectors.frames_per_step

    def collect(self, number: int, published: VersionMessage) -> list[RolloutMessage]:
        """Collect a rollout of each shard. The next one may be written into the same arrays, so send them first."""
        begin = time.perf_counter()
        normalizers = {name: torch.from_numpy(array.copy()) for name, array in published.normalizers.items()}
        parameters = torch.from_numpy(published.parameters.copy())  # arrays of a message may be read-only
        version = Version(published.number, parameters, self._initial.loaded(normalizers))
        collected = self._collectors.collect(LapId(self._collectors.shards[0], number), lambda _: version)
        states = self._collectors.state(self._collectors.shards)
        packed = [_packed(each.rollout, compress=self._compress) for each in collected]
        spent, end = self._collectors.take_times(), time.perf_counter()
        spent |= {"waiting": begin - self._since, "other": max(0.0, end - begin - sum(spent.values()))}
        self._since = end
        return [
            RolloutMessage(each.info, fields, _arrays(states[each.info.shard]), {} if index else spent)
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
    """

    def __init__(self, laps: int) -> None:
        self._changed = threading.Condition()
        self._messages: dict[RolloutId, RolloutMessage] = {}
        self._next: dict[int, int] = defaultdict(int)
        """By shard: the rollout that is learned from next."""
        self._states: dict[int, dict[int, State]] = defaultdict(dict)
        """By shard and number of the rollout that comes next."""
        self._kept = laps + 1
        self._versions: dict[int, VersionMessage] = {}
        self._ready: dict[int, tuple[int, int]] = {}

    def deliver(self, message: RolloutMessage) -> None:
        """Receive a rollout."""
        shard, number = message.info.shard, message.info.number
        with self._changed:
            if number < self._next[shard]:
                return  # a duplicate
            self._messages[RolloutId(shard, number)] = message
            # A view would keep all of the message in memory.
            self.remember(shard, number + 1, {name: array.copy() for name, array in message.state.items()})

    def take(self, rollout_ids: list[RolloutId]) -> list[RolloutMessage]:
        """Wait for rollouts."""
        with self._changed:
            self._changed.wait_for(lambda: all(rollout_id in self._messages for rollout_id in rollout_ids))
            self._next.update({rollout_id.shard: rollout_id.number + 1 for rollout_id in rollout_ids})
            return [self._messages.pop(rollout_id) for rollout_id in rollout_ids]

    def remember(self, shard: int, number: int, state: State) -> None:
        """Keep a shard's state before one of its rollouts, and forget old ones."""
        with self._changed:
            self._states[shard][number] = state
            self._states[shard].pop(number - self._kept - 1, None)
            self._changed.notify_all()

    def states(self, shards: list[int], number: int) -> dict[int, State]:
        """Wait for the states of shards before one of their rollouts."""
        with self._changed:
            self._changed.wait_for(lambda: all(number in self._states[shard] for shard in shards))
            return {shard: self._states[shard][number] for shard in shards}

    def publish(self, version: Version, oldest: int) -> None:
        """Make a version available to collectors, and drop those before the oldest."""
        with self._changed:
            self._versions[version.number] = VersionMessage.of(version)
            self._versions = {number: each for number, each in self._versions.items() if number >= oldest}
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
        self._inbox, self._schedule, self.versions = inbox, schedule, versions
        self._collectors = collectors if group.rank == 0 else 0
        self._speaks = group.rank == 0
        self._slots = block(agent.experiment.scheme.shards, group.size, group.rank)
        # In the same memory layout as elsewhere, since strides and alignment may decide which kernel computes.
        self._buffers = RolloutBuffers(agent, self._slots, 1, PrivateArena(pinned=agent.device.type != "cpu"))
        self._times: list[dict[str, float]] = []
        self.waited = 0.0
        self.frames_per_step = 0

    def start(self, saved: Checkpoint | None) -> int:
        for shard in self._slots:
            state = {} if saved is None else _arrays(saved.part(f"shard-{shard:03d}")[0])
            self._inbox.remember(shard, 0 if saved is None else saved.iteration, state)
        if not self._speaks:
            return 0
        for version in self.versions.held().values():
            self._inbox.publish(version, 0)
        ready = self._inbox.ready(self._collectors)
        self.frames_per_step = ready[0][1]
        return sum(replayed for replayed, _ in ready)

    def take(self, iteration: int) -> dict[int, list[CollectedRollout]]:
        begin = time.perf_counter()
        messages = self._inbox.take([RolloutId(shard, iteration) for shard in self._slots])
        self.waited += time.perf_counter() - begin
        self._times = [message.spent for message in messages if message.spent]
        return {message.info.shard: [self._collected(message)] for message in messages}

    def _collected(self, message: RolloutMessage) -> CollectedRollout:
        info = message.info
        rollout = message.unpack(self._buffers.rollout(info.shard, info.lap))
        return CollectedRollout(info, rollout, self.versions[info.first_version].normalizers)

    def publish(self, version: Version) -> None:
        self.versions.publish(version)
        if self._speaks:
            self._inbox.publish(version, self._schedule.collects_with(version.number))

    def own_times(self) -> dict[str, float]:
        return {}

    def collector_times(self) -> list[dict[str, float]]:
        return self._times

    def save(self, directory: Path, iterations: int) -> Parts:
        states = self._inbox.states(list(self._slots), iterations)
        tensors = {
            shard: {name: torch.from_numpy(array) for name, array in state.items()} for shard, state in states.items()
        }
        return save_shards(directory, iterations, tensors, dict.fromkeys(tensors, iterations))

    def close(self) -> None:
        """Nothing to do: the launcher ends the collectors."""
