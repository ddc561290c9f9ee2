"""How rollouts get to learners, and versions to collectors.

In one process (OwnRollouts) that is a call. Between processes (RemoteRollouts here, CollectorEnd there) rollouts and
parameters lie in memory that both sides map, and messages say what is ready. Nobody can overwrite what another still
reads: with a lag of k there are k + 1 slabs and k + 1 places for versions, and rollout i, which takes the slab of
rollout i - k - 1, begins only when version i - k is there, which that rollout was learned for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.agent import Agent, Version
from lockstep.clock import Clock, Versions
from lockstep.collect import Collector, Delivery
from lockstep.learn import Filled
from lockstep.runtime.channels import Link
from lockstep.runtime.checkpoint import Checkpoint, write_part
from lockstep.runtime.shared import Arena
from lockstep.shard import block
from lockstep.storage.slabs import Slabs

Parts = list[dict[str, Any]]
"""What runtime.checkpoint.finish wants to know of each part of a checkpoint."""


@dataclass(frozen=True)
class Arrival:
    """A rollout in the batch slot that it fills."""

    delivery: Delivery
    filled: Filled


class RunEnded(Exception):
    """The learners want no more rollouts."""


class Rollouts(Protocol):
    """Where a learner's rollouts come from."""

    waited: float
    """Seconds spent waiting for rollouts since it was last set to 0."""
    spent: dict[str, float]
    """Seconds that this process spent on the rollouts that were last taken, by what on."""
    frames_per_step: int

    def start(self, saved: Checkpoint | None) -> int:
        """Start the environments, or restore them; returns the environment steps that were replayed."""
        ...

    def take(self, iteration: int) -> dict[int, Arrival]:
        """What fills this learner's batch slots in an iteration."""
        ...

    def publish(self, version: Version) -> None:
        """Let collectors act with a version."""
        ...

    def collectors(self) -> list[dict[str, float]]:
        """The same of processes that only collect, each of which is reported by one learner."""
        ...

    def save(self, directory: Path, iterations: int) -> Parts:
        """Write the shards' parts of a checkpoint after so many iterations."""
        ...

    def close(self) -> None:
        """End collecting."""
        ...


def save_shards(directory: Path, iterations: int, states: dict[int, dict[str, Tensor]]) -> Parts:
    """Write shards' states into a checkpoint."""
    return [
        write_part(directory, iterations, f"shard-{shard:03d}", state, {}) for shard, state in sorted(states.items())
    ]


def restore_shards(saved: Checkpoint, collector: Collector) -> int:
    """Load a collector's shards from a checkpoint; returns the environment steps that were replayed."""
    return sum(collector.load(shard, saved.part(f"shard-{shard:03d}")[0]) for shard in collector.seats())


class OwnRollouts:
    """Collected in the learner's own process, between its updates."""

    def __init__(self, collector: Collector, slabs: Slabs, clock: Clock, versions: Versions[Version]) -> None:
        self._collector, self._slabs, self._clock, self._versions = collector, slabs, clock, versions
        self.waited = 0.0
        self.spent = collector.times
        self.frames_per_step = collector.frames_per_step

    def start(self, saved: Checkpoint | None) -> int:
        if saved is not None:
            return restore_shards(saved, self._collector)
        self._collector.reset()
        return 0

    def take(self, iteration: int) -> dict[int, Arrival]:
        version = self._versions[self._clock.collects_with(iteration)]
        self._collector.times.update(env=0.0, inference=0.0)
        return {
            delivery.shard: Arrival(
                delivery, Filled(self._slabs.rollout(delivery.shard, iteration), version.normalizers)
            )
            for delivery in self._collector.collect(iteration, lambda _: version)
        }

    def publish(self, version: Version) -> None:
        self._versions.publish(version.number, version)

    def collectors(self) -> list[dict[str, float]]:
        return []

    def save(self, directory: Path, iterations: int) -> Parts:
        return save_shards(directory, iterations, self._collector.state())

    def close(self) -> None:
        self._collector.close()


