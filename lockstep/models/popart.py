"""PopArt: a value head with one output for each task, in units of the task's returns (van Hasselt et al. 2016,
https://arxiv.org/abs/1602.07714; Hessel et al. 2019, https://arxiv.org/abs/1809.04474).

Shape legend: T time, B environments, F features, K tasks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lockstep.config.needs import Need
from lockstep.config.settings import SettingsError
from lockstep.models.layers import initialize_orthogonal
from lockstep.models.observations import VALUE_TASK


@dataclass(frozen=True)
class PopArtConfig:
    """Values in units of each task's returns, so that tasks with large rewards do not outweigh the others."""

    rate: float = 0.0
    """β: how far a gradient step moves a task's mean and deviation of value targets towards those of the minibatch; 0
    switches PopArt off. Higher follows growing returns sooner. Lower is steadier, but tasks with large rewards outweigh
    the others for longer at the beginning. The paper has 3e-4 for millions of gradient steps; short runs need more, for
    example 1e-2."""
    smallest: float = 1e-4
    """Lower bound on deviations. Higher keeps tasks with tiny returns from being scaled up to the size of the others;
    lower lets even these tasks count as much."""
    largest: float = 1e6
    """Upper bound on deviations. Lower lets tasks with larger returns than this outweigh the others."""

    needs: ClassVar[tuple[Need, ...]] = (Need(("smallest", "largest"), ("model.popart.rate",), words="above 0"),)

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        if not 0 <= self.rate < 1:
            raise SettingsError(f"model.popart.rate={self.rate} must be at least 0 and below 1, for example 3e-4.")
        if not 0 < self.smallest <= self.largest:
            raise SettingsError(
                f"model.popart.smallest={self.smallest} must be above 0 and at most model.popart.largest="
                f"{self.largest}. The paper has 1e-4 and 1e6."
            )


def tasks_in(space: gymnasium.Space[Any]) -> int:
    """K: the number of tasks that observations of this space distinguish; 1 if they do not show the task."""
    told = space.spaces.get(VALUE_TASK) if isinstance(space, spaces.Dict) else None
    return 1 if told is None else int((told.shape or (1,))[0])


def unused_task(space: gymnasium.Space[Any], config: PopArtConfig | None) -> str:
    """A warning if observations show values the task, but no value reads it; "" otherwise.

    Args:
        space: the observation space.
        config: the model's settings of PopArt; None for models that cannot have it.
    """
    if not isinstance(space, spaces.Dict) or VALUE_TASK not in space.spaces or (config and config.rate):
        return ""
    switch = "" if config is None else "Switch it on by --model.popart.rate 1e-2. "
    return (
        f"The observation {VALUE_TASK!r} (--env.options task_input=value or both) has no effect, since only PopArt "
        f"reads it and this model has none. {switch}Use task_input=true to show the task to the model, or leave "
        "task_input out."
    )


class PopArtHead(nn.Module):
    """One linear layer to K normalized values n, in fp32. The value of task k is σ_k n_k + μ_k.

    The model that contains the head registers `statistics`, separately from parameters that an optimizer changes.

    Args:
        in_features: F.
        tasks: K.
    """

    def __init__(self, in_features: int, tasks: int, config: PopArtConfig) -> None:
        super().__init__()
        self.config, self.tasks = config, tasks
        self.linear = nn.Linear(in_features, tasks)
        initialize_orthogonal(self.linear, 1.0)
        first = torch.tensor([0.0, 1.0, 0.0]).unsqueeze(-1).repeat(1, tasks)
        self.statistics = [nn.Parameter(first)]
        """fp32 [3, K]: means μ and variances of value targets. The last row stays 0; only its gradient is used, which
        is the number of samples."""
        self._in_deviations = False

    def moments(self) -> tuple[Tensor, Tensor]:
        """μ, and σ within its bounds: fp32 [K] each, without gradient."""
        mean, variance, _ = self.statistics[0].detach()
        return mean, variance.sqrt().clamp(self.config.smallest, self.config.largest)

    def forward(self, features: Tensor, obs: Any) -> Tensor:
        """Features [T, B, F] and observations that show the tasks -> values [T, B]"""
        (mean, deviation), outputs = self.moments(), self.linear(features.float())
        values = outputs + mean / deviation if self._in_deviations else outputs * deviation + mean
        return self.of_task(values, obs)

    @contextlib.contextmanager
    def in_deviations(self) -> Iterator[None]:
        """A context in which forward returns values divided by the deviation of their task."""
        self._in_deviations = True
        try:
            yield
        finally:
            self._in_deviations = False

    def of_task(self, x: Tensor, obs: Any) -> Tensor:
        """From numbers of all tasks, [K] or [T, B, K], select those of each observation's task: [T, B]. With a single
        task, only remove its axis."""
        return x.squeeze(-1) if self.tasks == 1 else (x * obs[VALUE_TASK]).sum(-1)

    def one_hot(self, obs: Any, like: Tensor) -> Tensor:
        """fp32 [T, B, K]: the tasks of the first T observations. like: a tensor [T, B]."""
        return torch.ones_like(like).unsqueeze(-1) if self.tasks == 1 else obs[VALUE_TASK][: len(like)]

    @torch.no_grad()
    def follow(self, sums: Tensor) -> None:
        """Update the statistics by a minibatch, and correct the layer so that values do not change.

        In units of σ and from μ, let d and c be the means of the targets and of their squares. Then μ moves by β σ d,
        and σ² becomes (1 - β) σ² + β σ² c - (β σ d)². That is ν - μ² of the paper's moving averages μ and ν, without
        the difference of two large numbers.

        Args:
            sums: fp32 [3, K], or proportional numbers: the sums of (G - μ) / σ and of its square over the targets G of
                each task, and the number of samples. Tasks without samples do not change.
        """
        rate, statistics = self.config.rate, self.statistics[0].detach()
        (first, square, count), (mean, deviation) = sums, self.moments()
        seen = count > 0
        count = torch.where(seen, count, 1.0)
        move, spread = rate * (first / count), rate * (square / count)
        variance = (1.0 - rate) * statistics[1] + deviation.square() * (spread - move.square()).clamp(min=0.0)
        old = mean.clone()
        statistics[0].copy_(torch.where(seen, mean + deviation * move, mean))
        statistics[1].copy_(torch.where(seen, variance, statistics[1]))
        mean, now = self.moments()
        weight, bias = self.linear.weight, self.linear.bias
        weight.mul_((deviation / now).unsqueeze(-1))
        bias.copy_((deviation * bias + old - mean) / now)
