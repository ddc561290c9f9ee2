"""The optimizer of the flat parameter vector."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop

from lockstep.algorithms.base import ParameterGroup, PlainGroup
from lockstep.experiment import Experiment
from lockstep.models.parameters import FlatParameters

_ONE = np.float32(1)
MOMENTS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "rmsprop": ("square_avg",),
    "rmsprop_tf": ("square_avg",),
}
"""The statistics of gradients that optimizers keep."""
_BEGIN = {"rmsprop_tf": 1.0}
"""What statistics begin with, unless with 0."""


def inverse(divisor: float) -> float | None:
    """The inverse of a power of two. A product with it has the bits of the quotient, and is cheaper."""
    return 1 / divisor if math.frexp(divisor)[0] == 0.5 else None


class Optimizer:
    """Changes the flat parameter vector by the reduced gradient.

    torch's optimizers as functions: their classes import torch's compiler, which takes a second in every process.
    """

    def __init__(self, experiment: Experiment, flat: FlatParameters) -> None:
        self._config = experiment.algorithm.optimizer
        self._max_norm = experiment.algorithm.max_grad_norm
        self._flat = flat
        self._vector = flat.vector.detach()
        self._decays = flat.of_networks() if self._config.name == "adamw" and self._config.weight_decay else None
        """bool [N]: which parameters decay."""
        begin = _BEGIN.get(self._config.name, 0.0)
        self.moments = {name: torch.full_like(self._vector, begin) for name in MOMENTS[self._config.name]}
        """fp32 [N] each: the statistics of gradients."""
        self.counts: dict[str, Tensor] = {}
        """Steps of each group that has moved."""

    @torch.no_grad()
    def step(self, gradient: Tensor, groups: tuple[ParameterGroup, ...]) -> float | Tensor:
        """Update the parameters by the global gradient, each group's part clipped to the largest norm. Returns the norm
        before clipping, on a GPU as a tensor. Parameters in no group stay unchanged, and so do their statistics."""
        for group in groups:
            if isinstance(group, PlainGroup):
                span = self._flat.span(group.prefix)
                self._vector[span].sub_(gradient[span] * group.learning_rate)
        norms = [self._move(gradient, group) for group in groups if not isinstance(group, PlainGroup)]
        self._flat.round()
        if len(norms) <= 1:
            return norms[0] if norms else 0.0
        return torch.stack(norms).norm() if isinstance(norms[0], Tensor) else math.hypot(*norms)  # type: ignore[arg-type]

    def _move(self, gradient: Tensor, group: ParameterGroup) -> float | Tensor:
        span = self._flat.span(group.prefix) if group.prefix else None

        def of(x: Tensor) -> Tensor:
            return x if span is None else x[span]

        gradient, vector = of(gradient), of(self._vector)
        moments = [of(moment) for moment in self.moments.values()]
        if self._decays is not None:
            kept = torch.ones_like(vector)
            vector.mul_(kept.masked_fill_(of(self._decays), 1 - group.learning_rate * self._config.weight_decay))
        return self._descend(vector, gradient, moments, self._count(group), group.learning_rate)

    def _count(self, group: ParameterGroup) -> Tensor:
        """How many steps a group has taken."""
        name = f"step.{group.prefix}".removesuffix(".")
        if name not in self.counts:
            self.counts[name] = self._counter()
        return self.counts[name]

    def _descend(
        self, vector: Tensor, gradient: Tensor, moments: list[Tensor], count: Tensor, rate: float
    ) -> float | Tensor:
        """Clip a gradient to the largest norm, update parameters and statistics, all in place, and count the step.
        Returns the norm before clipping."""
        config, norm, tensors = self._config, self._clip(gradient), ([vector], [gradient])
        given: dict[str, Any] = {"lr": rate, "weight_decay": 0.0, "eps": config.eps}
        if config.name == "rmsprop":
            rmsprop(*tensors, moments, [], [], [count], alpha=config.decay, momentum=0.0, centered=False, **given)
            return norm
        if config.name == "rmsprop_tf":
            count += 1
            (square,) = moments
            square.mul_(config.decay).addcmul_(gradient, gradient, value=1 - config.decay)
            vector.addcdiv_(gradient, square.add(config.eps).sqrt_(), value=-rate)
            return norm
        first, second = moments
        given |= {"beta1": config.betas[0], "beta2": config.betas[1]}
        if config.name == "radam":
            capturable = vector.device.type != "cpu"
            radam(*tensors, [first], [second], [count], foreach=False, capturable=capturable, **given)
        else:
            adam(*tensors, [first], [second], [], [count], fused=True, amsgrad=False, maximize=False, **given)
        return norm

    def _clip(self, gradient: Tensor) -> float | Tensor:
        """Clip a gradient to the largest norm, in place. Returns the norm before clipping."""
        if gradient.device.type != "cpu":  # without waiting for the device
            norm = gradient.norm()
            gradient.mul_((self._max_norm / (norm + 1e-6)).clamp_(max=1.0))
            return norm
        length = float(gradient.norm())
        if length > self._max_norm:
            gradient.mul_(self._max_norm / (length + 1e-6))
        return length

    @property
    def counts_on_device(self) -> bool:
        """Whether a step depends on no numbers of the host except the rates, so that a graph can repeat it."""
        return self._config.name != "rmsprop"

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
        """Set how many steps the named groups have taken."""
        for name, number in steps.items():
            self.counts.setdefault(name, self._counter()).fill_(number)

    def _counter(self) -> Tensor:
        # Fused Adam, RAdam on a GPU and TensorFlow's RMSProp count where they compute.
        return torch.zeros((), device="cpu" if self._config.name == "rmsprop" else self._vector.device)


class PortableOptimizer(Optimizer):
    """The optimizer in portable arithmetic."""

    def __init__(self, experiment: Experiment, flat: FlatParameters) -> None:
        super().__init__(experiment, flat)
        from lockstep.kernels import optimizers  # which need Numba

        self._kernels = optimizers

    def step(self, gradient: Tensor, groups: tuple[ParameterGroup, ...]) -> float | Tensor:
        """As Optimizer.step, for Adam in one call."""
        return self.step_of_sum(gradient.numpy(), groups) if self.joins(groups) else super().step(gradient, groups)

    def joins(self, groups: tuple[ParameterGroup, ...]) -> bool:
        """Whether step_of_sum can move these groups."""
        return self._config.name == "adam" and not any(isinstance(group, PlainGroup) for group in groups)

    def step_of_sum(self, gradient: np.ndarray, groups: tuple[ParameterGroup, ...], divisor: float = 1.0) -> float:
        """Move groups by Adam with one call of a kernel. Few operations surround it: between gradients, the caches do
        not contain torch's code, and an operation of torch takes ten times as long as in a loop.

        Args:
            gradient: float32 [P] or more. The part that belongs to the groups is overwritten.
            divisor: divides the gradient first.

        Returns:
            The norm of the quotient, before it was clipped.
        """
        vector, *moments = (x.numpy() for x in (self._vector, *self.moments.values()))
        config, norms, places, rates = self._config, np.empty(len(groups)), [], []
        for group in groups:
            span, count = self._flat.span(group.prefix), self._count(group).numpy()
            count += 1
            places.append((span.start, span.stop, int(count)))
            rates.append(float(group.learning_rate))
        of_groups = np.array(places), np.array(rates), *config.betas, config.eps, norms
        factor = inverse(divisor)
        scale = (_ONE, np.float32(divisor)) if factor is None else (np.float32(factor), _ONE)
        self._kernels.adam_of_groups(vector, gradient, *scale, self._max_norm, *moments, *of_groups)
        return math.hypot(*norms.tolist())

    def _descend(self, vector: Tensor, gradient: Tensor, moments: list[Tensor], count: Tensor, rate: float) -> float:
        config, x, g = self._config, vector.numpy(), gradient.numpy()
        count += 1
        remembered = [moment.numpy() for moment in moments]
        if config.name not in ("rmsprop", "rmsprop_tf"):
            numbers = self._max_norm, *remembered, int(count), rate, *config.betas, config.eps
            radam = config.name == "radam"
            return self._kernels.radam(x, g, *numbers) if radam else self._kernels.adam(x, g, _ONE, _ONE, *numbers)
        numbers = self._max_norm, *remembered, rate, config.decay, config.eps
        return self._kernels.rmsprop(x, g, *numbers, config.name == "rmsprop_tf")


def optimizer_for(experiment: Experiment, flat: FlatParameters) -> Optimizer:
    """The optimizer in an experiment's arithmetic."""
    return (PortableOptimizer if experiment.precision == "portable" else Optimizer)(experiment, flat)
