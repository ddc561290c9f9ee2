"""Minibatches with the advantages of intrinsic rewards, which are computed at the start of an iteration.

Shape legend: T time, B environments of a shard, D numbers of an observation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.algorithms.onpolicy import Batch, Intrinsic
from lockstep.algorithms.rnd import curiosity_of, intrinsic_targets
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.on_policy import FreshBatches
from lockstep.core.arrays import map_structure, read
from lockstep.core.rng import stream
from lockstep.core.rollout import Rollout
from lockstep.distributed.tree import TreeSum
from lockstep.models.normalize import Normalizers, RunningMoments, batch_sums, discounted_returns
from lockstep.run.checkpoint import Checkpoint, write_part


class CuriousBatches(FreshBatches):
    """Epochs of minibatches over an iteration's rollouts, with intrinsic rewards from the networks as they are before
    the iteration.

    The statistics already include these rollouts, so they exist from the first iteration on. They are sums over all
    shards in tree order, and thus the same in every process.
    """

    in_graphs = True

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        self._rnd = self._config.rnd
        self._curiosity = curiosity_of(agent.model)
        self._observations = RunningMoments.empty(self._curiosity.size)
        self._returns = RunningMoments.empty(1)
        self._carry: dict[int, Tensor] = {}
        """By slot, fp32 [B]: the discounted intrinsic return so far. If timing decides, a slot takes rollouts of any
        shard. This is harmless: it only affects the deviation of returns, which hardly depends on the order of
        shards."""
        self._novelty: dict[int, tuple[Tensor, Tensor]] = {}
        """By slot: intrinsic rewards [T, B] before normalization, and intrinsic values [T+1, B]."""
        self._iteration = 0

    def begin(self, iteration: int, rollouts: dict[int, list[CollectedRollout]], hyper: dict[str, float]) -> int:
        """Take an iteration's rollouts, one for each slot. Returns the number of gradient steps on them."""
        self._iteration = iteration
        alone = {slot: only.rollout for slot in self._slots for only in rollouts[slot]}
        sums = {slot: self._observation_sums(rollout) for slot, rollout in alone.items()}
        self._observations = self._observations.merged(self._tree.sum(sums))
        self._curiosity.normalize_with(self._observations.mean, self._observations.std)
        self._novelty = {slot: self._evaluate(rollout) for slot, rollout in alone.items()}
        sums = {slot: self._return_sums(slot) for slot in self._slots}
        self._returns = self._returns.merged(self._tree.sum(sums))
        return super().begin(iteration, rollouts, hyper)

    def _observation_sums(self, rollout: Rollout) -> Tensor:
        """A rollout's contribution to the moments of observations: the observations after its actions."""
        total = torch.zeros(1 + 2 * self._curiosity.size, dtype=torch.float64)
        every = torch.ones_like(rollout.valid[:1])
        for t in range(1, len(rollout.reward) + 1):  # a whole rollout's pixels in float64 take too much memory
            total += batch_sums(self._curiosity.vector(read(rollout.obs, slice(t, t + 1))), every)
        return total

    @torch.no_grad()
    def _evaluate(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        error, value = self._curiosity(map_structure(lambda leaf: leaf.to(self._device), rollout.obs))
        return error[1:].cpu(), value.cpu()

    def _return_sums(self, slot: int) -> Tensor:
        """A rollout's contribution to the moments of intrinsic returns."""
        reward, _ = self._novelty[slot]
        never = torch.zeros_like(reward, dtype=torch.bool)
        carry = self._carry.get(slot, torch.zeros_like(reward[0]))
        returns, self._carry[slot] = discounted_returns(reward, never, carry, self._rnd.discount)
        return batch_sums(returns.unsqueeze(-1), ~never)

    def _prepare(self, slot: int, rollout: Rollout, normalizers: Normalizers, hyper: dict[str, float]) -> Batch:
        batch = super()._prepare(slot, rollout, normalizers, hyper)
        novelty, value = self._novelty[slot]
        targets = intrinsic_targets(novelty / self._returns.std, value, self._rnd)
        draw = stream(self._experiment.seed, "rnd", slot, self._iteration)
        chosen = torch.from_numpy(draw.random(tuple(novelty.shape))) < self._rnd.share
        advantage = hyper["rnd_coef"] * targets.advantage.to(self._device)
        return batch.replace(
            advantage=advantage if batch.advantage is None else batch.advantage + advantage,
            intrinsic=Intrinsic(
                value_target=targets.value_target.to(self._device),
                predicted=(chosen / self._rnd.share).float().to(self._device),
            ),
        )

    def save(self, slot: int, directory: Path, iteration: int) -> list[dict[str, Any]]:
        tensors = {
            "observations": self._observations.sums,
            "returns": self._returns.sums,
            "carry": self._carry[slot],
        }
        return [write_part(directory, iteration, _part(slot), tensors, {})]

    def restore(self, slot: int, saved: Checkpoint) -> None:
        tensors, _ = saved.part(_part(slot))
        self._observations = RunningMoments(tensors["observations"])
        self._returns = RunningMoments(tensors["returns"])
        self._carry[slot] = tensors["carry"]


def _part(slot: int) -> str:
    return f"intrinsic-{slot:03d}"
