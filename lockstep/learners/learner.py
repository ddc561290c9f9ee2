"""The learner: from rollouts to gradients of the global batch, and from these to the next version.

Shape legend: T time, B environments of a shard, n items of a shard's slice of a minibatch.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.agent import Agent, below
from lockstep.algorithms.checks import check_loss, unchanged
from lockstep.algorithms.offpolicy import OffPolicy
from lockstep.buffers.batches import Batches, CollectedRollout
from lockstep.buffers.sources import batches_for
from lockstep.config.settings import SettingsError
from lockstep.core.digests import fast_digest
from lockstep.distributed.tree import TreeSum
from lockstep.learners.gradient_graphs import GradientGraphs, HyperTensors, graphs_of
from lockstep.learners.optimizer import inverse, optimizer_for
from lockstep.learners.steps import Applied, Computed, LearningReport, Steps
from lockstep.learners.update_graphs import UpdateGraphs
from lockstep.learners.users_draws import users_draws
from lockstep.models.arithmetic import arithmetic
from lockstep.models.normalize import Normalizers
from lockstep.system.graphs import Branches, Capture


class Learner:
    """Computes the gradients of a block of batch slots and applies the global gradients. Slot s holds shard s's
    rollout, unless timing decides.

    All values are sums over the global minibatch. The tree adds them up, and they are divided afterwards. So they do
    not depend on which process holds a slot.

    Args:
        capture: makes CUDA graphs of losses and their backward passes, if they have fixed shapes.
    """

    def __init__(self, agent: Agent, slots: range, tree: TreeSum, *, capture: Capture | None = None) -> None:
        self._agent, self._algorithm, self._flat = agent, agent.algorithm, agent.flat
        self._slots, self._tree = slots, tree
        self.heartbeat: Callable[[], None] = lambda: None
        """Called at every gradient, to tell the supervisor that this process makes progress."""
        self._size, self._counts = agent.flat.vector.numel(), 1 + len(agent.algorithm.metric_names)
        """How many numbers a gradient has, and how many counts and sums of metrics follow it."""
        self.batches: Batches = batches_for(agent, slots, tree)
        self.reduction = agent.experiment.scheme.reduction(tree, self._size)
        self.optimizer = optimizer_for(agent.experiment, agent.flat)
        lag = agent.experiment.scheme.gradient_lag
        self._lag = 0 if lag == "async" else lag
        self._in_flight: deque[Computed] = deque()
        # With several policies, kernels depend on who plays what.
        self._capture = None if capture is None or agent.experiment.env.several_policies else capture
        self._gradient_graphs: GradientGraphs | None = None
        """From the second iteration with gradient steps on, if there are any."""
        self._update_graphs: UpdateGraphs | None = None
        """Likewise."""
        self._hyper = HyperTensors(agent.device)
        self._adapted: dict[str, float] = {}
        """By name: the hyperparameters that Algorithm.adapt has changed."""
        self._known_to_fit = False
        """Whether the first loss has been checked. Later ones need no check."""
        self._writes_buffers = False
        """Whether losses write buffers of the networks, which all slots share."""
        self._normalizers: Normalizers | None = None
        """The statistics that the model normalizes with now."""
        self._draws = users_draws(agent)

    def learn(self, iteration: int, rollouts: dict[int, list[CollectedRollout]]) -> LearningReport:
        """Take all gradient steps of an iteration. rollouts: the new ones, by batch slot of this learner."""
        with arithmetic(self._agent.model):
            if self._draws is None:
                return self._learn(iteration, rollouts)
            with self._draws.of_iteration(iteration):
                return self._learn(iteration, rollouts)

    def _learn(self, iteration: int, rollouts: dict[int, list[CollectedRollout]]) -> LearningReport:
        started, waited = time.perf_counter(), self._tree.group.waited
        hyper = self._hyperparameters(iteration) | self._adapted
        count = self.begin(iteration, rollouts, hyper)
        before = self._algorithm.updates_before(iteration, self._agent.experiment.samples_per_iteration)
        steps = self._take_steps(iteration, count, before, hyper)
        metrics = self._metrics(hyper, steps)
        seconds = time.perf_counter() - started - (self._tree.group.waited - waited)
        return LearningReport(metrics, steps.updates, steps.digests, steps.applied, seconds)

    def _take_steps(self, iteration: int, count: int, before: int, hyper: dict[str, float]) -> Steps:
        """Take the gradient steps of an iteration that has begun.

        Args:
            count: how many there are, unless the algorithm stops early.
            before: gradient steps before this iteration.
            hyper: the iteration's hyperparameters. Those that the algorithm adapts are changed.
        """
        algorithm, reads = self._algorithm, self._algorithm.reads_steps
        steps = Steps(torch.zeros(self._counts, dtype=torch.float64, device=self._agent.device))
        for step in range(count):
            number = before + step + 1
            self._push(step, {**hyper, "update": number}, steps.digests)
            if self._draws is not None:
                self._draws.seed(step)
            total = self.reduction.finish().to(self._agent.device)
            steps.applied[step] = Applied(None, len(self._in_flight))
            steps.updates += 1
            norm = self._apply_fused(total, iteration, number, hyper, steps.sums)
            if norm is not None:
                steps.norms, steps.moved = steps.norms + norm, steps.moved + 1
                continue
            gradient, added = self._split(total)
            found = self._means(added) if reads else {}
            if reads:
                self._adapt(hyper, found)
            groups = algorithm.groups(number, hyper)
            self._in_flight.append(Computed(gradient, iteration, number, groups))
            if len(self._in_flight) > self._lag:
                steps.norms, steps.moved = steps.norms + self._apply(self._in_flight.popleft()), steps.moved + 1
            steps.sums += added
            if reads and algorithm.stop_early(found):
                break
        return steps

    def _adapt(self, hyper: dict[str, float], found: dict[str, float]) -> None:
        """Let the algorithm change the hyperparameters, given the metrics of a gradient step.

        Raises:
            SettingsError: it does so, but the gradients have a lag.
        """
        adapted, lag = self._algorithm.adapt(hyper, found), self._agent.experiment.scheme.gradient_lag
        if adapted and lag != 0:
            raise SettingsError(
                f"{type(self._algorithm).__name__}.adapt changes {', '.join(adapted)} by the gradient that is applied, "
                f"but with scheme.gradient_lag={lag} an older one is applied. Use --scheme.gradient-lag 0."
            )
        self._adapted |= adapted
        hyper |= adapted

    def _hyperparameters(self, iteration: int) -> dict[str, float]:
        """The hyperparameters of an iteration, annealed."""
        algorithm, experiment = self._algorithm, self._agent.experiment
        samples = iteration * experiment.samples_per_iteration
        annealed = {name: annealing(samples) for name, annealing in algorithm.annealings.items()}
        return algorithm.hyperparameters(iteration / experiment.iterations) | annealed

    def begin(self, iteration: int, rollouts: dict[int, list[CollectedRollout]], hyper: dict[str, float]) -> int:
        """Take an iteration's rollouts. Returns the number of its gradient steps."""
        if self._capture is not None and self._known_to_fit:
            self._gradient_graphs = self._capture_gradients(self._capture)
            self._update_graphs = self._capture_updates(self._capture)
            self._capture = None
        for graphs in (self._gradient_graphs, self._update_graphs):
            if graphs is not None:
                graphs.begin()
        if self._draws is None or self._known_to_fit:
            return self.batches.begin(iteration, rollouts, hyper)
        with self._draws.checked_beginning():
            return self.batches.begin(iteration, rollouts, hyper)

    def _push(self, step: int, hyper: dict[str, float], digests: dict[int, str]) -> None:
        """Give the gradients of all slots to the reduction, those of the first step with their digests."""
        for slot, gradient in self._slices(step, hyper):
            if step == 0:
                digests[slot] = fast_digest(gradient)
            self.reduction.push(slot, gradient)
            self.heartbeat()

    def _slices(self, step: int, hyper: dict[str, float]) -> Iterator[tuple[int, Tensor]]:
        """Each slot with the gradient of its slice, followed by counts and metric sums. The receiver owns the
        tensor."""
        for slots in self._slot_groups():
            yield from zip(slots, self._gradients(slots, step, hyper), strict=True)

    def _slot_groups(self) -> list[tuple[int, ...]]:
        """The slots whose gradients are computed together. A graph normalizes the observations of all its slots with
        one version's statistics."""
        alone = [(slot,) for slot in self._slots]
        if self._gradient_graphs is None:
            return alone
        used = {id(self._gradient_graphs.normalizers(slot)) for slot in self._slots}
        return alone if len(used) > 1 and self._agent.normalizers.normalizes_observations else [tuple(self._slots)]

    def _gradients(self, slots: tuple[int, ...], step: int, hyper: dict[str, float]) -> list[Tensor]:
        """The gradients of slots' slices, each followed by its counts and metric sums, for the reduction."""
        if self._gradient_graphs is None:
            return [self._gradient(slot, step, hyper) for slot in slots]
        self._normalize(self._gradient_graphs.normalizers(slots[0]))
        found = self._gradient_graphs.gradients(slots, step, self._hyper.of(hyper), int(hyper["update"]))
        if found is None:
            return [self._gradient(slot, step, hyper) for slot in slots]
        for slot, (_, priorities) in zip(slots, found, strict=True):
            self.batches.learned(slot, priorities)
        return [gradient for gradient, _ in found]

    def _gradient(self, slot: int, step: int, hyper: dict[str, float]) -> Tensor:
        """The gradient of one slot's slice, without a graph."""
        if self._draws is not None:
            self._draws.seed(step, slot)
        batch, normalizers = self.batches.slice(slot, step)
        self._normalize(normalizers)
        on_gpu = self._agent.device.type != "cpu"
        hyper = {**self._hyper.of(hyper), "update": hyper["update"]} if on_gpu else hyper
        gradient, priorities = self._differentiate(slot, batch, hyper)
        self.batches.learned(slot, priorities)
        return gradient

    def _differentiate(self, slot: int, batch: Any, hyper: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Run the loss of a slot's slice and its backward pass. Returns the gradient, with the numbers that are reduced
        together with it, and the priorities of replayed items."""
        self._flat.forget_gradient()
        loss = (self._algorithm.loss if self._known_to_fit else self._first_loss)(self._agent.networks, batch, hyper)
        loss.total.backward()
        numbers = [batch.valid.sum(dtype=torch.float32)]
        numbers += [loss.metrics[name] for name in self._algorithm.metric_names]
        if self._algorithm.weighted:
            # One number per slot, so that the sum holds each slot's largest weight.
            largest, zero = batch.weight.max(), torch.zeros((), device=batch.weight.device)
            numbers += [largest if s == slot else zero for s in range(self._agent.experiment.scheme.shards)]
        return self._flat.gather_gradient(numbers), loss.priorities

    def _first_loss(self, networks: Any, batch: Any, hyper: dict[str, Any]) -> Any:
        """The loss, checked."""
        models = [self._agent.model, *([] if self._agent.target is None else [self._agent.target])]
        before = [(model, name, x, x._version) for model in models for name, x in model.named_buffers()]
        graphs = self._capture is not None
        checked = contextlib.nullcontext() if self._draws is None else self._draws.checked_loss(graphs=graphs)
        with checked, unchanged(f"{type(self._algorithm).__name__}.loss", batch):
            loss = self._algorithm.loss(networks, batch, hyper)
        check_loss(self._algorithm, loss, batch)
        written = [
            name for model, name, x, version in before if x._version != version or model.get_buffer(name) is not x
        ]
        if lost := sorted({name for model in models for name in model.state_dict()}.intersection(written)):
            raise SettingsError(
                f"{type(self._algorithm).__name__}.loss changed the model's buffer {', '.join(lost)}. Every process "
                "would change its own copy, and neither collectors nor checkpoints get it, so the result would depend "
                "on the layout. Use a parameter with a PlainGroup in groups, or register_buffer(…, persistent=False) "
                "if no other loss reads it."
            )
        self._writes_buffers = bool(written)
        self._known_to_fit = True
        return loss

    def _normalize(self, normalizers: Normalizers) -> None:
        """Make the networks normalize observations with these statistics."""
        if normalizers is not self._normalizers:
            normalizers.apply(self._agent.model)
            if self._agent.target is not None:
                normalizers.apply(self._agent.target)
            self._normalizers = normalizers

    def _split(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Split the sum over slices into the mean gradient, and the number of valid samples followed by the sum of
        every metric. Does not wait for a GPU."""
        algorithm = self._algorithm
        gradient, tail = total[: self._size], total[self._size :]
        for prefix, name in algorithm.counted:
            gradient[self._flat.span(prefix)] /= self._at_least_one(tail[1 + algorithm.metric_names.index(name)])
        divisor = self._divisor(tail)
        if isinstance(divisor, Tensor):
            gradient /= divisor
        elif divisor != 1.0:
            factor = inverse(divisor)
            if factor is None:
                gradient /= divisor
            else:
                gradient *= factor
        return gradient, tail[: self._counts]

    def _divisor(self, tail: Any) -> Any:
        """The divisor that turns the sum over slices into a mean. With prioritized replay, it contains the largest
        importance weight as a factor, and this method divides the sums of losses by this weight.

        Args:
            tail: the numbers behind the gradient, as a tensor or an array. On a GPU, so is the divisor.
        """
        algorithm = self._algorithm
        divisor = self._at_least_one(tail[0]) if algorithm.mean_loss and not algorithm.counted else 1.0
        if algorithm.weighted:
            largest = self._number(tail[self._counts :].max())
            divisor = divisor * largest
            for place, name in enumerate(algorithm.metric_names, start=1):
                if name.startswith("loss/"):
                    tail[place] /= largest
        return divisor

    def _number(self, x: Any) -> Any:
        """The value as a Python number. On a GPU it stays a tensor, so that nothing waits for the GPU."""
        return float(x) if self._agent.device.type == "cpu" else x

    def _at_least_one(self, x: Any) -> Any:
        return max(float(x), 1.0) if self._agent.device.type == "cpu" else x.clamp(min=1.0)

    def _apply_fused(
        self, total: Tensor, iteration: int, number: int, hyper: dict[str, float], sums: Tensor
    ) -> Any | None:
        """Apply a global gradient with one call, a graph, and return its norm. None: there is no graph for it.

        Args:
            number: that of the gradient step, as Algorithm.groups counts.
            sums: to which counts and sums of metrics are added.
        """
        if self._update_graphs is None:
            return None
        algorithm, groups = self._algorithm, self._algorithm.groups(number, hyper)
        follows = algorithm.following(number) if isinstance(algorithm, OffPolicy) else 0.0
        kind = tuple((type(group), *group) for group in groups), follows

        def apply(place: Tensor) -> tuple[Tensor, Any]:
            gradient, added = self._split(place)
            return added, self._apply(Computed(gradient, iteration, number, groups))

        if (done := self._update_graphs.run(total, kind, apply)) is None:
            return None
        added, norm = done
        sums += added
        return norm

    def _apply(self, computed: Computed) -> float | Tensor:
        """Apply a gradient, and return its norm."""
        if self._agent.sees_gradients:
            self._agent.before_step(computed.gradient)
        norm = self.optimizer.step(computed.gradient, computed.groups)
        self._update_target(computed.step)
        return norm

    def _update_target(self, step: int) -> None:
        """Update the target network, if there is one, after this many gradient steps of the run."""
        self._agent.follow(step)

    def _means(self, sums: Tensor) -> dict[str, float]:
        """The metrics of a step with these sums, by name."""
        valid, *values = sums.tolist()
        count, names = max(valid, 1.0), self._algorithm.metric_names
        return {name: value / count for name, value in zip(names, values, strict=True)}

    def _metrics(self, hyper: dict[str, float], steps: Steps) -> dict[str, float]:
        """The metrics of an iteration."""
        metrics = self._algorithm.summarize(self._means(steps.sums)) if steps.updates else {}
        if steps.moved:
            metrics["gradient_norm"] = float(steps.norms) / steps.moved
        return metrics | {f"hyper/{name}": value for name, value in hyper.items()}

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, hyperparameters that were adapted, and the gradients in flight, by name."""
        tensors = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        for name, value in self._adapted.items():
            tensors[f"adapted.{name}"] = torch.tensor(value, dtype=torch.float64)
        for place, each in enumerate(self._in_flight):
            tensors[f"in_flight.{place}.gradient"] = each.gradient
            tensors[f"in_flight.{place}.of"] = torch.tensor([each.iteration, each.step])
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what state returned. Other tensors are ignored."""
        self.optimizer.load(below("optimizer.", tensors))
        self._adapted = {name: float(value) for name, value in below("adapted.", tensors).items()}
        self._in_flight.clear()
        while f"in_flight.{len(self._in_flight)}.of" in tensors:
            saved = below(f"in_flight.{len(self._in_flight)}.", tensors)
            iteration, step = saved["of"].tolist()
            groups = self._algorithm.groups(step, self._hyperparameters(iteration))
            self._in_flight.append(Computed(saved["gradient"].to(self._agent.device), iteration, step, groups))

    def _capture_gradients(self, capture: Capture) -> GradientGraphs | None:
        """Graphs of gradients, if there can be any."""
        device, alone = self._agent.device, self._writes_buffers or self._agent.device.type == "cpu"
        branches = None if alone else Branches(device, len(self._slots))
        period = self._algorithm.update_period if isinstance(self._algorithm, OffPolicy) else 1
        return graphs_of(self.batches, period, self._differentiate, capture, branches)

    def _capture_updates(self, capture: Capture) -> UpdateGraphs | None:
        """Graphs of updates, unless the host does something between a gradient and its update."""
        algorithm = self._algorithm
        follows = self._agent.target is None or (
            isinstance(algorithm, OffPolicy) and type(algorithm).follow is OffPolicy.follow
        )
        lags = self._agent.experiment.scheme.gradient_lag != 0
        if lags or algorithm.reads_steps or not (follows and self.optimizer.counts_on_device):
            return None
        return UpdateGraphs(
            capture, lambda: [*self._agent.vectors, *self.optimizer.state().values()], self._agent.round
        )
