"""Your own gradient compression: shards send the largest numbers of their gradients, and keep the
rest for the next step.

Source: Stich et al. 2018, https://arxiv.org/abs/1809.07599 (top-k with memory).

lockstep train examples/gradient_compression.py:recipe --layout processes:2
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from lockstep import recipes
from lockstep.distributed.groups import Group
from lockstep.distributed.tree import TreeSum
from lockstep.experiment import Experiment
from lockstep.scheme import Scheme


class TopK(TreeSum):
    """Every process gets what all shards sent, and adds it up by itself in the tree's order: on any layout the same."""

    def __init__(self, tree: TreeSum, size: int, share: float) -> None:
        super().__init__(tree.shards, tree.group)
        self.size, self.count = size, max(1, int(size * share))
        self.sent: list[tuple[int, Tensor, Tensor]] = []

    def push(self, shard: int, value: Tensor) -> None:
        value[: self.size] += self.kept.get(shard, 0.0)
        largest = value[: self.size].abs().topk(self.count).indices
        rest = torch.arange(self.size, len(value), device=value.device)  # what stands behind it goes in full
        places = torch.cat([largest, rest])
        self.sent.append((shard, places.int().cpu(), value[places].cpu()))
        value[places] = 0.0
        self.kept[shard] = value[: self.size]

    def finish(self) -> Tensor:
        everyone, self.sent = self.group.broadcast(self.group.gather(self.sent)), []
        alone = TreeSum(self.shards, Group())
        for shard, places, numbers in chain(*everyone):
            alone.push(shard, torch.zeros(int(places[-1]) + 1).index_copy_(0, places.long(), numbers))
        return alone.finish()


@dataclass(frozen=True)
class Sparse(Scheme):
    share: float = 1 / 16
    """Of a gradient's numbers that a shard sends at each step. More learn faster, and take longer to send."""

    def reduction(self, tree: TreeSum, size: int) -> TreeSum:
        return TopK(tree, size, self.share)


def recipe() -> Experiment:
    """PPO with sparse gradients on CartPole."""
    experiment = recipes.ppo_cartpole()
    return experiment.replace(scheme=Sparse(**vars(experiment.scheme)))
