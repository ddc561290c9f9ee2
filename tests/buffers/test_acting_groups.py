"""Acting batches of collectors that hold some of a batch's shards."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import EXPERIMENTS

from lockstep.agent import Agent
from lockstep.buffers.rollout_buffers import RolloutBuffers, acting_groups
from lockstep.collectors.collectors import Collector
from lockstep.core.arrays import named_leaves
from lockstep.core.rollout import Rollout
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.experiment import Experiment


def experiment(name: str, precision: str = "portable") -> Experiment:
    """One with four shards, which act together."""
    full = EXPERIMENTS[name]()
    scheme = dataclasses.replace(full.scheme, acting_batch=full.env.num_envs)
    return full.replace(scheme=scheme, precision=precision)


def collected(of: Experiment, shards: range) -> tuple[list[int], dict[int, Rollout]]:
    """The sizes of a collector's acting batches, and the second rollout of each of its shards."""
    agent = Agent(of)
    buffers = RolloutBuffers(agent, shards, 1, PrivateArena())
    collector, version = Collector(agent, buffers), agent.version(0)
    collector.reset()
    collector.collect(0, lambda t: version)
    rollouts = {each.info.shard: each.rollout.map(torch.clone) for each in collector.collect(1, lambda t: version)}
    collector.close()
    return [group.size for group, _ in buffers.groups], rollouts


@pytest.mark.parametrize("name", ["portable-minatar-dqn", "rainbow-lag-1"])
def test_rows_act_alone_as_they_act_together(name: str) -> None:
    of = experiment(name)
    each = of.envs_per_shard
    (size,), together = collected(of, range(4))
    assert size == of.env.num_envs
    for shards in (range(2, 4), range(1, 2)):
        sizes, alone = collected(of, shards)
        assert sizes == [len(shards) * each] and set(alone) == set(shards)
        for shard, rollout in alone.items():
            for (leaf, mine), (_, other) in zip(named_leaves(rollout), named_leaves(together[shard]), strict=True):
                assert torch.equal(mine, other), leaf


def test_other_arithmetic_keeps_the_shape_of_a_call() -> None:
    of = experiment("portable-minatar-dqn", "fp32")
    assert [group.size for group, _ in RolloutBuffers(Agent(of), range(1, 2), 1, PrivateArena()).groups] == [4]
    (group,) = acting_groups(of, range(1, 3))
    assert (group.first, [group.rows(shard) for shard in group.shards]) == (0, [slice(1, 2), slice(2, 3)])
