"""Minibatches of on-policy algorithms, from the rollouts of the current iteration.

Shape legend: T time, B environments of a shard, n items of a shard's slice of a minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.agent import Agent
from lockstep.algorithms.checks import check_targets, unchanged
from lockstep.algorithms.onpolicy import Batch, OnPolicy, OnPolicyConfig, Targets
from lockstep.buffers.batches import CollectedRollout, Slice
from lockstep.buffers.slabs import sent, to_device
from lockstep.core.arrays import ArrayTuple, map_structure
from lockstep.core.rng import stream
from lockstep.core.rollout import Rollout
from lockstep.distributed.tree import TreeSum
from lockstep.models.normalize import Normalizers
from lockstep.models.policies import POLICY
from lockstep.run.checkpoint import Checkpoint


class Minibatches(ArrayTuple):
    """A slot's rollout, with tables that select slices of equal size from it."""

    whole: Batch
    """The slot's rollout, with its advantages and value targets."""
    items: Tensor | None
    """int64 [G, n]: the items of each gradient step's slice. None: every slice is the whole rollout."""
    moments: Tensor | None
    """float64 [G, 2 * policies]: the mean and deviation of each minibatch's advantages, if they are normalized."""

    @property
    def steps(self) -> int:
        """G gradient steps, or 1 if all slices are equal."""
        return max([len(table) for table in (self.items, self.moments) if table is not None], default=1)


