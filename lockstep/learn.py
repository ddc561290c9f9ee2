"""Learners: from rollouts to gradients of the global batch, and from those to the next version.

Shape legend: T time, B environments of a shard, n items of a shard's slice of a minibatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from lockstep.agent import Agent
from lockstep.algorithms.base import LossOutput, OnPolicy, ParameterGroup
from lockstep.experiment import Experiment
from lockstep.graphs import Capture, Graph
from lockstep.ledger import fast_digest
from lockstep.normalize import Normalizers
from lockstep.parameters import FlatParameters
from lockstep.storage.batches import Batches, Filled
from lockstep.tree import TreeSum


class UpdateRule:
    """The optimizer, on the flat parameter vector and the reduced gradient.

    torch's optimizers as functions: their classes import torch's compiler, which takes a second in every process.
    """

    def __init__(self, experiment: Experiment, flat: FlatParameters) -> None:
        self._config = experiment.algorithm.optimizer
        self._max_norm = experiment.algorithm.max_grad_norm
        self._flat = flat
        self._vector = flat.vector.detach()
        self._state: dict[str, Tensor] = {}

    @torch.no_grad()
    def apply(self, gradient: Tensor, groups: tuple[ParameterGroup, ...]) -> float:
        """One step down the global gradient, each group's clipped to the largest norm; returns the norm before
        clipping. Parameters that are in no group stay where they are, and so does what is remembered of them."""
        if not self._state:
            names = ("exp_avg", "exp_avg_sq") if self._config.name == "adam" else ("square_avg",)
            self._state = {name: torch.zeros_like(self._vector) for name in names}
        norms = [self._step(gradient, group) for group in groups]
        self._flat.round()
        return norms[0] if len(norms) == 1 else math.hypot(*norms)

    def _step(self, gradient: Tensor, group: ParameterGroup) -> float:
        span = self._flat.span(group.prefix) if group.prefix else None

        def of(x: Tensor) -> Tensor:
            return x if span is None else x[span]

        gradient, vector = of(gradient), of(self._vector)
        norm = float(gradient.norm())
        if norm > self._max_norm:
            gradient.mul_(self._max_norm / (norm + 1e-6))
        config, count = self._config, f"step.{group.prefix}".removesuffix(".")
        if count not in self._state:
            device = vector.device if config.name == "adam" else "cpu"
            self._state = {count: torch.zeros((), device=device), **self._state}
        if config.name == "adam":
            adam(
                [vector],
                [gradient],
                [of(self._state["exp_avg"])],
                [of(self._state["exp_avg_sq"])],
                [],
                [self._state[count]],
                fused=True,
                amsgrad=False,
                beta1=config.betas[0],
                beta2=config.betas[1],
                lr=group.learning_rate,
                weight_decay=0.0,
                eps=config.eps,
                maximize=False,
            )
        else:
            rmsprop(
                [vector],
                [gradient],
                [of(self._state["square_avg"])],
                [],
                [],
                [self._state[count]],
                lr=group.learning_rate,
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
        self._state = {
            name: tensor.to(device, copy=True) if fused or tensor.ndim else tensor.clone()
            for name, tensor in tensors.items()
        }


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

    Args:
        capture: makes CUDA graphs of losses with their backward passes, where these have fixed shapes.
    """

    def __init__(
        self,
        agent: Agent,
        slots: range,
        tree: TreeSum,
        *,
        alive: Callable[[], None] = lambda: None,
        capture: Capture | None = None,
    ) -> None:
        self._agent, self._algorithm, self._flat = agent, agent.algorithm, agent.flat
        self._slots, self._tree, self._alive = slots, tree, alive
        self.batches: Batches = agent.algorithm.batches(agent, slots, tree)
        self.update = UpdateRule(agent.experiment, agent.flat)
        self._capture = capture if _fixed(agent) else None
        self._graphs: dict[Any, Graph] = {}
        """By the shapes of a slice."""
        self._applied: Normalizers | None = None
        """The statistics that the model normalizes with at present."""
        self.seconds = 0.0
        """Time spent here since it was last set to 0, waiting for other processes left out."""

    def learn(self, iteration: int, filled: dict[int, list[Filled]]) -> LearningReport:
        """Take the iteration's gradient steps, on what its rollouts add to: those of every slot of this learner."""
        begin, waited = time.perf_counter(), self._tree.group.waited
        agent, algorithm, names = self._agent, self._algorithm, self._algorithm.metric_names
        hyper = algorithm.hyperparameters(iteration / agent.experiment.iterations)
        steps = self.batches.begin(iteration, filled, hyper)
        before = algorithm.updates_before(iteration, agent.experiment.samples_per_iteration)
        digests: dict[int, str] = {}
        sums, updates, norms = torch.zeros(1 + len(names), dtype=torch.float64), 0, 0.0
        for step in range(steps):
            numbered = {**hyper, "update": before + step + 1}
            for slot in self._slots:
                gradient = self._gradient(slot, step, numbered)
                if step == 0:
                    digests[slot] = fast_digest(gradient)
                self._tree.push(slot, gradient)
                self._alive()
            gradient, tail = self._flat.split(self._tree.finish().to(agent.device))
            tail = tail.cpu()
            valid = float(tail[0])
            scale = max(valid, 1.0) if algorithm.mean_loss else 1.0
            if algorithm.weighted:
                scale *= float(tail[1 + len(names) :].max())
            if scale != 1.0:
                gradient /= scale
            updates += 1
            norms += self.update.apply(gradient, algorithm.groups(before + updates, hyper))
            agent.follow(before + updates)
            sums += tail[: 1 + len(names)]
            if algorithm.stop_early(
                {name: float(value) / max(valid, 1.0) for name, value in zip(names, tail[1:], strict=False)}
            ):
                break
        count = max(float(sums[0]), 1.0)
        metrics = {name: float(value) / count for name, value in zip(names, sums[1:], strict=True)}
        metrics = {**algorithm.summarize(metrics), "gradient_norm": norms / updates} if updates else {}
        metrics |= {f"hyper/{name}": value for name, value in hyper.items()}
        self.seconds += time.perf_counter() - begin - (self._tree.group.waited - waited)
        return LearningReport(metrics, updates, digests)

    def _gradient(self, slot: int, step: int, hyper: dict[str, float]) -> Tensor:
        """One slice's gradient with its counts and metric sums behind it, ready for the reduction."""
        batch, normalizers = self.batches.slice(slot, step)
        if normalizers is not self._applied:
            normalizers.apply(self._agent.model)
            if self._agent.target is not None:
                normalizers.apply(self._agent.target)
            self._applied = normalizers
        if self._capture is not None:
            return self._from_graph(batch, hyper, self._capture)
        loss = self._differentiate(batch, hyper)
        self.batches.learned(slot, loss.priorities)
        numbers = self._numbers(batch, loss)
        if self._algorithm.weighted:
            # One number for every slot, so that the sum holds each slot's largest weight.
            largest, zero = batch.weight.max(), torch.zeros((), device=batch.weight.device)
            numbers += [largest if s == slot else zero for s in range(self._agent.experiment.scheme.shards)]
        return self._flat.gather_gradient(numbers)

    def _differentiate(self, batch: Any, hyper: dict[str, Any]) -> LossOutput:
        self._flat.forget_gradient()
        loss = self._algorithm.loss(self._agent.networks, batch, hyper)
        loss.total.backward()
        return loss

    def _numbers(self, batch: Any, loss: LossOutput) -> list[Tensor]:
        """What is reduced together with the gradient."""
        return [batch.valid.sum(dtype=torch.float32), *(loss.metrics[name] for name in self._algorithm.metric_names)]

    def _from_graph(self, batch: Any, hyper: dict[str, float], capture: Capture) -> Tensor:
        leaves: list[Tensor] = []
        batch.map(lambda leaf: leaves.append(leaf) or leaf)
        # As tensors, since a graph would keep numbers as they were; of 64 bits, like the floats that they replace.
        numbers = [torch.tensor(value, dtype=torch.float64, device=self._agent.device) for value in hyper.values()]
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if shapes not in self._graphs:

            def gradient(*inputs: Tensor) -> tuple[Tensor]:
                given = iter(inputs)
                named = {name: next(given) for name in hyper}
                held = batch.map(lambda leaf: next(given))
                return (self._flat.gather_gradient(self._numbers(held, self._differentiate(held, named))),)

            self._graphs[shapes] = Graph(gradient, [*numbers, *leaves], capture)
        return self._graphs[shapes](*numbers, *leaves)[0]


def _fixed(agent: Agent) -> bool:
    """Whether a slice's gradient is the same list of kernels on the same memory every time: recurrent cores look at
    where episodes begin, and replayed batches have priorities and weights."""
    return isinstance(agent.algorithm, OnPolicy) and not agent.experiment.model.recurrent
