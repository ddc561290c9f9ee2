"""Copies of rollouts to a device: what lies together is copied once."""

from __future__ import annotations

from unittest import mock

import torch
from tiny import EXPERIMENTS

from lockstep.agent import Agent
from lockstep.buffers import slabs
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.core.arrays import named_leaves
from lockstep.distributed.shared_memory import PrivateArena, SharedMemory
from lockstep.scheme import Scheme

CPU = torch.device("cpu")


def test_shards_that_act_together_are_copied_once_and_keep_their_numbers() -> None:
    agent = Agent(EXPERIMENTS["ppo-acting-batch-of-two-shards"]())
    shared = SharedMemory()
    for memory in (lambda layout: layout(PrivateArena()), shared.map):
        buffers = memory(lambda arena: RolloutBuffers(agent, range(4), 1, arena))
        rollouts = {shard: buffers.rollout(shard, 0) for shard in range(4)}
        for shard, rollout in rollouts.items():
            for _, leaf in named_leaves(rollout):
                leaf.fill_(shard % 2)
        copied: list[int] = []

        def count(x: torch.Tensor, *args: object, copied: list[int] = copied, **kwargs: object) -> torch.Tensor:
            copied.append(x.nbytes)
            assert x.is_contiguous()
            return x.clone()

        with mock.patch.object(torch.Tensor, "to", count):
            found = slabs.to_device(rollouts, CPU)
        leaves = [leaf for shard in range(4) for _, leaf in named_leaves(rollouts[shard])]
        assert len(copied) < len(leaves)
        assert sum(copied) <= 1.1 * sum(leaf.nbytes for leaf in leaves)
        for shard, rollout in rollouts.items():
            for (name, before), (_, after) in zip(named_leaves(rollout), named_leaves(found[shard]), strict=True):
                assert after.data_ptr() != before.data_ptr() or not before.numel()
                assert after.stride() == before.stride() and torch.equal(after, before), name
    shared.close()


def test_what_is_mostly_rows_of_others_is_copied_alone() -> None:
    agent = Agent(EXPERIMENTS["ppo-acting-batch-of-two-shards"]().replace(scheme=Scheme(shards=4, acting_batch=8)))
    rollout = RolloutBuffers(agent, range(4), 1, PrivateArena()).rollout(1, 0)
    rollout.value.fill_(2.0)
    with mock.patch.object(slabs, "sent", lambda x, device: x.contiguous()):
        (found,) = slabs.to_device({1: rollout}, CPU).values()
    assert torch.equal(found.value, rollout.value)
    assert found.obs.untyped_storage().nbytes() == rollout.obs.nbytes
