"""Learners: from rollouts to gradients of the global batch, and from those to the next version.

Shape legend: T time, B environments of a shard, n items of a shard's slice of a minibatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from lockstep.agent import Agent
from lockstep.algorithms.base import Batch
from lockstep.arrays import map_structure
from lockstep.experiment import Experiment
from lockstep.ledger import fast_digest
from lockstep.normalize import Normalizers
from lockstep.parameters import FlatParameters
from lockstep.rng import stream
from lockstep.storage.rollout import Rollout
from lockstep.tree import TreeSum


class UpdateRule:
    """The optimizer, on the flat parameter vector and the reduced gradient.

    torch's optimizers as functions: their classes import torch's compiler, which takes a second in every process.
    """

    def __init__(self, experiment: Experiment, flat: FlatParameters) -> None:
        self._config = experiment.algorithm.optimizer
        self._max_norm = experiment.algorithm.max_grad_norm
        self._vector = flat.vector.detach()
        self._state: dict[str, Tensor] = {}

    @torch.no_grad()
    def apply(self, gradient: Tensor, learning_rate: float) -> float:
        """One step down the global gradient, clipped to the largest norm; returns the norm before clipping."""
        norm = float(gradient.norm())
        if norm > self._max_norm:
            gradient.mul_(self._max_norm / (norm + 1e-6))
        config, vector = self._config, self._vector
        if not self._state:
            names = ("exp_avg", "exp_avg_sq") if config.name == "adam" else ("square_avg",)
            step = torch.zeros((), device=vector.device if config.name == "adam" else "cpu")
            self._state = {"step": step} | {name: torch.zeros_like(vector) for name in names}
        step, first, *second = ([tensor] for tensor in self._state.values())
        if config.name == "adam":
            adam(
                [vector],
                [gradient],
                first,
                second[0],
                [],
                step,
                fused=True,
                amsgrad=False,
                beta1=config.betas[0],
                beta2=config.betas[1],
                lr=learning_rate,
                weight_decay=0.0,
                eps=config.eps,
                maximize=False,
            )
        else:
            rmsprop(
                [vector],
                [gradient],
                first,
                [],
                [],
                step,
                lr=learning_rate,
                alpha=config.decay,
                eps=config.eps,
                weight_decay=0.0,
                momentum=0.0,
                centered=False,
            )
        return norm

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors by name; empty before the first step."""
        return self._state

    def load(self, tensors: dict[str, Tensor]) -> None:
        device = self._vector.device
        fused = self._config.name == "adam"  # then the count of steps is on the device too
        names = sorted(tensors, key=lambda name: (name != "step", name))
        self._state = {
            name: tensors[name].to(device, copy=True) if fused or tensors[name].ndim else tensors[name].clone()
            for name in names
        }


@dataclass(frozen=True)
class Filled:
    """What fills one of the S batch slots of an iteration: a rollout of some shard."""

    rollout: Rollout
    normalizers: Normalizers
    """Statistics of the version that began to collect it."""


@dataclass
class LearningReport:
    """What one iteration's gradient steps did; equal on every process, except the shards' own digests."""

    metrics: dict[str, float]
    updates: int
    gradient_digests: dict[int, str]
    """By batch slot: digest of its gradient in the iteration's first step, before the reduction. Later steps follow
    from that, and hashing all of them would cost as much as a tenth of small minibatches' learning."""


