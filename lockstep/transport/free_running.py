"""Free-running collection: timing decides which version collects a rollout, and which iteration learns from it.

A shard begins its next rollout as soon as one of its buffers is free, with the newest version. An iteration takes the
first S rollouts that arrive, from any shards. A buffer is taken when a rollout begins, and returned after the rollout
has been learned from. This alone does not bound a slow shard's lag, since fast shards could supply many iterations in
the meantime. So every rollout has a deadline, the iteration `version + max_lag`, and an iteration may only take a
rollout if all others can still be learned from in time (the earliest-deadline-first test of scheduling). Otherwise the
iteration waits for the urgent ones. With max_lag + 1 buffers per shard, a set of rollouts always passes this test, and
no data is ever too old.

With replay, an iteration can learn without new rollouts, and store many at once. It takes all rollouts that have
arrived, perhaps none, and waits only for those that are due, or if it would learn too often from too few (Pace). Later
iterations may use the places that it leaves empty, so the test can be passed as before, with max_lag at least 1.
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
    """Bounds on how many rollouts iterations 0 to i may have taken together: S per iteration or, with replay, within a
    factor of 1 + slack of this, counted from the end of the warm-up."""

    shards: int
    """S"""
    warm: int = 0
    """Iterations of the warm-up, which do not learn."""
    slack: float = 0.0
    """algorithm.replay.slack"""
    even: int = 0
    """Iterations before this one take one rollout of every shard, so that the replay memory of each has data."""

    @staticmethod
    def of(experiment: Experiment, begin: int = 0) -> Pace:
        """The pace of an experiment that begins, or is resumed, with iteration `begin`."""
        shards = experiment.scheme.shards
        if not experiment.algorithm.replays:
            return Pace(shards)
        config = off_policy(experiment.algorithm)
        warm = config.build().warm_iterations(experiment.samples_per_iteration)
        ready = begin if config.resumes_exactly else begin + warm  # without a saved memory, the warm-up is repeated
        return Pace(shards, warm, config.replay.slack, max(warm, ready) + 1)

    def least(self, iteration: int) -> int:
        """The least number of rollouts that must have been taken when an iteration learns."""
        learning = max(0, iteration + 1 - self.warm)
        return self.shards * (iteration + 1 - learning) + math.ceil(self.shards * learning / (1 + self.slack))

    def most(self, iteration: int) -> int:
        """The largest number of rollouts that may have been taken by then. It rises by at least S per iteration."""
        learning = max(0, iteration + 1 - self.warm)
        return self.shards * (iteration + 1 - learning) + math.floor(self.shards * learning * (1 + self.slack))


def may_take(deadline: int, pending: Mapping[int, int], iteration: int, places: int, shards: int) -> bool:
    """Whether an iteration may take a rollout without making another one late.

    Args:
        deadline: the last iteration that may learn from the rollout.
        pending: by deadline, how many rollouts have begun and have not been taken, this one included.
        iteration: the iteration that takes rollouts now.
        places: how many rollouts it may still take, this one included.
        shards: S. Every later iteration may take at least this many rollouts.
    """
    due = 0
    for last in range(iteration, max(pending) + 1):
        due += pending.get(last, 0)
        left = due - (deadline <= last)
        if left > places - 1 + shards * (last - iteration):
            return False
    return True


class Admission:
    """The state that free-running processes agree on: the newest version, and every shard's rollouts in flight. On one
    machine it is in shared memory. On several machines, learner 0 holds it, and collectors send requests to learner 0.

    Laps count a shard's rollouts since this run was started or resumed. Lap n takes buffer n mod `buffers`, and may
    begin once lap n - buffers has been learned from.
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
        """The newest version. Its parameters can be read, since the lock orders memory accesses of processes."""
        with self._memory.locked():
            return int(self._newest[0])

    def begin(self, shards: list[int], lap: int) -> int | None:
        """Take a buffer of each shard for its next lap.

        Returns:
            The version to begin with; None if a shard has no free buffer. The version and its successors stay readable
            until the rollouts have been learned from. If the lap began before and its collector was lost, this is the
            same version again.
        """
        with self._memory.locked():
            if all(lap < self._begun[shard] for shard in shards):
                # The entry is intact even if some shards' laps have been learned from: the lap that will overwrite it
                # begins for all shards together.
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
        """Every lap that has begun and whose buffer has not been returned, with the version that it began with."""
        with self._memory.locked():
            return {
                LapId(shard, lap): int(self._versions[shard, lap % self._buffers])
                for shard in range(len(self._begun))
                for lap in range(int(self._returned[shard]), int(self._begun[shard]))
            }

    def publish(self, version: int, learned: list[int]) -> None:
        """Announce a version, and return one buffer for each entry of `learned`, the number of a shard."""
        with self._memory.locked():
            self._newest[0] = version
            for shard in learned:
                self._returned[shard] += 1


class RolloutChooser:
    """Chooses the rollouts that each iteration learns from, among those that have arrived.

    Args:
        taken: how many rollouts iterations have taken so far.
    """

    def __init__(self, schedule: Schedule, pace: Pace, admission: Admission, taken: int = 0) -> None:
        self._schedule, self._pace, self._admission, self._count = schedule, pace, admission, taken

    @staticmethod
    def of(
        experiment: Experiment, schedule: Schedule, admission: Admission, saved: Checkpoint | None
    ) -> RolloutChooser:
        """The chooser of a run that begins or continues after a checkpoint."""
        if saved is None:
            return RolloutChooser(schedule, Pace.of(experiment), admission)
        taken = saved.meta["counts"]["samples"] // experiment.samples_per_rollout
        return RolloutChooser(schedule, Pace.of(experiment, saved.iteration), admission, taken)

    def choose(self, iteration: int, arrived: dict[LapId, RolloutInfo], wait: Callable[[], None]) -> list[RolloutInfo]:
        """Take the first rollouts that arrived, unless this would make another one too old. Wait for those that are
        due, and for as many as the pace needs.

        Args:
            arrived: rollouts in order of arrival, each shard's in order of laps. Chosen ones are removed.
            wait: waits until more rollouts have arrived, and adds them to `arrived`.
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
        if self._schedule.by_shard:  # the order between shards does not matter, so the record should not depend on it
            return [chosen[lap_id] for lap_id in sorted(chosen)]
        return list(chosen.values())
