"""Chooses the source of minibatches: the algorithm's own, or the one for its kind of algorithm."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lockstep.agent import Agent
from lockstep.algorithms.rnd import RND
from lockstep.algorithms.wrapper import Wrapper
from lockstep.buffers.batches import Batches
from lockstep.buffers.intrinsic import CuriousBatches
from lockstep.buffers.on_policy import FreshBatches
from lockstep.buffers.replay_batches import ReplayBatches
from lockstep.distributed.tree import TreeSum


@runtime_checkable
class BringsBatches(Protocol):
    """An algorithm with its own source of minibatches."""

    def batches(self, agent: Agent, slots: range, tree: TreeSum) -> Batches:
        """The source for one learner.

        Args:
            agent: the learner's agent.
            slots: the learner's batch slots.
            tree: adds up numbers over the slots of all learners.
        """
        ...


def batches_for(agent: Agent, slots: range, tree: TreeSum) -> Batches:
    """The source of minibatches for one learner. The arguments are those of BringsBatches.batches."""
    algorithm = inner = agent.algorithm
    while isinstance(inner, Wrapper):
        inner = inner.inner
    if isinstance(inner, BringsBatches):
        return inner.batches(agent, slots, tree)
    if agent.experiment.algorithm.replays:
        return ReplayBatches(agent, slots)
    if agent.kernels is not None:
        from lockstep.algorithms.kernel_table import PPOKernels  # which needs Numba
        from lockstep.buffers.ppo_batches import PPOBatches

        if isinstance(agent.kernels, PPOKernels):
            return PPOBatches(agent, slots, tree)
    return (CuriousBatches if isinstance(algorithm, RND) else FreshBatches)(agent, slots, tree)
