"""The newest parameters of asynchronous learners. A single learner keeps them in its own memory, and several learners
of one machine in memory that they share. On several machines, a process keeps them (lockstep.learners.parameter_store).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import Arena
from lockstep.learners.optimizer import Optimizer
from lockstep.learners.steps import Computed

_PAUSE = 0.0005
"""Seconds between checks whether another learner has applied its gradient."""
_TEXT = 4096
"""Bytes for the optimizer's counts of steps. Groups of parameters get one when they first move, so the number is not
known before."""


def in_time(count: int, bases: Iterable[int], bound: int) -> bool:
    """Whether all gradients in flight can be applied within the bound after `count` updates. It is enough to try them
    in the order of their bases.

    Args:
        count: updates so far.
        bases: for each gradient, the updates before the parameters that it is computed with.
        bound: the most updates that a gradient may be behind.
    """
    return all(count + i - base <= bound for i, base in enumerate(sorted(bases)))


def apply(computed: Computed, place: int, agent: Agent, optimizer: Optimizer) -> float:
    """Update an agent's parameters by the gradient of a slice; place: how many updates of the iteration came before.
    Returns the gradient's norm."""
    if agent.sees_gradients:
        agent.before_step(computed.gradient)
    norm = float(optimizer.step(computed.gradient, computed.groups))
    experiment = agent.experiment
    before = agent.algorithm.updates_before(computed.iteration, experiment.samples_per_iteration)
    agent.follow(before * experiment.scheme.shards + place + 1)
    return norm


class Parameters(Protocol):
    """The parameters that a learner reads and updates. Updates are counted within an iteration."""

    def open(self) -> None:
        """Begin an iteration."""
        ...

    def read(self, behind: int) -> None:
        """Load the parameters for the next gradient into the agent: the newest, or those of `behind` updates before,
        when a record is repeated."""
        ...

    def change(self, computed: Computed) -> tuple[int, int, float]:
        """Update the newest parameters by a gradient that was computed with those that were read.

        Returns:
            The number of earlier updates, how many of them came since read, and the gradient's norm.
        """
        ...

    def close(self) -> None:
        """End the iteration once all learners have applied their last gradient, and load the newest parameters."""
        ...


class OwnParameters:
    """The parameters of a single learner. The object keeps those of the last `keep` updates, so that a record can be
    repeated."""

    def __init__(self, agent: Agent, optimizer: Optimizer, keep: int) -> None:
        self._agent, self._optimizer, self._count, self._behind = agent, optimizer, 0, 0
        self._kept: deque[list[Tensor]] = deque(maxlen=keep + 1)
        """The newest last."""

    def open(self) -> None:
        self._count = 0
        self._kept.clear()
        self._keep()

    def read(self, behind: int) -> None:
        self._behind = behind
        if behind:
            self._load(behind)

    def change(self, computed: Computed) -> tuple[int, int, float]:
        if self._behind:
            self._load(0)
        place, norm = self._count, apply(computed, self._count, self._agent, self._optimizer)
        self._count += 1
        self._keep()
        return place, self._behind, norm

    def close(self) -> None:
        pass

    def _keep(self) -> None:
        if self._kept.maxlen != 1:
            self._kept.append([vector.clone() for vector in self._agent.vectors])

    def _load(self, behind: int) -> None:
        for vector, kept in zip(self._agent.vectors, self._kept[-1 - behind], strict=True):
            vector.copy_(kept)
        self._agent.round()


class SharedParameters:
    """The parameters of several learners on one machine. If a learner dies, its lock is released, and the supervisor
    ends the others."""

    def __init__(self, agent: Agent, optimizer: Optimizer, group: Group, bound: int) -> None:
        assert group.shared is not None
        self._agent, self._optimizer, self._group, self._bound = agent, optimizer, group, bound
        self._memory = group.shared

        def layout(arena: Arena) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
            vectors = [arena.zeros(tuple(x.shape)) for x in (*agent.vectors, *optimizer.moments.values())]
            count, bases = arena.zeros((1,), torch.int64), arena.zeros((group.size,), torch.int64)
            return vectors, count, bases, arena.zeros((_TEXT,), torch.uint8)

        vectors, count, bases, text = self._memory.map(layout)
        self._count, self._bases, self._text = count.numpy(), bases.numpy(), text.numpy()
        moments = vectors[len(agent.vectors) :]
        if agent.device.type == "cpu":
            # The lock guards them, so no learner needs a copy. Only learner 0 writes what they begin with: if another
            # one did, it could overwrite a checkpoint's.
            if group.rank == 0:
                for shared, begin in zip(moments, optimizer.moments.values(), strict=True):
                    shared.copy_(begin)
            optimizer.moments = dict(zip(optimizer.moments, moments, strict=True))
            moments = []
        mine = [*agent.vectors, *optimizer.moments.values()]
        self._pairs = list(zip(mine, [*vectors[: len(agent.vectors)], *moments], strict=False))
        self._seen, self._first = -1, 0
        """The updates before the agent's parameters, and before this iteration."""

    def open(self) -> None:
        if self._seen < 0:
            if self._group.rank == 0:
                self._bases[:] = -1
                self._write()
            self._group.barrier()
            self._seen = 0
        self._first = self._seen

    def read(self, behind: int) -> None:
        assert behind == 0, "a record is repeated by a single learner"
        with self._locked_when(lambda count, others: in_time(count, [*others, count], self._bound)):
            self._take()
            self._bases[self._group.rank] = self._seen

    def change(self, computed: Computed) -> tuple[int, int, float]:
        with self._locked_when(lambda count, others: in_time(count + 1, others, self._bound)):
            self._take()
            place, behind = self._seen - self._first, self._seen - int(self._bases[self._group.rank])
            norm = apply(computed, place, self._agent, self._optimizer)
            self._write()
            self._seen += 1
            self._count[0] = self._seen
            self._bases[self._group.rank] = -1
        return place, behind, norm

    def close(self) -> None:
        with self._memory.locked():
            assert (self._bases < 0).all()
            self._take()

    @contextlib.contextmanager
    def _locked_when(self, may: Callable[[int, list[int]], bool]) -> Iterator[None]:
        """Take the lock once `may` allows it, given the number of updates and the others' gradients in flight."""
        begin = time.perf_counter()
        while True:
            with self._memory.locked():
                bases = self._bases.tolist()
                bases.pop(self._group.rank)
                if may(int(self._count[0]), [base for base in bases if base >= 0]):
                    self._group.waited += time.perf_counter() - begin
                    yield
                    return
            time.sleep(_PAUSE)

    def _take(self) -> None:
        if self._seen == self._count[0]:
            return
        for mine, shared in self._pairs:
            mine.copy_(shared)
        self._agent.round()
        self._optimizer.count(json.loads(self._text.tobytes()))
        self._seen = int(self._count[0])

    def _write(self) -> None:
        for mine, shared in self._pairs:
            shared.copy_(mine)
        text = json.dumps({name: float(count) for name, count in self._optimizer.counts.items()}).encode()
        assert len(text) <= _TEXT, "too many groups of parameters"
        self._text[:] = np.frombuffer(text.ljust(_TEXT), np.uint8)
