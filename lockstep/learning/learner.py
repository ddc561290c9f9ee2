"""Learners: from rollouts to gradients of the global batch, and from those to the next version.

Shape legend: T time, B environments of a shard, n items of a shard's slice of a minibatch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from lockstep.agent import Agent, below
from lockstep.algorithms.base import LossOutput, OnPolicy, ParameterGroup, check_loss
from lockstep.experiment import Experiment
from lockstep.ledger import fast_digest
from lockstep.models.normalize import Normalizers
from lockstep.models.parameters import FlatParameters
from lockstep.runtime.graphs import Capture, Graph
from lockstep.storage.batches import Batches, Filled
from lockstep.tree import TreeSum

MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "rmsprop": ("square_avg",)}
"""What optimizers remember of gradients."""


class UpdateRule:
    """The optimizer, on the flat parameter vector and the reduced gradient.

    torch's optimizers as functions: their classes import torch's compiler, which takes a second in every process.
    """

    def __init__(self, experiment: Experiment, flat: FlatParameters) -> None:
        self._config = experiment.algorithm.optimizer
        self._max_norm = experiment.algorithm.max_grad_norm
        self._flat = flat
        self._vector = flat.vector.detach()
        self.moments = {name: torch.zeros_like(self._vector) for name in MOMENTS[self._config.name]}
        """fp32 [N] each: what is remembered of gradients."""
        self.counts: dict[str, Tensor] = {}
        """Steps of each group that has moved."""

    @torch.no_grad()
    def apply(self, gradient: Tensor, groups: tuple[ParameterGroup, ...]) -> float:
        """One step down the global gradient, each group's clipped to the largest norm; returns the norm before
        clipping. Parameters that are in no group stay where they are, and so does what is remembered of them."""
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
        if count not in self.counts:
            self.counts[count] = self._counter()
        if config.name == "adam":
            adam(
                [vector],
                [gradient],
                [of(self.moments["exp_avg"])],
                [of(self.moments["exp_avg_sq"])],
                [],
                [self.counts[count]],
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
                [of(self.moments["square_avg"])],
                [],
                [],
                [self.counts[count]],
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
        return {**self.counts, **self.moments} if self.counts else {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what state returned."""
        self.count({name: float(tensor) for name, tensor in tensors.items() if name not in self.moments})
        for name, moment in self.moments.items():
            if name in tensors:
                moment.copy_(tensors[name])

    def count(self, steps: dict[str, float]) -> None:
        """Set how many steps each group has taken; groups that are not among them stay."""
        for name, number in steps.items():
            self.counts.setdefault(name, self._counter()).fill_(number)

    def _counter(self) -> Tensor:
        # Fused Adam counts where it computes.
        return torch.zeros((), device=self._vector.device if self._config.name == "adam" else "cpu")


class Update(NamedTuple):
    """A gradient's way into the parameters."""

    slot: int | None
    """The batch slot whose gradient it was; None if it was the global one."""
    behind: int
    """Updates between the parameters that it was computed with and those that it changed."""


class Computed(NamedTuple):
    """A global gradient that is not applied yet."""

    gradient: Tensor
    iteration: int
    update: int
    """Its number, as Algorithm.groups counts."""
    groups: tuple[ParameterGroup, ...]
    """What it moves, and how far: as of when it was computed."""


