"""The parameters of asynchronous learners that share no memory: learner 0's process keeps them for all learners.

A learner reads the newest parameters and sends its gradient, which the store applies to the newest parameters. Calls
wait as long as scheme.max_gradient_lag requires, by the same rule as in shared memory.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple, Protocol

import numpy as np
import torch

from lockstep.agent import Agent
from lockstep.distributed.groups import Group
from lockstep.learners.optimizer import Optimizer, optimizer_for
from lockstep.learners.shared_parameters import apply, in_time
from lockstep.learners.steps import Computed
from lockstep.models.arithmetic import arithmetic

Read = tuple[int, list[np.ndarray]]
"""The number of updates, and the parameters after them, as Agent.vectors: fp32 [N] each. No parameters if the learner
has them."""


class Changed(NamedTuple):
    """An update of the store's parameters."""

    place: int
    """Updates of the iteration before it."""
    behind: int
    """Updates between reading its parameters and applying it."""
    norm: float
    """The norm of its gradient."""
    seconds: float
    """Seconds that it took, without waiting for others."""


class Store(Protocol):
    """The store, as learners call it. Updates are counted since the run was started or resumed."""

    def read(self, learner: int, seen: int) -> Read:
        """Wait until a learner may begin a gradient; returns the parameters to compute it with.

        Args:
            seen: the updates before the parameters that the learner has.
        """
        ...

    def newest(self, seen: int) -> Read:
        """The newest parameters."""
        ...

    def change(self, learner: int, computed: Computed, first: int) -> Changed:
        """Wait until a learner may apply its gradient, and apply it.

        Args:
            computed: its gradient as an array, so that it travels without copies.
            first: updates before this iteration.
        """
        ...


class ParameterStore:
    """The store itself, in learner 0's process.

    Args:
        bound: the most updates that a gradient may be behind.
    """

    def __init__(self, bound: int) -> None:
        self._bound, self._count = bound, 0
        self._changed = threading.Condition()
        self._bases: dict[int, int] = {}
        """By learner: the updates before the parameters that its gradient in flight is computed with."""
        self._begun = False

    def join(self, agent: Agent, optimizer: Optimizer) -> None:
        """Allocate memory for the parameters. The store's optimizer shares its state with learner 0's, which
        checkpoints contain."""
        self._agent = Agent(agent.experiment, like=agent)
        self._optimizer = optimizer_for(agent.experiment, self._agent.flat)
        self._optimizer.moments, self._optimizer.counts = optimizer.moments, optimizer.counts

    def begin(self, agent: Agent) -> None:
        """Copy the parameters of learner 0, which all learners have. From now on, learners can read and change them."""
        with self._changed:
            for mine, given in zip(self._agent.vectors, agent.vectors, strict=True):
                mine.copy_(given)
            self._agent.round()
            self._begun = True
            self._changed.notify_all()

    def read(self, learner: int, seen: int) -> Read:
        def may() -> bool:
            return self._begun and in_time(self._count, [*self._bases.values(), self._count], self._bound)

        with self._changed:
            self._changed.wait_for(may)
            self._bases[learner] = self._count
            return self._newest(seen)

    def newest(self, seen: int) -> Read:
        with self._changed:
            assert not self._bases
            return self._newest(seen)

    def change(self, learner: int, computed: Computed, first: int) -> Changed:
        def may() -> bool:
            others = [base for other, base in self._bases.items() if other != learner]
            return in_time(self._count + 1, others, self._bound)

        # A copy: an array of a message may be read-only, and alignment may decide which kernel computes.
        computed = computed._replace(gradient=torch.tensor(computed.gradient))
        with self._changed:
            self._changed.wait_for(may)
            begin = time.perf_counter()
            place, behind = self._count - first, self._count - self._bases.pop(learner)
            with arithmetic(self._agent.model):
                norm = apply(computed, place, self._agent, self._optimizer)
            self._count += 1
            self._changed.notify_all()
            return Changed(place, behind, norm, time.perf_counter() - begin)

    def _newest(self, seen: int) -> Read:
        vectors = [] if seen == self._count else [vector.numpy().copy() for vector in self._agent.vectors]
        return self._count, vectors


class StoredParameters:
    """The parameters in the store, for one of the learners."""

    def __init__(self, agent: Agent, optimizer: Optimizer, group: Group, store: Store) -> None:
        self._agent, self._group, self._store = agent, group, store
        self._seen, self._first = -1, 0
        """The updates before the agent's parameters, and before this iteration."""
        if isinstance(store, ParameterStore):
            store.join(agent, optimizer)

    def open(self) -> None:
        if self._seen < 0:
            if isinstance(self._store, ParameterStore):
                self._store.begin(self._agent)
            self._seen = 0
        self._first = self._seen

    def read(self, behind: int) -> None:
        assert behind == 0, "a record is repeated by a single learner"
        begin = time.perf_counter()
        self._take(self._store.read(self._group.rank, self._seen))
        self._group.waited += time.perf_counter() - begin

    def change(self, computed: Computed) -> tuple[int, int, float]:
        begin = time.perf_counter()
        sent = computed._replace(gradient=computed.gradient.numpy())
        place, behind, norm, seconds = self._store.change(self._group.rank, sent, self._first)
        waited = time.perf_counter() - begin
        # In its own process, applying the gradient is work.
        self._group.waited += waited - seconds if isinstance(self._store, ParameterStore) else waited
        return place, behind, norm

    def close(self) -> None:
        self._take(self._store.newest(self._seen))

    def _take(self, read: Read) -> None:
        self._seen, vectors = read
        for mine, newest in zip(self._agent.vectors, vectors, strict=False):
            mine.numpy()[...] = newest
        if vectors:
            self._agent.round()