class Learner:
    """Computes the gradients of a block of batch slots and applies the global ones. In slot s is shard s's rollout,
    unless timing decides.

    All values are sums over the global minibatch, reduced by the tree, and divided afterwards. So they cannot depend
    on how slots are spread over processes.
    """

    def __init__(self, agent: Agent, slots: range, tree: TreeSum, *, alive: Callable[[], None] = lambda: None) -> None:
        experiment = agent.experiment
        self._experiment, self._slots = experiment, slots
        self._device = agent.device
        self._model, self._algorithm, self._flat, self._tree = agent.model, agent.algorithm, agent.flat, tree
        self._alive = alive
        self._sequences = experiment.model.recurrent or experiment.algorithm.sequences
        self.update = UpdateRule(experiment, agent.flat)
        self._applied: Normalizers | None = None
        """The statistics that the model normalizes with at present."""
        self.seconds = 0.0
        """Time spent here since it was last set to 0, waiting for other processes left out."""

    def learn(self, iteration: int, filled: dict[int, Filled]) -> LearningReport:
        """Take the iteration's gradient steps on one rollout in every slot of this learner."""
        begin, waited = time.perf_counter(), self._tree.group.waited
        config = self._experiment.algorithm
        hyper = self._algorithm.hyperparameters(iteration / self._experiment.iterations)
        whole = {slot: self._prepare(filled[slot], hyper) for slot in self._slots}
        plan = {slot: self._plan(slot, iteration) for slot in self._slots}
        moments = self._advantage_moments(whole, plan) if self._algorithm.normalize_advantages else None
        digests: dict[int, str] = {}
        names = self._algorithm.metric_names
        sums, updates, norms = torch.zeros(1 + len(names), dtype=torch.float64), 0, 0.0
        for step in range(config.epochs * config.minibatches):
            for slot in self._slots:
                batch = self._slice(whole[slot], plan[slot][step])
                self._normalize_with(filled[slot].normalizers)
                if moments is not None:
                    mean, deviation = moments[step]
                    assert batch.advantage is not None
                    batch = batch.replace(advantage=(batch.advantage - mean) / (deviation + 1e-8))
                gradient = self._gradient(batch, hyper)
                if step == 0:
                    digests[slot] = fast_digest(gradient)
                self._tree.push(slot, gradient)
                self._alive()
            gradient, tail = self._flat.split(self._tree.finish().to(self._device))
            tail = tail.cpu()
            valid = float(tail[0])
            if self._algorithm.mean_loss:
                gradient /= max(valid, 1.0)
            norms += self.update.apply(gradient, hyper["learning_rate"])
            updates += 1
            sums += tail
            if self._algorithm.stop_early(
                {name: float(value) / max(valid, 1.0) for name, value in zip(names, tail[1:], strict=True)}
            ):
                break
        count = max(float(sums[0]), 1.0)
        metrics = {name: float(value) / count for name, value in zip(names, sums[1:], strict=True)}
        metrics = self._algorithm.summarize(metrics)
        metrics |= {"gradient_norm": norms / updates, **{f"hyper/{name}": value for name, value in hyper.items()}}
        self.seconds += time.perf_counter() - begin - (self._tree.group.waited - waited)
        return LearningReport(metrics, updates, digests)

    def _normalize_with(self, normalizers: Normalizers) -> None:
        if normalizers is not self._applied:
            normalizers.apply(self._model)
            self._applied = normalizers

    def _prepare(self, filled: Filled, hyper: dict[str, float]) -> Batch:
        """A slot's whole rollout as one batch, with its advantages."""
        rollout = filled.rollout
        reward = filled.normalizers.scale_rewards(rollout.reward).to(self._device)
        if self._device.type != "cpu":
            rollout = rollout.map(lambda leaf: leaf.to(self._device, non_blocking=True))
        steps = rollout.reward.shape[0]
        inputs = slice(None) if self._algorithm.bootstrap_inputs else slice(0, steps)
        targets = self._algorithm.targets(rollout, reward, hyper) if self._algorithm.needs_targets else None

        def cut(leaf: Tensor | None) -> Tensor | None:
            return None if leaf is None else leaf[inputs]

        return Batch(
            obs=map_structure(lambda leaf: leaf[inputs], rollout.obs),
            start=rollout.start[inputs],
            prev_action=cut(rollout.prev_action),
            prev_reward=cut(rollout.prev_reward),
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
        )

    def _plan(self, slot: int, iteration: int) -> list[Tensor | None]:
        """Which items of the rollout each gradient step takes: indices of environments where sequences stay whole,
        else of single samples t * B + b. None means all of them, in order."""
        config = self._experiment.algorithm
        if config.minibatches == 1:
            return [None] * config.epochs
        items = self._experiment.envs_per_shard * (1 if self._sequences else config.rollout)
        draw = stream(self._experiment.seed, "minibatch", slot, iteration)
        return [
            part
            for _ in range(config.epochs)
            for part in torch.from_numpy(draw.permutation(items)).to(self._device).chunk(config.minibatches)
        ]

    def _slice(self, whole: Batch, index: Tensor | None) -> Batch:
        if index is None:
            return whole
        if self._sequences:
            state = whole.state[index]
            return whole.replace(state=None)[:, index].replace(state=state)
        steps, environments = whole.reward.shape
        t, b = index // environments, index % environments

        def gather(leaf: Tensor) -> Tensor:
            # A shard's rows may lie among those of its acting batch: index_select over all of them copies whole
            # samples, which indexing with two tensors does not.
            between = leaf.stride(0) // leaf.stride(1)
            rows = leaf.as_strided(((steps - 1) * between + environments, *leaf.shape[2:]), leaf.stride()[1:])
            return rows.index_select(0, t * between + b)[None]

        state = whole.state.new_zeros(len(index), whole.state.shape[1])
        return whole.replace(state=None).map(gather).replace(state=state)

    def _advantage_moments(
        self, whole: dict[int, Batch], plan: dict[int, list[Tensor | None]]
    ) -> list[tuple[float, float]]:
        """Mean and deviation of the valid advantages of every global minibatch, with one reduction for all."""
        sums = {}
        for slot, batch in whole.items():
            assert batch.advantage is not None
            valid = batch.valid.double()
            advantage = batch.advantage.double() * valid
            parts = torch.stack([valid, advantage, advantage * advantage])
            if self._sequences:
                columns = [parts.sum(1) if index is None else parts[:, :, index].sum(1) for index in plan[slot]]
            else:
                flat = parts.flatten(1)
                columns = [flat if index is None else flat[:, index] for index in plan[slot]]
            sums[slot] = torch.stack([column.sum(1) for column in columns])
        moments = []
        for count, total, square in self._tree.sum(sums).tolist():
            mean = total / max(count, 1.0)
            variance = max(square - count * mean * mean, 0.0) / max(count - 1.0, 1.0)
            moments.append((mean, variance**0.5))
        return moments

    def _gradient(self, batch: Batch, hyper: dict[str, float]) -> Tensor:
        """One slice's gradient with its counts and metric sums behind it, ready for the reduction."""
        self._flat.forget_gradient()
        loss = self._algorithm.loss(self._model, batch, hyper)
        loss.total.backward()
        return self._flat.gather_gradient(
            [batch.valid.sum(dtype=torch.float32), *(loss.metrics[name] for name in self._algorithm.metric_names)]
        )
