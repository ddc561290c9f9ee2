"""Preemption: whoever collects more slowly than the others ends its rollout early.

Once the share `scheme.preempt` of the shards of other processes has collected the rollout of that number, a shard that
has not is cut after the step that it is in, so that learning need not wait for stragglers (DD-PPO, Wijmans et al. 2020,
https://arxiv.org/abs/1911.00357, section 3, which cuts workers). Its episodes go on in its next rollout. Timing decides
where it is cut; the ledger says so, and a repetition cuts there again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.core.schedule import Recorded, RolloutId
from lockstep.distributed.shared_memory import Arena, SharedMemory
from lockstep.scheme import Scheme


class Preemption(Protocol):
    """Decides where rollouts end."""

    def cut(self, rollout_id: RolloutId, t: int) -> bool:
        """Whether a rollout ends with the t steps that it has, at least one and fewer than it is to have."""
        ...

    def collected(self, rollout_id: RolloutId) -> None:
        """A rollout has all the steps that it will have."""
        ...


class Stragglers:
    """Cuts those that are late, as all collecting processes of a machine see it.

    No lock is needed: each number is written by one process alone, and only grows.
    """

    def __init__(self, memory: SharedMemory, scheme: Scheme, own: int) -> None:
        def layout(arena: Arena) -> Tensor:
            return arena.zeros((scheme.shards,), torch.int64)

        self._collected: np.ndarray = memory.map(layout).numpy()
        """By shard: rollouts from 0 on that it has collected."""
        self._enough = scheme.enough(own)

    def cut(self, rollout_id: RolloutId, t: int) -> bool:
        return int(np.count_nonzero(self._collected > rollout_id.number)) >= self._enough

    def collected(self, rollout_id: RolloutId) -> None:
        self._collected[rollout_id.shard] = rollout_id.number + 1


@dataclass(frozen=True)
class RecordedCuts:
    """Cuts where a run was cut before."""

    steps: Mapping[RolloutId, int]
    """Of the rollouts that were cut."""

    def cut(self, rollout_id: RolloutId, t: int) -> bool:
        return self.steps.get(rollout_id) == t

    def collected(self, rollout_id: RolloutId) -> None:
        pass


def preemption(scheme: Scheme, recorded: Recorded | None, memory: SharedMemory | None, own: int) -> Preemption | None:
    """What a process that collects decides by; None if it cuts nothing.

    Args:
        recorded: what is to be repeated, if anything is.
        memory: of all processes that collect; None if there is one alone.
        own: shards of this process, which are all equally fast.
    """
    if scheme.preempt == 1:
        return None
    if recorded is not None:
        return RecordedCuts(recorded.cut_after)
    return None if memory is None or own == scheme.shards else Stragglers(memory, scheme, own)
