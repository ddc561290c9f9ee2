"""The driver of a run whose collectors join and leave with the cluster's nodes (ray:a4+-l1).

Here, each group has one shard, which moves between collectors. The result does not depend on which collector has a
shard: learner 0 admits the shard's laps, and the ledger records them, as in any free-running run. So a replay need not
know which collector had which shard.

        a node joins ──► a process starts there ──► shards move to it, each after its current rollout
        a node is lost ──► its shards move to the other processes, which collect rollouts in flight again

A shard moves when its next lap has been admitted and the previous lap has arrived. Then the new collector continues
with its state, and no rollout is collected twice.

Collectors that join and are lost before their first rollout cost time and deliver nothing. So each such loss in a row
doubles the time until others may join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from lockstep.core.shards import block
from lockstep.launchers.ray.actors import RayCollector
from lockstep.launchers.ray.driver import RayDriver
from lockstep.launchers.ray.ending import say
from lockstep.launchers.ray.places import Places
from lockstep.launchers.ray.requests import Collector, Process

_Home = TypeVar("_Home")
_LONGEST = 600.0
"""The longest time in seconds that free resources stay unused after collectors joined in vain."""


def moves(homes: Mapping[int, _Home | None], processes: Collection[_Home]) -> dict[int, _Home]:
    """By group that must move: its new process. Then the numbers of groups per process differ by at most one. As few
    groups as possible move.

    Args:
        homes: by group, the process that has it or will have it. A process that is not in `processes` is lost.
        processes: the processes that can collect.
    """
    if not processes:
        return {}
    found: dict[int, _Home] = {}
    counts = dict.fromkeys(processes, 0)
    for home in homes.values():
        if home is not None and home in counts:
            counts[home] += 1

    def chosen(pick: Callable[..., _Home]) -> _Home:
        return pick(counts, key=lambda process: counts[process])

    for group, home in homes.items():
        if home not in counts:
            found[group] = chosen(min)
            counts[found[group]] += 1
    while counts[fullest := chosen(max)] > counts[emptiest := chosen(min)] + 1:
        found[max(group for group, home in homes.items() if found.get(group, home) is fullest)] = emptiest
        counts[fullest] -= 1
        counts[emptiest] += 1
    return found


class GrowingDriver(RayDriver):
    """A RayDriver with at least as many collectors as the layout says, and more if the cluster has room for them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._places = Places(self._ray, self._job, reserved=self._layout.learning)
        self._numbered = 0
        """How many collectors were started so far."""
        self._placed_learners = False
        """Whether Ray has placed the learners. Collectors start only then, so that they leave learners' resources free.
        """
        self._moving: dict[int, Process] = {}
        """By group: the process that it moves to."""
        self._joined: list[Process] = []
        """The collectors that joined last, until one of them is lost."""
        self._in_vain, self._join_after = 0, 0.0
        """How often in a row one of them was lost before its first rollout, and when others may join."""
        self._paused: set[int] = set()
        """Groups that are moving, and whose next lap has been admitted. It begins in the new process."""

    def _begin_collectors(self) -> None:
        self._placed_learners, self._processes = False, []  # _grow starts the collectors

    def _begin_least(self) -> None:
        """Start the layout's number of collectors, each with an equal share of the shards."""
        least = len(self._layout.collectors)
        self._processes = [self._next() for _ in range(least)]
        for number, process in enumerate(self._processes):
            for group in block(self._groups, least, number):
                self._start(group, process)

    def _next(self) -> Process:
        """Start one more collector on any node that has room."""
        self._numbered += 1
        return self._new_process(f"Collector {self._numbered - 1}", RayCollector, 0)

    def _poll(self) -> None:
        polled = self._polled
        super()._poll()
        if self._polled != polled:
            self._grow()

    def _grow(self) -> None:
        """Start processes if there are too few, or if the cluster has room and there is a shard for each."""
        if not self._placed_learners:
            if all(learner.steps >= 0 for learner in self._learners):
                self._placed_learners = True
                self._begin_least()
            return
        # When a process has made a step, Ray's free resources no longer include its own.
        running, starting = len(self._processes), any(process.steps < 1 for process in self._processes)
        new = max(0, len(self._layout.collectors) - running)
        waits = starting or time.monotonic() < self._join_after
        if not (new or waits) and (new := min(self._places.room(), self._groups - running)) > 0:
            say(f"The cluster has room: {new} collector{'s join' if new > 1 else ' joins'} the {running}.")
            joining = [self._next() for _ in range(new)]
            self._joined = [each for each in self._joined if not each.delivered] + joining
            self._processes += joining
        else:
            self._processes += [self._next() for _ in range(new)]
        self._balance()

    def _balance(self) -> None:
        """Spread the shards evenly over the processes that have started."""
        homes = {group: self._home(group) for group in range(self._groups)}
        ready = [process for process in self._processes if process.steps >= 0 or process in homes.values()]
        for group, process in moves(homes, ready).items():
            if group in self._collectors:
                self._moving[group] = process
                self._move(group)
            else:
                self._start(group, process)

    def _home(self, group: int) -> Process | None:
        """The process that collects a group or will collect it."""
        if group in self._moving:
            return self._moving[group]
        return self._collectors[group].process if group in self._collectors else None

    def _begin_lap(self, collector: Collector, lap: int, version: int) -> None:
        if collector.index in self._moving:
            self._paused.add(collector.index)
            self._move(collector.index)
        else:
            super()._begin_lap(collector, lap, version)

    def _delivered(self, ref: Any) -> None:
        collector = self._deliveries[ref].collector
        first = not collector.process.delivered
        super()._delivered(ref)
        if first and collector.process.delivered:
            self._in_vain = 0
        self._move(collector.index)

    def _move(self, group: int) -> None:
        """Move a group if it is paused and none of its rollouts is under way."""
        collector = self._collectors.get(group)
        under_way = [*self._deliveries.values(), *(each for _, each in self._again)]
        if group not in self._paused or collector is None or any(each.collector is collector for each in under_way):
            return
        self._paused.remove(group)
        self._forget(collector)
        process = self._moving.pop(group)
        if process is not collector.process:
            collector.process.handle.leave.remote(group)
        self._start(group, process)

    def _replace(self, lost: Process, why: str) -> None:
        self._processes.remove(lost)
        for group, collector in list(self._collectors.items()):
            if collector.process is lost:
                self._forget(self._collectors.pop(group))
                self._moving.pop(group, None)
                self._paused.discard(group)
            elif self._moving.get(group) is lost:  # the group stays
                self._moving[group] = collector.process
        what = f"{lost.name} was lost ({why})"
        if len(self._processes) < len(self._layout.collectors):
            self._lose(what, "Others take its shards, and a new one joins when there is room")
        else:
            say(f"{what}. Others take its shards.{self._joined_in_vain(lost)}")
        self._balance()
        for group in list(self._paused):
            self._move(group)

    def _joined_in_vain(self, lost: Process) -> str:
        """If a collector that joined was lost before its first rollout, delay others. Returns a message about this.
        Collectors that joined together, perhaps on one node, count as one."""
        if lost.delivered or lost not in self._joined:
            return ""
        self._joined, self._in_vain = [], self._in_vain + 1
        delay = min(_LONGEST, 2.0 ** min(self._in_vain, 20))
        self._join_after = time.monotonic() + delay
        return (
            f" It had joined and delivered no rollout ({self._in_vain} in a row), so others join in {delay:g} seconds "
            "at the earliest. If this happens again, check its node: ray status, and Ray's logs there."
        )
