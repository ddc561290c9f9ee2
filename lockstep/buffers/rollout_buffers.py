"""Rollout buffers: the preallocated memory that collectors write rollouts into, private or shared with learners.

A rollout buffer holds one rollout of an acting batch, that is, of one or more shards. If collecting runs ahead of
learning with a policy lag of k, or repeats a free-running run, k + 1 buffers are used in turn, so that no rollout is
overwritten before it has been learned from. Otherwise there is one buffer.

Shape legend: T time, A rows of an acting batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from torch import Tensor

from lockstep import envs
from lockstep.agent import Agent
from lockstep.core.arrays import overlap
from lockstep.core.rollout import Rollout
from lockstep.distributed.shared_memory import Arena
from lockstep.experiment import Experiment
from lockstep.models.base import ActionDistribution


@dataclass(frozen=True)
class ActingGroup:
    """The shards that one inference call serves. Each has its rows of a batch of fixed size."""

    shards: tuple[int, ...]
    first: int
    """The shard whose rows come first. It may belong to another collector."""
    size: int
    """A: the number of rows. Those of other collectors' shards stay empty."""
    per_shard: int
    """B: the environments of a shard."""

    def rows(self, shard: int) -> slice:
        """A shard's rows."""
        start = (shard - self.first) * self.per_shard
        return slice(start, start + self.per_shard)


def acting_groups(experiment: Experiment, shards: range, *, pads: bool = True) -> list[ActingGroup]:
    """The acting groups of one collector's shards, according to scheme.acting_batch.

    Args:
        pads: whether groups have rows for other collectors' shards (lockstep.algorithms.kernel_table.Kernels.pads).
    """
    per_shard = experiment.envs_per_shard
    size = experiment.scheme.acting_batch or per_shard
    together = size // per_shard
    groups: dict[int, list[int]] = {}
    for shard in shards:
        groups.setdefault(shard // together, []).append(shard)
    if pads:
        return [ActingGroup(tuple(own), number * together, size, per_shard) for number, own in groups.items()]
    return [ActingGroup(tuple(own), own[0], len(own) * per_shard, per_shard) for own in groups.values()]


@dataclass(frozen=True)
class RolloutBuffer:
    """One rollout of an acting group."""

    whole: Rollout
    """All rows, [T, A]."""
    actions: Tensor
    """[T+1, A, *action_shape]: the action before the rollout, and whole.action."""
    rewards: Tensor
    """fp32 [T+1, A]: the reward before the rollout, and whole.reward."""
    shards: dict[int, Rollout]
    """Each shard's rows, as views."""


class RolloutBuffers:
    """All buffers of one collector.

    Args:
        agent: determines the shapes.
        shards: the collector's shards.
        count: how many rollouts of a shard are held at the same time.
        arena: allocates the memory.
    """

    def __init__(self, agent: Agent, shards: range, count: int, arena: Arena) -> None:
        self.shards = shards
        self.groups = [
            (group, [allocate_buffer(agent, group, arena) for _ in range(count)])
            for group in acting_groups(agent.experiment, shards, pads=agent.kernels is None or agent.kernels.pads)
        ]
        self._by_shard = {shard: buffers for group, buffers in self.groups for shard in group.shards}

    def rollout(self, shard: int, number: int) -> Rollout:
        """A shard's rollout, valid until its buffer is reused."""
        buffers = self._by_shard[shard]
        return buffers[number % len(buffers)].shards[shard]


def allocate_buffer(agent: Agent, group: ActingGroup, arena: Arena) -> RolloutBuffer:
    """A buffer of an acting group, from an arena."""
    model = agent.model
    whole, actions, rewards = allocate(
        agent.experiment, agent.observation_space, model.distribution, model.state_size, group.size, arena
    )
    shards = {
        shard: whole.replace(core_state=None)[:, rows].replace(core_state=whole.core_state[rows])
        for shard, rows in ((shard, group.rows(shard)) for shard in group.shards)
    }
    return RolloutBuffer(whole, actions, rewards, shards)


def allocate(
    experiment: Experiment,
    observation_space: gymnasium.Space[Any],
    distribution: ActionDistribution,
    state_size: int,
    size: int,
    arena: Arena,
) -> tuple[Rollout, Tensor, Tensor]:
    """Allocate one rollout of `size` environments, and its actions and rewards including the previous ones."""
    steps = experiment.algorithm.rollout
    actions = arena.zeros((steps + 1, size, *distribution.action_shape), distribution.action_dtype)
    rewards = arena.zeros((steps + 1, size))
    action, reward = overlap(actions), overlap(rewards)
    previous = experiment.model.uses_previous
    whole = Rollout(
        obs=envs.allocate_observation(observation_space, (steps + 1, size), arena),
        start=arena.zeros((steps + 1, size), torch.bool),
        action=action.current,
        reward=reward.current,
        prev_action=action.previous if previous else None,
        prev_reward=reward.previous if previous else None,
        log_prob=arena.zeros((steps, size)),
        value=arena.zeros((steps + 1, size)),
        terminated=arena.zeros((steps, size), torch.bool),
        truncated=arena.zeros((steps, size), torch.bool),
        valid=arena.zeros((steps, size), torch.bool),
        core_state=arena.zeros((size, state_size)),
        policy=arena.zeros((steps, size, distribution.num_params)) if experiment.algorithm.keeps_policy else None,
    )
    return whole, actions, rewards
