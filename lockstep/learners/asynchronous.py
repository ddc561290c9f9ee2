"""Asynchronous gradients: every batch slot's slice of a minibatch gives a separate update, applied when it is ready.

The newest parameters, with the optimizer's state and the target network, are in memory that all learners share
(lockstep.learners.shared_parameters) or, on several machines, in learner 0's process
(lockstep.learners.parameter_store). A learner reads them and computes the gradient for the slice of one of its slots,
which is then applied to the newest parameters. It waits for other learners only at the end of the iteration, until all
gradients have been applied.

A gradient that was computed with the parameters after b updates, and is applied after u, is u - b updates behind. This
may be at most scheme.max_gradient_lag. So every gradient in flight has a deadline, and a gradient may only be applied,
or begun, if all others can still meet theirs (earliest deadline first, as in lockstep.transport.free_running). The
gradient with the earliest deadline may always be applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lockstep.agent import Agent
from lockstep.core.digests import fast_digest
from lockstep.distributed.tree import TreeSum
from lockstep.learners.learner import Learner
from lockstep.learners.parameter_store import Store, StoredParameters
from lockstep.learners.shared_parameters import OwnParameters, Parameters, SharedParameters
from lockstep.learners.steps import Applied, Computed, Steps
from lockstep.system.graphs import Capture


class AsyncLearner(Learner):
    """Applies the gradients of its slots' slices one by one: a minibatch of S slots gives S updates, each by the mean
    over a slice.

    Args:
        recorded: the updates of each iteration in order, as (slot, behind), for a learner of all slots to repeat.
        store: keeps the parameters of several learners that share no memory.
    """

    def __init__(
        self,
        agent: Agent,
        slots: range,
        tree: TreeSum,
        *,
        capture: Capture | None = None,
        recorded: Sequence[Sequence[tuple[int, int]]] = (),
        store: Store | None = None,
    ) -> None:
        super().__init__(agent, slots, tree, capture=capture)
        self._recorded = recorded
        self._parameters: Parameters
        if tree.group.size == 1:
            oldest = max((behind for updates in recorded for _, behind in updates), default=0)
            self._parameters = OwnParameters(agent, self.optimizer, oldest)
        elif store is not None:
            self._parameters = StoredParameters(agent, self.optimizer, tree.group, store)
        else:
            bound = agent.experiment.scheme.max_gradient_lag
            self._parameters = SharedParameters(agent, self.optimizer, tree.group, bound)

    def _take_steps(self, iteration: int, count: int, before: int, hyper: dict[str, float]) -> Steps:
        algorithm = self._algorithm
        digests: dict[int, str] = {}
        applied: dict[int, Applied] = {}
        taken = dict.fromkeys(self._slots, 0)  # gradient steps so far
        # As _split counts, then the sum of the gradients' norms, and their number.
        sums = {slot: torch.zeros(self._counts + 2, dtype=torch.float64) for slot in self._slots}
        stopped: set[int] = set()
        self._parameters.open()
        for slot, behind in self._recorded[iteration] if self._recorded else self._turns(count, stopped):
            step, number = taken[slot], before + taken[slot] + 1
            taken[slot] += 1
            self._parameters.read(behind)
            (gradient,) = self._gradients((slot,), step, {**hyper, "update": number})
            if step == 0:
                digests[slot] = fast_digest(gradient)
            self.heartbeat()
            gradient, added = self._split(gradient)
            added = added.cpu()
            computed = Computed(gradient, iteration, number, algorithm.groups(number, hyper))
            place, behind, norm = self._parameters.change(computed)
            applied[place] = Applied(slot, behind)
            sums[slot] += torch.cat([added.double(), torch.tensor([norm, 1.0], dtype=torch.float64)])
            if algorithm.reads_steps:
                found = self._means(added)
                self._adapt(hyper, found)
                if algorithm.stop_early(found):
                    stopped.add(slot)
        total = self._tree.sum(sums)  # after which all have applied their last gradient
        self._parameters.close()
        norms, updates = total[self._counts :].tolist()
        return Steps(total[: self._counts], int(updates), norms, int(updates), digests, applied)

    def _turns(self, steps: int, stopped: set[int]) -> Iterator[tuple[int, int]]:
        """(slot, 0) for each gradient of this learner, until its slot stops."""
        for _ in range(steps):
            for slot in self._slots:
                if slot not in stopped:
                    yield slot, 0
