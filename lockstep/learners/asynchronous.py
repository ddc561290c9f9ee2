"""Asynchronous gradients: every batch slot's slice of a minibatch gives a separate update, applied when it is ready.

The newest parameters lie in memory that all learners share, with the optimizer's state and the target network. A
learner reads them, computes the gradient of one of its slots' slices, and applies it under a lock to the parameters
of that moment. It waits for other learners only at the end of the iteration, when all gradients have been applied.

A gradient that was computed with the parameters after b updates, and is applied after u, is u - b updates behind. This
may be at most scheme.max_gradient_lag. So every gradient in flight has a deadline, and a gradient may only be applied,
or begun, if all others can still meet theirs (earliest deadline first, as in lockstep.transport.free_running). The
gradient with the earliest deadline always may.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.buffers.batches import CollectedRollout
from lockstep.core.digests import fast_digest
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import Arena
from lockstep.distributed.tree import TreeSum
from lockstep.learners.learner import Applied, Learner, LearningReport
from lockstep.learners.optimizer import Optimizer
from lockstep.system.graphs import Capture

_PAUSE = 0.0005
"""Seconds between checks whether another learner has applied its gradient."""
_TEXT = 4096
"""Bytes for the optimizer's counts of steps. Groups of parameters get one when they first move, so the number is not
known before."""


def in_time(count: int, bases: Iterable[int], bound: int) -> bool:
    """Whether all gradients in flight can be applied within the bound after `count` updates. They can if they can in
    the order of their bases.

    Args:
        count: updates so far.
        bases: for each gradient, the updates before the parameters that it is computed with.
        bound: the most updates that a gradient may be behind.
    """
    return all(count + i - base <= bound for i, base in enumerate(sorted(bases)))


class Parameters(Protocol):
    """The parameters that a learner reads and updates. Updates are counted within an iteration."""

    def open(self) -> None:
        """Begin an iteration."""
        ...

    def read(self, behind: int) -> None:
        """Load the parameters for the next gradient into the agent: the newest, or those of `behind` updates before,
        when a record is repeated."""
        ...

    def change(self, move: Callable[[int], float]) -> tuple[int, int, float]:
        """Load the newest parameters into the agent, and update them.

        Args:
            move: updates them. It gets the number of earlier updates.

        Returns:
            That number, how many of these updates came since read, and what move returned.
        """
        ...

    def close(self) -> None:
        """End the iteration once all learners have applied their last gradient, and load the newest parameters."""
        ...


class OwnParameters:
    """The parameters of a single learner. It keeps those of the last `keep` updates, so that it can repeat a record."""

    def __init__(self, agent: Agent, keep: int) -> None:
        self._agent, self._count, self._behind = agent, 0, 0
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

    def change(self, move: Callable[[int], float]) -> tuple[int, int, float]:
        if self._behind:
            self._load(0)
        place, result = self._count, move(self._count)
        self._count += 1
        self._keep()
        return place, self._behind, result

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
            # The lock guards them, so no learner needs a copy.
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

    def change(self, move: Callable[[int], float]) -> tuple[int, int, float]:
        with self._locked_when(lambda count, others: in_time(count + 1, others, self._bound)):
            self._take()
            place, behind = self._seen - self._first, self._seen - int(self._bases[self._group.rank])
            result = move(place)
            self._write()
            self._seen += 1
            self._count[0] = self._seen
            self._bases[self._group.rank] = -1
        return place, behind, result

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


class AsyncLearner(Learner):
    """Applies the gradients of its slots' slices one by one: a minibatch of S slots gives S updates, each by the mean
    over a slice.

    Args:
        recorded: the updates of each iteration in order, as (slot, behind), for a learner of all slots to repeat.
    """

    def __init__(
        self,
        agent: Agent,
        slots: range,
        tree: TreeSum,
        *,
        alive: Callable[[], None] = lambda: None,
        capture: Capture | None = None,
        recorded: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> None:
        super().__init__(agent, slots, tree, alive=alive, capture=capture)
        self._recorded = recorded
        bound = agent.experiment.scheme.max_gradient_lag
        self._parameters: Parameters
        if tree.group.size == 1:
            oldest = max((behind for updates in recorded for _, behind in updates), default=0)
            self._parameters = OwnParameters(agent, oldest)
        else:
            self._parameters = SharedParameters(agent, self.optimizer, tree.group, bound)

    def _learn(self, iteration: int, rollouts: dict[int, list[CollectedRollout]]) -> LearningReport:
        begin, waited = time.perf_counter(), self._tree.group.waited
        experiment, algorithm = self._agent.experiment, self._algorithm
        hyper = algorithm.hyperparameters(iteration / experiment.iterations)
        steps = self._begin(iteration, rollouts, hyper)
        before = algorithm.updates_before(iteration, experiment.samples_per_iteration)
        digests: dict[int, str] = {}
        applied: dict[int, Applied] = {}
        taken = dict.fromkeys(self._slots, 0)  # gradient steps so far
        # As _split counts, then the sum of the gradients' norms, and their number.
        sums = {slot: torch.zeros(3 + len(algorithm.metric_names), dtype=torch.float64) for slot in self._slots}
        stopped: set[int] = set()
        self._parameters.open()
        for slot, behind in self._recorded[iteration] if self._recorded else self._turns(steps, stopped):
            step, number = taken[slot], before + taken[slot] + 1
            taken[slot] += 1
            self._parameters.read(behind)
            gradient = self._gradient(slot, step, {**hyper, "update": number})
            if step == 0:
                digests[slot] = fast_digest(gradient)
            self._alive()
            gradient, added = self._split(gradient)

            def move(place: int, gradient: Tensor = gradient, number: int = number) -> float:
                norm = float(self.optimizer.step(gradient, algorithm.groups(number, hyper)))
                self._agent.follow(before * experiment.scheme.shards + place + 1)
                return norm

            place, behind, norm = self._parameters.change(move)
            applied[place] = Applied(slot, behind)
            sums[slot] += torch.cat([added.double(), torch.tensor([norm, 1.0], dtype=torch.float64)])
            if self._stops(added):
                stopped.add(slot)
        *total, norms, updates = self._tree.sum(sums)  # after which all have applied their last gradient
        self._parameters.close()
        metrics = self._metrics(hyper, torch.stack(total), int(updates), float(norms), int(updates))
        seconds = time.perf_counter() - begin - (self._tree.group.waited - waited)
        return LearningReport(metrics, int(updates), digests, applied, seconds)

    def _turns(self, steps: int, stopped: set[int]) -> Iterator[tuple[int, int]]:
        """(slot, 0) for each gradient of this learner, until its slot stops."""
        for _ in range(steps):
            for slot in self._slots:
                if slot not in stopped:
                    yield slot, 0
