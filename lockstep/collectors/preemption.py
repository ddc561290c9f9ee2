"""Preemption: shards that collect more slowly than the others end their rollouts early.

Once the share `scheme.preempt` of the other processes' shards has collected rollout n, a shard that is still collecting
it is preempted after its current step. So learning does not wait for stragglers (DD-PPO, Wijmans et al. 2020,
https://arxiv.org/abs/1911.00357, section 3, which preempts workers). The shard's episodes continue in its next rollout.
Timing decides where a rollout ends. The ledger records these `cuts`, and a replayed run preempts at the same steps.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.core.schedule import Recorded, RolloutId
from lockstep.distributed.shared_memory import Arena, SharedMemory
from lockstep.scheme import Scheme


class Preemption(Protocol):
    """Decides where rollouts end."""

    def preempts(self, rollout_id: RolloutId, t: int) -> bool:
        """Whether a rollout ends after its first t steps: at least one, and not all of them."""
        ...

    def collected(self, rollout_id: RolloutId) -> None:
        """Note that a rollout is complete, or was preempted."""
        ...


class Counts:
    """How many rollouts each shard has collected. Learner 0 counts for processes that share no memory."""

    def __init__(self, shards: int) -> None:
        self._collected = [0] * shards
        self._changed = threading.Condition()

    def collected(self, rollout_id: RolloutId) -> None:
        """Note that a rollout is complete, or was preempted."""
        shard, number = rollout_id
        with self._changed:
            self._collected[shard] = max(self._collected[shard], number + 1)  # messages may overtake each other
            self._changed.notify_all()

    def late(self, rollout_id: RolloutId, enough: int) -> None:
        """Wait until `enough` shards or this shard itself have collected the rollout of this number."""
        shard, number = rollout_id
        with self._changed:
            self._changed.wait_for(
                lambda: self._collected[shard] > number or sum(each > number for each in self._collected) >= enough
            )


class DistantCounts(Protocol):
    """Another process's Counts."""

    def collected(self, rollout_id: RolloutId) -> None: ...
    def late(self, rollout_id: RolloutId, enough: int) -> Future[Any]:
        """Return at once. The future is done when Counts.late ends."""
        ...


class DistantPreemption:
    """Preempts late shards of a process by learner 0's counts, which it queries once per rollout."""

    def __init__(self, counts: DistantCounts, scheme: Scheme, own: int) -> None:
        self._counts, self._enough = counts, scheme.enough(own)
        self._asked, self._late = -1, Future[Any]()

    def preempts(self, rollout_id: RolloutId, t: int) -> bool:
        if rollout_id.number != self._asked:
            self._asked, self._late = rollout_id.number, self._counts.late(rollout_id, self._enough)
        return self._late.done() and self._late.exception() is None

    def collected(self, rollout_id: RolloutId) -> None:
        self._counts.collected(rollout_id)


class SharedPreemption:
    """Preempts late shards by counts that all collecting processes of a machine share.

    No lock is needed: only one process writes each number, and numbers only grow.
    """

    def __init__(self, memory: SharedMemory, scheme: Scheme, own: int) -> None:
        def layout(arena: Arena) -> Tensor:
            return arena.zeros((scheme.shards,), torch.int64)

        self._collected: np.ndarray = memory.map(layout).numpy()
        """By shard: how many rollouts it has collected."""
        self._enough = scheme.enough(own)

    def preempts(self, rollout_id: RolloutId, t: int) -> bool:
        return int(np.count_nonzero(self._collected > rollout_id.number)) >= self._enough

    def collected(self, rollout_id: RolloutId) -> None:
        self._collected[rollout_id.shard] = rollout_id.number + 1


@dataclass(frozen=True)
class RecordedPreemption:
    """Preempts at the same steps as a recorded run."""

    steps: Mapping[RolloutId, int]
    """By rollout that was preempted: its number of steps."""

    def preempts(self, rollout_id: RolloutId, t: int) -> bool:
        return self.steps.get(rollout_id) == t

    def collected(self, rollout_id: RolloutId) -> None:
        pass


def preemption(
    scheme: Scheme, recorded: Recorded | None, counts: SharedMemory | DistantCounts | None, own: int
) -> Preemption | None:
    """The Preemption of a process that collects; None if its rollouts are never preempted.

    Args:
        recorded: the record to repeat, if any.
        counts: the counts of all collecting processes: shared memory, or learner 0's counts. None if there is only one
            process.
        own: the number of this process's shards, which are equally fast.
    """
    if scheme.preempt == 1:
        return None
    if recorded is not None:
        return RecordedPreemption(recorded.preempted_after)
    if counts is None or own == scheme.shards:
        return None
    if isinstance(counts, SharedMemory):
        return SharedPreemption(counts, scheme, own)
    return DistantPreemption(counts, scheme, own)
