"""Free-running collection: timing decides which version collects what, and what each iteration learns from.

A shard begins its next rollout as soon as one of its buffers is free, with the newest version, and an iteration takes
the first S rollouts to arrive, whichever shards they are of. A buffer is taken when a rollout begins and given back
when it was learned from. That alone does not bound a slow shard's lag, since fast ones could supply many iterations in
the meantime. So every rollout has a deadline, the iteration `version + max_lag`, and one may only be taken if all
others can still be learned from in time (the earliest-deadline-first test of scheduling); otherwise the iteration
waits for the urgent ones. With max_lag + 1 buffers a shard that test can always be passed, and no data is ever too
old.

With replay an iteration can learn without new rollouts, and remember many at once. It takes what has arrived, be it
nothing, and waits only for rollouts that are due, or if it would learn too often from too few (Pace). Places that it
leaves empty stay for later iterations, so that the test can be passed as before, with max_lag at least 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.algorithms.offpolicy import off_policy
from lockstep.core.rollout import RolloutInfo
from lockstep.core.schedule import LapId, Schedule
from lockstep.distributed.shared_memory import Arena, PrivateMemory, SharedMemory
from lockstep.experiment import Experiment
from lockstep.run.checkpoint import Checkpoint


@dataclass(frozen=True)
class Pace:
    """Bounds on how many rollouts iterations 0 to i may have taken together: S an iteration or, with replay, that many
    within a factor of 1 + slack, counted from the end of the warm-up."""

    shards: int
    """S"""
    warm: int = 0
    """Iterations of the warm-up, in which nothing is learned."""
    slack: float = 0.0
    even: int = 0
    """Iterations before this one take one rollout of every shard, so that each has something to learn from."""

    @staticmethod
    def of(experiment: Experiment, begin: int = 0) -> Pace:
        """The pace of an experiment that begins, or is resumed, with an iteration."""
        shards = experiment.scheme.shards
        if not experiment.algorithm.replays:
            return Pace(shards)
        config = off_policy(experiment.algorithm)
        warm = config.build().warm_iterations(experiment.samples_per_iteration)
        ready = begin if config.resumes_exactly else begin + warm  # a memory that was not kept is filled anew
        return Pace(shards, warm, config.replay.slack, max(warm, ready) + 1)

    def least(self, iteration: int) -> int:
        """Rollouts that must have been taken when an iteration learns."""
        learning = max(0, iteration + 1 - self.warm)
        return self.shards * (iteration + 1 - learning) + math.ceil(self.shards * learning / (1 + self.slack))

    def most(self, iteration: int) -> int:
        """Rollouts that may have been taken by then. It rises by S an iteration, or more."""
        learning = max(0, iteration + 1 - self.warm)
        return self.shards * (iteration + 1 - learning) + math.floor(self.shards * learning * (1 + self.slack))


def may_take(deadline: int, pending: Mapping[int, int], iteration: int, places: int, shards: int) -> bool:
    """Whether an iteration may take a rollout without making another one late.

    Args:
        deadline: of the rollout: the last iteration that may learn from it.
        pending: how many rollouts were begun and not taken yet, this one included, by deadline.
        iteration: the one that is being filled.
        places: rollouts that it may still take, this one included.
        shards: S, the rollouts that every later iteration may take at the least.
    """
    due = 0
    for last in range(iteration, max(pending) + 1):
        due += pending.get(last, 0)
        left = due - (deadline <= last)
        if left > places - 1 + shards * (last - iteration):
            return False
    return True


class Admission:
    """What free-running processes agree on: the newest version, and every shard's rollouts in flight. On one machine it
    lies in memory that they share; on several, learner 0 holds it, and collectors ask there.

    Laps count a shard's rollouts since this run was started or resumed. Lap n takes buffer n mod `buffers`, and may
    begin once lap n - buffers was learned from.
    """

    def __init__(self, memory: SharedMemory | PrivateMemory, shards: int, buffers: int) -> None:
        def layout(arena: Arena) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            count = arena.zeros((shards,), torch.int64)
            done = arena.zeros((shards,), torch.int64)
            return arena.zeros((1,), torch.int64), count, done, arena.zeros((shards, buffers), torch.int64)

        self._memory, self._buffers = memory, buffers
        newest, begun, returned, versions = memory.map(layout)
        self._newest, self._begun, self._returned = newest.numpy(), begun.numpy(), returned.numpy()
        self._versions = versions.numpy()

    @property
    def newest(self) -> int:
        """The newest version. Its parameters are there: the lock orders what processes see."""
        with self._memory.locked():
            return int(self._newest[0])

    def begin(self, shards: list[int], lap: int) -> int | None:
        """Take a buffer of each shard for its next lap; None if one of them has none free.

        Returns:
            The version to begin with. It and its successors stay readable until the rollouts were learned from. If the
            lap has begun before and its collector was lost, this is the same version again.
        """
        with self._memory.locked():
            if all(lap < self._begun[shard] for shard in shards):
                # Not overwritten, even if some were learned from: its successor in the buffers begins for all together.
                return int(self._versions[shards[0], lap % self._buffers])
            if any(lap >= self._returned[shard] + self._buffers for shard in shards):
                return None
            version = int(self._newest[0])
            for shard in shards:
                assert self._begun[shard] == lap
                self._begun[shard] = lap + 1
                self._versions[shard, lap % self._buffers] = version
            return version

    def in_flight(self) -> dict[LapId, int]:
        """Every lap that has begun and whose buffer was not given back, with the version that it began with."""
        with self._memory.locked():
            return {
                LapId(shard, lap): int(self._versions[shard, lap % self._buffers])
                for shard in range(len(self._begun))
                for lap in range(int(self._returned[shard]), int(self._begun[shard]))
            }

    def publish(self, version: int, learned: list[int]) -> None:
        """Announce a version, and give back a buffer for each entry of learned, a shard."""
        with self._memory.locked():
            self._newest[0] = version
            for shard in learned:
                self._returned[shard] += 1


class Choice:
    """Chooses the rollouts that each iteration learns from, among those that have arrived.

    Args:
        taken: rollouts that iterations have taken so far.
    """

    def __init__(self, schedule: Schedule, pace: Pace, admission: Admission, taken: int = 0) -> None:
        self._schedule, self._pace, self._admission, self._count = schedule, pace, admission, taken

    @staticmethod
    def of(experiment: Experiment, schedule: Schedule, admission: Admission, saved: Checkpoint | None) -> Choice:
        """For a run that begins, or continues after a checkpoint."""
        if saved is None:
            return Choice(schedule, Pace.of(experiment), admission)
        taken = saved.meta["counts"]["samples"] // experiment.samples_per_rollout
        return Choice(schedule, Pace.of(experiment, saved.iteration), admission, taken)

    def choose(self, iteration: int, arrived: dict[LapId, RolloutInfo], wait: Callable[[], None]) -> list[RolloutInfo]:
        """Take the first rollouts that arrived, unless another would become too old by that. Wait for those that are
        due, and for as many as the pace needs.

        Args:
            arrived: in order of arrival, each shard's in order of laps; those that are chosen are removed.
            wait: waits until more have arrived, and adds them.
        """
        chosen: dict[LapId, RolloutInfo] = {}
        shards, lag = self._schedule.shards, self._schedule.lag
        even = iteration < self._pace.even
        least, most = ((bound(iteration) - self._count) for bound in (self._pace.least, self._pace.most))
        if even:
            least = most = shards
        in_flight = self._admission.in_flight()
        while True:
            pending = Counter(version + lag for lap_id, version in in_flight.items() if lap_id not in chosen)
            served = {lap_id.shard for lap_id in chosen} if even else set()
            for lap_id in arrived:
                places, deadline = most - len(chosen), in_flight[lap_id] + lag
                if lap_id.shard not in served and may_take(deadline, pending, iteration, places, shards):
                    chosen[lap_id] = arrived.pop(lap_id)
                    break
            else:
                if len(chosen) >= least and min(pending, default=iteration + 1) > iteration:
                    break
                wait()
                in_flight = self._admission.in_flight()
        self._count += len(chosen)
        if self._schedule.by_shard:  # order is nothing that matters between shards: let the record not depend on it
            return [chosen[lap_id] for lap_id in sorted(chosen)]
        return list(chosen.values())
