"""The gradient and the priorities of one slice of a minibatch, by autograd and by a learner's kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.buffers.batches import Slice
from lockstep.buffers.replay_batches import Prefetched
from lockstep.core.transitions import Sequences, Transitions
from lockstep.distributed.groups import Group
from lockstep.distributed.tree import TreeSum
from lockstep.kernels.replayed import Items
from lockstep.learners.learner import Learner
from lockstep.learners.off_policy_kernels import ReplayLearner
from lockstep.learners.process import learner_of
from lockstep.models.arithmetic import arithmetic

_SLOTS, _SLOT = 4, 2


def same(a: Any, b: Any) -> bool:
    """Whether two arrays of float32 have identical bits."""
    return np.array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


def by_autograd(agent: Agent, batch: Transitions | Sequences, hyper: dict[str, float]) -> tuple[Tensor, Tensor]:
    """The gradient of the algorithm's loss, followed by counts and metrics, and the priorities."""
    learner, priorities = Learner(agent, range(_SLOTS), TreeSum(_SLOTS, Group())), list[Tensor]()
    learner.batches.learned = lambda slot, x: priorities.append(x)  # type: ignore[method-assign]
    learner.batches.slice = lambda slot, step: Slice(batch, agent.normalizers)  # type: ignore[method-assign]
    with arithmetic(agent.model):
        gradient = learner._gradient(_SLOT, 0, hyper)
    (only,) = priorities
    return gradient, only


def by_kernel(agent: Agent, batch: Transitions | Sequences, hyper: dict[str, float]) -> tuple[Tensor, Tensor]:
    """The same by the learner that has kernels, whose slots all have this batch."""
    learner = learner_of(agent, range(_SLOTS), TreeSum(_SLOTS, Group()))
    given, computed = dict[int, Tensor](), list[Tensor]()
    assert isinstance(learner, ReplayLearner)
    learner.batches.learned = given.__setitem__  # type: ignore[method-assign]
    call = learner._call

    def noted(items: Items, hyper: dict[str, float], joined: bool, out: np.ndarray, priority: np.ndarray) -> None:
        call(items, hyper, joined, out, priority)
        computed.append(torch.from_numpy(priority))

    learner._call = noted  # type: ignore[method-assign]
    learner.batches.prefetched = lambda slot, step: (Prefetched(batch, [(None, None)]), 0)  # type: ignore
    out = np.zeros_like(learner._out)
    for update in (2, hyper["update"]):  # nothing of an earlier gradient step remains, even if it moved more
        learner.compute(0, {**hyper, "update": update}, out)
    together = np.zeros_like(out)
    for update in (2, hyper["update"]):
        learner.compute(0, {**hyper, "update": update}, together, joined=True)
    total = TreeSum(_SLOTS, Group()).sum({slot: torch.from_numpy(out[slot].copy()) for slot in range(_SLOTS)})
    np.testing.assert_array_equal(together[0], total.numpy())
    priorities = computed[-1].chunk(_SLOTS)
    assert list(given) == (list(range(_SLOTS)) if agent.algorithm.weighted else []), "those of prioritized replay"
    assert all(torch.equal(x, priorities[slot]) for slot, x in given.items())
    return torch.from_numpy(out[_SLOT]), priorities[_SLOT]