@dataclass
class LearningReport:
    """What one iteration's gradient steps did; equal on every process, except the shards' own digests."""

    metrics: dict[str, float]
    updates: int
    gradient_digests: dict[int, str]
    """By batch slot: digest of its gradient in the iteration's first step, before the reduction. Later steps follow
    from that, and hashing all of them would cost as much as a tenth of small minibatches' learning."""
    applied: dict[int, Update]
    """By place among the iteration's updates: those of this process."""


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
        self.reduction = agent.experiment.scheme.reduction(tree, agent.flat.vector.numel())
        self.update = UpdateRule(agent.experiment, agent.flat)
        lag = agent.experiment.scheme.gradient_lag
        self._lag = 0 if lag == "async" else lag
        self._in_flight: deque[Computed] = deque()
        self._capture = capture if _fixed(agent) else None
        self._graphs: dict[Any, Graph] = {}
        """By the shapes of a slice."""
        self._known_to_fit = False
        """Whether a loss was looked at: those that follow are like it."""
        self._applied: Normalizers | None = None
        """The statistics that the model normalizes with at present."""
        self.seconds = 0.0
        """Time spent here since it was last set to 0, waiting for other processes left out."""

    def learn(self, iteration: int, filled: dict[int, list[Filled]]) -> LearningReport:
        """Take all gradient steps of an iteration; filled: by batch slot of this learner, the new rollouts."""
        begin, waited = time.perf_counter(), self._tree.group.waited
        agent, algorithm, names = self._agent, self._algorithm, self._algorithm.metric_names
        hyper = algorithm.hyperparameters(iteration / agent.experiment.iterations)
        steps = self.batches.begin(iteration, filled, hyper)
        before = algorithm.updates_before(iteration, agent.experiment.samples_per_iteration)
        digests: dict[int, str] = {}
        applied: dict[int, Update] = {}
        sums, updates, norms, moved = torch.zeros(1 + len(names), dtype=torch.float64), 0, 0.0, 0
        for step in range(steps):
            numbered = {**hyper, "update": before + step + 1}
            for slot in self._slots:
                gradient = self._gradient(slot, step, numbered)
                if step == 0:
                    digests[slot] = fast_digest(gradient)
                self.reduction.push(slot, gradient)
                self._alive()
            gradient, added = self._mean(self.reduction.finish().to(agent.device))
            applied[updates] = Update(None, len(self._in_flight))
            updates += 1
            groups = algorithm.groups(before + updates, hyper)
            self._in_flight.append(Computed(gradient, iteration, before + updates, groups))
            if len(self._in_flight) > self._lag:
                norms, moved = norms + self._apply(self._in_flight.popleft()), moved + 1
            sums += added
            if self._stops(added):
                break
        self.seconds += time.perf_counter() - begin - (self._tree.group.waited - waited)
        return LearningReport(self._metrics(hyper, sums, updates, norms, moved), updates, digests, applied)

    def _apply(self, computed: Computed) -> float:
        """Change the parameters; returns the gradient's norm."""
        norm = self.update.apply(computed.gradient, computed.groups)
        self._agent.follow(computed.update)
        return norm

    def _mean(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Split what was summed over slices into the mean gradient and, on the CPU, the number of valid samples
        followed by the sum of every metric. With prioritized replay the gradient and the sums of losses are divided by
        the largest importance weight."""
        algorithm = self._algorithm
        gradient, tail = self._flat.split(total)
        tail = tail.cpu()
        count = 1 + len(algorithm.metric_names)
        scale = max(float(tail[0]), 1.0) if algorithm.mean_loss else 1.0
        if algorithm.weighted:
            largest = float(tail[count:].max())
            scale *= largest
            for place, name in enumerate(algorithm.metric_names, start=1):
                if name.startswith("loss/"):
                    tail[place] /= largest
        if scale != 1.0:
            gradient /= scale
        return gradient, tail[:count]

    def _stops(self, sums: Tensor) -> bool:
        """Whether the algorithm skips the steps that are left, after one with these sums."""
        valid, *values = sums.tolist()
        count, names = max(valid, 1.0), self._algorithm.metric_names
        return self._algorithm.stop_early({name: value / count for name, value in zip(names, values, strict=True)})

    def _metrics(
        self, hyper: dict[str, float], sums: Tensor, updates: int, norms: float, moved: int
    ) -> dict[str, float]:
        """Of an iteration with so many gradient steps; norms: sum over the `moved` gradients that were applied."""
        count, names = max(float(sums[0]), 1.0), self._algorithm.metric_names
        metrics = {name: float(value) / count for name, value in zip(names, sums[1:], strict=True)}
        metrics = self._algorithm.summarize(metrics) if updates else {}
        if moved:
            metrics["gradient_norm"] = norms / moved
        return metrics | {f"hyper/{name}": value for name, value in hyper.items()}

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors and the gradients in flight, by name."""
        tensors = {f"optimizer.{name}": tensor for name, tensor in self.update.state().items()}
        for place, each in enumerate(self._in_flight):
            tensors[f"in_flight.{place}.gradient"] = each.gradient
            tensors[f"in_flight.{place}.of"] = torch.tensor([each.iteration, each.update])
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what state returned; further tensors may be among them."""
        self.update.load(below("optimizer.", tensors))
        self._in_flight.clear()
        iterations = self._agent.experiment.iterations
        while f"in_flight.{len(self._in_flight)}.of" in tensors:
            saved = below(f"in_flight.{len(self._in_flight)}.", tensors)
            iteration, update = saved["of"].tolist()
            groups = self._algorithm.groups(update, self._algorithm.hyperparameters(iteration / iterations))
            self._in_flight.append(Computed(saved["gradient"].to(self._agent.device), iteration, update, groups))

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
        if not self._known_to_fit:
            check_loss(self._algorithm, loss)
            self._known_to_fit = True
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