class FreshBatches:
    """Epochs of minibatches over the rollouts in a learner's slots."""

    in_graphs: ClassVar[bool] = True
    """Whether CUDA graphs may read its minibatches. It is not inherited: a subclass that changes how slices are
    made gets no graphs, which gives the same bits, unless it declares this, too."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        config, algorithm = agent.experiment.algorithm, agent.algorithm
        assert isinstance(config, OnPolicyConfig) and isinstance(algorithm, OnPolicy)
        self._experiment, self._config, self._algorithm = agent.experiment, config, algorithm
        self._slots, self._tree, self._device = slots, tree, agent.device
        self._sequences = agent.experiment.model.recurrent or config.sequences
        self._several = agent.experiment.env.several_policies
        self._known_to_fit = False
        """Whether the first call of targets has been checked. Later ones need no check."""
        self._whole: dict[int, Batch] = {}
        self._normalizers: dict[int, Normalizers] = {}
        self._slices: dict[int, list[Tensor | None]] = {}
        self._plans: dict[int, Tensor | None] = {}
        """By slot, int64 [epochs, items]: the order of items in each epoch. None: every slice contains all items."""
        self._moments: Sequence[tuple[float | Tensor, ...] | Tensor] | None = None
        """For each global minibatch: the mean and deviation of advantages."""
        self._moments_table: Tensor | None = None
        """float64 [G, 2 * policies]: the same as one tensor."""

    def begin(self, iteration: int, rollouts: dict[int, list[CollectedRollout]], hyper: dict[str, float]) -> int:
        """Take an iteration's rollouts, one for each slot. Returns the number of gradient steps on them."""
        alone = {slot: only for slot in self._slots for only in rollouts[slot]}
        self._whole.clear()  # frees memory for the new rollouts
        held = {slot: _nearest(only, self._device) for slot, only in alone.items()}
        if self._device.type != "cpu":
            held |= to_device({slot: each for slot, each in held.items() if each.reward.is_cpu}, self._device)
        self._whole = {slot: self._prepare(slot, held[slot], only.normalizers, hyper) for slot, only in alone.items()}
        self._normalizers = {slot: only.normalizers for slot, only in alone.items()}
        self._plans = {slot: self._plan(slot, iteration) for slot in self._slots}
        self._slices = {slot: self._parts(plan) for slot, plan in self._plans.items()}
        self._moments = self._moments_table = None
        if self._algorithm.normalize_advantages:
            self._moments = moments = self._advantage_moments()
            self._moments_table = torch.tensor(moments, dtype=torch.float64, pin_memory=self._device.type != "cpu")
            if self._device.type != "cpu":
                # On a GPU, division by a number multiplies with its reciprocal, and division by a tensor is exact.
                # Graphs read tensors, so steps without graphs must use tensors, too.
                self._moments_table = self._moments_table.to(self._device, non_blocking=True)
                self._moments = [row.unbind() for row in self._moments_table]
            if self._algorithm.policies > 1:
                self._moments = list(self._moments_table)
        return self._config.epochs * self._config.minibatches

    def slice(self, slot: int, step: int) -> Slice:
        """A slot's part of one gradient step's minibatch."""
        moments = None if self._moments is None else self._moments[step]
        return Slice(self.select(self._whole[slot], self._slices[slot][step], moments), self._normalizers[slot])

    def normalizers(self, slot: int) -> Normalizers:
        """The statistics that the model normalizes a slot's slices with."""
        return self._normalizers[slot]

    def minibatches(self, slot: int) -> Minibatches | None:
        """The tables of all slices of the iteration; None if slices differ in size."""
        plan = self._plans[slot]
        if plan is not None:
            if plan.shape[1] % self._config.minibatches:
                return None
            plan = plan.view(-1, plan.shape[1] // self._config.minibatches)
        return Minibatches(whole=self._whole[slot], items=plan, moments=self._moments_table)

    def select(self, whole: Batch, index: Tensor | None, moments: Sequence[float | Tensor] | Tensor | None) -> Batch:
        """The slice of the items in this index. Its advantages are normalized with the moments: mean and deviation, or
        those of each policy, float64 [2 * policies]."""
        batch = self._selected(whole, index)
        if moments is None:
            return batch
        assert batch.advantage is not None
        if self._algorithm.policies == 1:
            mean, deviation = moments
            return batch.replace(advantage=(batch.advantage - mean) / (deviation + 1e-8))
        assert isinstance(moments, Tensor)
        mean, deviation = moments.view(-1, 2)[self._players(batch)].unbind(-1)
        return batch.replace(advantage=(batch.advantage - mean.float()) / (deviation + 1e-8).float())

    def _players(self, batch: Batch) -> Tensor:
        """int64 [T, B]: the number of the policy that plays each sample."""
        return batch.obs[POLICY][: len(batch.reward), :, 0].long()

    def learned(self, slot: int, priorities: Tensor | None) -> None:
        """On-policy losses have no priorities."""

    def save(self, slot: int, directory: Path, iteration: int) -> list[dict[str, Any]]:
        return []

    def restore(self, slot: int, saved: Checkpoint) -> None:
        pass

    def _prepare(self, slot: int, rollout: Rollout, normalizers: Normalizers, hyper: dict[str, float]) -> Batch:
        """A slot's whole rollout as one batch, with its advantages."""
        steps = rollout.reward.shape[0]
        players = map_structure(lambda leaf: leaf[:steps], rollout.obs) if self._several else None
        reward = normalizers.scale_rewards(rollout.reward, players)
        inputs = slice(None) if self._algorithm.bootstrap_inputs else slice(0, steps)
        targets = None
        if self._algorithm.needs_targets:
            targets = (self._algorithm.targets if self._known_to_fit else self._first_targets)(rollout, reward, hyper)

        def given(leaf: Tensor | None) -> Tensor | None:
            return None if leaf is None else leaf[inputs]

        return Batch(
            obs=map_structure(lambda leaf: leaf[inputs], rollout.obs),
            start=rollout.start[inputs],
            prev_action=given(rollout.prev_action),
            prev_reward=given(rollout.prev_reward),
            state=rollout.core_state,
            action=rollout.action,
            reward=reward,
            log_prob=rollout.log_prob,
            value=rollout.value[:steps],
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            valid=rollout.valid,
            advantage=None if targets is None else targets.advantage,
            value_target=None if targets is None else targets.value_target,
            policy=rollout.policy,
        )

    def _first_targets(self, rollout: Rollout, reward: Tensor, hyper: dict[str, float]) -> Targets:
        """The targets, checked."""
        with unchanged(f"{type(self._algorithm).__name__}.targets", rollout):
            targets = self._algorithm.targets(rollout, reward, hyper)
        check_targets(self._algorithm, targets, reward)
        self._known_to_fit = True
        return targets

    def _plan(self, slot: int, iteration: int) -> Tensor | None:
        """The order of the rollout's items in each epoch: indices of environments if sequences stay whole, else indices
        of single samples, t * B + b. None: every slice contains all items in order."""
        config = self._config
        if config.minibatches == 1:
            return None
        items = self._experiment.envs_per_shard * (1 if self._sequences else config.rollout)
        draw = stream(self._experiment.seed, "minibatch", slot, iteration)
        orders = np.stack([draw.permutation(items) for _ in range(config.epochs)])
        return sent(torch.from_numpy(orders), self._device)

    def _parts(self, plan: Tensor | None) -> list[Tensor | None]:
        """The items of each gradient step's slice."""
        if plan is None:
            return [None] * self._config.epochs
        return [part for order in plan for part in order.chunk(self._config.minibatches)]

    def _selected(self, whole: Batch, index: Tensor | None) -> Batch:
        if index is None:
            return whole
        if self._sequences:
            return whole.columns(index)
        steps, environments = whole.reward.shape
        t, b = index // environments, index % environments

        def gather(leaf: Tensor) -> Tensor:
            # A shard's rows may lie between other rows of its acting batch. index_select over all rows copies whole
            # samples; indexing with two tensors does not.
            outer, inner = leaf.stride()[:2]
            if not inner or outer % inner or outer // inner < environments:  # as targets of a user's algorithm may be
                return leaf[t, b][None]
            between = outer // inner
            rows = leaf.as_strided(((steps - 1) * between + environments, *leaf.shape[2:]), leaf.stride()[1:])
            return rows.index_select(0, t * between + b)[None]

        state = whole.state.new_zeros(len(index), whole.state.shape[1])
        return whole.replace(state=None).map(gather).replace(state=state)

    def _advantage_moments(self) -> list[tuple[float, ...]]:
        """The mean and deviation of valid advantages in every global minibatch, by policy if there are several. One
        reduction serves all minibatches."""
        sums = {}
        for slot, batch in self._whole.items():
            assert batch.advantage is not None
            valid = batch.valid.double()
            advantage = batch.advantage.double() * valid
            parts = torch.stack([valid, advantage, advantage * advantage])
            if self._algorithm.policies > 1:
                mine = F.one_hot(self._players(batch), self._algorithm.policies).movedim(-1, 0)
                parts = (mine.unsqueeze(1) * parts).flatten(0, 1)
            slices, plan = self._slices[slot], self._plans[slot]
            if plan is not None and self._device.type != "cpu" and plan.shape[1] % self._config.minibatches == 0:
                # As below, but with as many kernels for all slices as for one.
                items = parts if self._sequences else parts.flatten(1).unsqueeze(1)
                chosen = items[:, :, plan.flatten()].sum(1)
                sums[slot] = chosen.view(len(parts), len(slices), -1).sum(2).T.contiguous()
                continue
            if self._sequences:
                columns = [parts.sum(1) if index is None else parts[:, :, index].sum(1) for index in slices]
            else:
                flat = parts.flatten(1)
                columns = [flat if index is None else flat[:, index] for index in slices]
            sums[slot] = torch.stack([column.sum(1) for column in columns])
        return self._global_moments(sums)

    def _global_moments(self, sums: dict[int, Tensor]) -> list[tuple[float, ...]]:
        """Mean and deviation in every global minibatch, from each slot's float64 [G, 3 * policies]: the count, sum, and
        sum of squares of each policy."""
        return [_moments(row) for row in self._tree.sum(sums).tolist()]


def _nearest(collected: CollectedRollout, device: torch.device) -> Rollout:
    """The rollout on this device if it was played there, else the one on the host."""
    on_device = collected.on_device
    return on_device if on_device is not None and on_device.reward.device == device else collected.rollout


def _moments(sums: list[float]) -> tuple[float, ...]:
    """Mean and deviation of each policy, from its count, sum and sum of squares."""
    moments = []
    for count, total, square in zip(sums[::3], sums[1::3], sums[2::3], strict=True):
        mean = total / max(count, 1.0)
        variance = max(square - count * mean * mean, 0.0) / max(count - 1.0, 1.0)
        moments += [mean, math.sqrt(variance)]
    return tuple(moments)