class VersionBoard:
    """The newest versions, in memory that learner 0 writes and collectors read."""

    def __init__(self, agent: Agent, link: Link, count: int) -> None:
        self._initial = agent.normalizers
        self._names = {name: len(sums) for name, sums in agent.normalizers.state().items()}
        size, sums = agent.flat.vector.numel(), sum(self._names.values())

        def layout(arena: Arena) -> list[tuple[Tensor, Tensor]]:
            return [(arena.zeros((size,)), arena.zeros((sums,), torch.float64)) for _ in range(count)]

        self._places = link.versions.map(layout)

    def write(self, version: Version) -> None:
        parameters, sums = self._places[version.number % len(self._places)]
        parameters.copy_(version.parameters)
        if self._names:
            sums.copy_(torch.cat([version.normalizers.state()[name] for name in self._names]))

    def read(self, number: int) -> Version:
        """A version, its parameters still in the shared memory."""
        parameters, sums = self._places[number % len(self._places)]
        state = dict(zip(self._names, sums.clone().split(list(self._names.values())), strict=True))
        return Version(number, parameters, self._initial.loaded(state))


def collector_slabs(agent: Agent, link: Link, index: int, count: int) -> Slabs:
    """The slabs of one collector of a split layout, as every process that asks for them sees them."""
    shards = block(agent.experiment.scheme.shards, link.collectors, index)
    return link.rollouts[index].map(lambda arena: Slabs(agent, shards, count, arena))


class RemoteRollouts:
    """Collected by processes of their own, for one of the learners. Learner 0 also speaks for all of them."""

    def __init__(self, agent: Agent, link: Link, slots: range, versions: Versions[Version]) -> None:
        self._link, self._slots, self._versions = link, slots, versions
        scheme = agent.experiment.scheme
        self._slabs = {
            shard: slabs
            for slabs in (collector_slabs(agent, link, c, scheme.slabs) for c in range(link.collectors))
            for shard in slabs.shards
        }
        self._blocks = [block(scheme.shards, link.collectors, c) for c in range(link.collectors)]
        self._sources = [c for c, shards in enumerate(self._blocks) if set(shards) & set(slots)]
        self._speaks = link.index == 0
        self._board = VersionBoard(agent, link, scheme.slabs) if self._speaks else None
        self._delivered: dict[tuple[int, int], Delivery] = {}
        """By shard and number: rollouts that have arrived and were not taken."""
        self._answers: dict[int, Any] = {}
        self._times: dict[int, dict[str, float]] = {}
        self.waited = 0.0
        self.spent: dict[str, float] = {}
        self.frames_per_step = 0

    def start(self, saved: Checkpoint | None) -> int:
        everyone = range(self._link.collectors)
        ready = self._ask(everyone) if self._speaks else {}
        self.frames_per_step = ready[0][1] if ready else 0
        for version in self._versions.held().values():
            self._send_out(version)
        return sum(replayed for replayed, _ in ready.values())

    def take(self, iteration: int) -> dict[int, Arrival]:
        begin = time.perf_counter()
        while not all((slot, iteration) in self._delivered for slot in self._slots):
            self._receive(self._sources)
        self.waited += time.perf_counter() - begin
        arrivals = {}
        for slot in self._slots:
            delivery = self._delivered.pop((slot, iteration))
            version = self._versions[delivery.versions[0][1]]
            rollout = self._slabs[slot].rollout(slot, iteration)
            arrivals[slot] = Arrival(delivery, Filled(rollout, version.normalizers))
        return arrivals

    def publish(self, version: Version) -> None:
        self._versions.publish(version.number, version)
        self._send_out(version)

    def collectors(self) -> list[dict[str, float]]:
        # The learner that learns from a collector's first shard reports it.
        return [self._times[c] for c in self._sources if self._blocks[c][0] in self._slots]

    def save(self, directory: Path, iterations: int) -> Parts:
        if not self._speaks:
            return []
        everyone = range(self._link.collectors)
        for collector in everyone:
            self._link.send(("save", directory, iterations), collector)
        return [part for parts in self._ask(everyone).values() for part in parts]

    def close(self) -> None:
        if self._speaks:
            for collector in range(self._link.collectors):
                self._link.send(("end",), collector)

    def _send_out(self, version: Version) -> None:
        if self._board is not None:
            self._board.write(version)
            for collector in range(self._link.collectors):
                self._link.send(("version", version.number), collector)

    def _ask(self, collectors: range) -> dict[int, Any]:
        """Wait for every collector's answer."""
        while not all(collector in self._answers for collector in collectors):
            self._receive(collectors)
        answers, self._answers = self._answers, {}
        return answers

    def _receive(self, collectors: Any) -> None:
        for collector, (kind, *content) in self._link.receive(collectors):
            if kind == "rollout":
                deliveries, self._times[collector] = content
                self._delivered |= {(delivery.shard, delivery.number): delivery for delivery in deliveries}
            else:
                self._answers[collector] = content[0]


