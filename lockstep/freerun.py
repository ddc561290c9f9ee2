"""Free-running collection: timing decides which version collects what, and what each iteration learns from.

A shard begins its next rollout as soon as one of its slabs is free, with the newest version, and an iteration takes
the first S rollouts to arrive, whichever shards they are of. A slab is taken when a rollout begins and given back when
it was learned from. That alone does not bound a slow shard's lag, since fast ones could supply many iterations in the
meantime. So every rollout has a deadline, the iteration `version + max_lag`, and an arrival may only be taken if all
others can still be learned from in time (the earliest-deadline-first test of scheduling); otherwise the iteration waits
for the urgent ones. With max_lag + 1 slabs a shard that test can always be passed, and no data is ever too old.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.runtime.shared import Arena, SharedMemory


def may_take(deadline: int, pending: Mapping[int, int], iteration: int, places: int, shards: int) -> bool:
    """Whether an iteration may take a rollout without making another one late.

    Args:
        deadline: of the rollout: the last iteration that may learn from it.
        pending: how many rollouts were begun and not taken yet, this one included, by deadline.
        iteration: the one that is being filled.
        places: batch slots that it has left, the one for this rollout included.
        shards: S, the batch slots of every iteration.
    """
    due = 0
    for last in range(iteration, max(pending) + 1):
        due += pending.get(last, 0)
        left = due - (deadline <= last)
        if left > places - 1 + shards * (last - iteration):
            return False
    return True


class Admission:
    """What free-running processes agree on, in shared memory: the newest version, and every shard's rollouts in flight.

    Laps count a shard's rollouts since this run was started or resumed. Lap n takes slab n mod `slabs`, and may begin
    once lap n - slabs was learned from.
    """

    def __init__(self, memory: SharedMemory, shards: int, slabs: int) -> None:
        def layout(arena: Arena) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            count = arena.zeros((shards,), torch.int64)
            done = arena.zeros((shards,), torch.int64)
            return arena.zeros((1,), torch.int64), count, done, arena.zeros((shards, slabs), torch.int64)

        self._memory, self._slabs = memory, slabs
        newest, begun, returned, versions = memory.map(layout)
        self._newest, self._begun, self._returned = newest.numpy(), begun.numpy(), returned.numpy()
        self._versions = versions.numpy()

    @property
    def newest(self) -> int:
        """The newest version. Its parameters are there: the lock orders what processes see."""
        with self._memory.locked():
            return int(self._newest[0])

    def begin(self, shards: list[int], lap: int) -> int | None:
        """Take a slab of each shard for its next lap; None if one of them has none free.

        Returns:
            The version to begin with. It and its successors stay readable until the rollouts were learned from.
        """
        with self._memory.locked():
            if any(lap >= self._returned[shard] + self._slabs for shard in shards):
                return None
            version = int(self._newest[0])
            for shard in shards:
                assert self._begun[shard] == lap
                self._begun[shard] = lap + 1
                self._versions[shard, lap % self._slabs] = version
            return version

    def in_flight(self) -> dict[tuple[int, int], int]:
        """(shard, lap) of every rollout that has begun and was not given back, with the version that it began with."""
        with self._memory.locked():
            return {
                (shard, lap): int(self._versions[shard, lap % self._slabs])
                for shard in range(len(self._begun))
                for lap in range(int(self._returned[shard]), int(self._begun[shard]))
            }

    def publish(self, version: int, learned: list[int]) -> None:
        """Announce a version, and give back a slab for each entry of learned, a shard."""
        with self._memory.locked():
            self._newest[0] = version
            for shard in learned:
                self._returned[shard] += 1