class CollectorEnd:
    """A collector's side: what it is told by learner 0, and what it tells the learners."""

    def __init__(self, agent: Agent, link: Link, collector: Collector) -> None:
        scheme = agent.experiment.scheme
        self._link, self._collector = link, collector
        self._board = VersionBoard(agent, link, scheme.slabs)
        self._published = -1
        self._keep = scheme.slabs + 1
        self._states: dict[int, dict[int, dict[str, Tensor]]] = {}
        """By rollout: the shards' states after it. Collection may be ahead of the iteration to be saved."""
        learners = range(len(link.peers))
        blocks = {learner: block(scheme.shards, len(link.peers), learner) for learner in learners}
        own = set(collector.seats())
        self._learners = {learner: own & set(slots) for learner, slots in blocks.items() if own & set(slots)}
        self.waited = 0.0
        """Seconds spent waiting for versions since the last delivery."""
        self._since = time.perf_counter()

    def start(self, saved: Checkpoint | None) -> None:
        """Start the environments, or restore them, and say so."""
        replayed, number = 0, -1
        if saved is None:
            self._collector.reset()
        else:
            replayed, number = restore_shards(saved, self._collector), saved.iteration - 1
        self._remember(number)
        self._link.send(("ready", (replayed, self._collector.frames_per_step)), 0)

    def version(self, number: int) -> Version:
        """Wait for a version.

        Raises:
            RunEnded: it will not come.
        """
        begin = time.perf_counter()
        while self._published < number:
            self.listen(block=True)
        self.waited += time.perf_counter() - begin
        return self._board.read(number)

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Tell the learners that a rollout of every shard is in its slab, and where the time went."""
        self._remember(deliveries[0].number)
        now = time.perf_counter()
        times = {**self._collector.times, "waiting": self.waited}
        times["other"] = max(0.0, now - self._since - sum(times.values()))
        self._since, self.waited = now, 0.0
        self._collector.times.update(env=0.0, inference=0.0)
        for learner, shards in self._learners.items():
            self._link.send(("rollout", [d for d in deliveries if d.shard in shards], times), learner)

    def listen(self, *, block: bool = False) -> None:
        """Do what learner 0 has asked for, waiting for it if block is set.

        Raises:
            RunEnded: the learners want no more.
        """
        for _, (kind, *content) in self._link.receive([0], block=block):
            if kind == "version":
                (self._published,) = content
            elif kind == "save":
                directory, iterations = content
                parts = save_shards(directory, iterations, self._states[iterations - 1])
                self._link.send(("saved", parts), 0)
            else:
                raise RunEnded

    def _remember(self, number: int) -> None:
        self._states[number] = self._collector.state()
        self._states.pop(number - self._keep, None)
