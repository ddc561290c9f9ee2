"""The base class of algorithms that wrap another algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from torch import Tensor, nn

from lockstep.algorithms.annealing import Annealing
from lockstep.algorithms.base import Exploration, ParameterGroup
from lockstep.algorithms.onpolicy import OnPolicy, OnPolicyConfig, Targets
from lockstep.core.rollout import Rollout
from lockstep.models.base import PolicyModel


class Wrapper(OnPolicy[OnPolicyConfig]):
    """An on-policy algorithm that wraps another one and delegates to it unless a subclass overrides a method.

    Args:
        inner: the algorithm.
    """

    def __init__(self, inner: OnPolicy[Any]) -> None:
        super().__init__(inner.config)
        self.inner = inner
        self.needs_targets, self.bootstrap_inputs = inner.needs_targets, inner.bootstrap_inputs
        self.normalize_advantages, self.mean_loss = inner.normalize_advantages, inner.mean_loss
        self.noise_theta = inner.noise_theta

    @property
    def annealings(self) -> Mapping[str, Annealing]:
        """Those of the inner algorithm, which explores by them."""
        return self.inner.annealings

    @annealings.setter
    def annealings(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, annealings: Mapping[str, Annealing]
    ) -> None:
        self.inner.annealings = annealings

    @property
    def bootstraps(self) -> bool:
        return self.inner.bootstraps

    def check(self, observation_space: gymnasium.Space[Any]) -> None:
        self.inner.check(observation_space)

    def companion(self, observation_space: gymnasium.Space[Any], seed: int) -> nn.Module | None:
        return self.inner.companion(observation_space, seed)

    def variables(self, model: PolicyModel) -> dict[str, Tensor]:
        return self.inner.variables(model)

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        return self.inner.groups(updates, hyper)

    @property
    def sees_gradients(self) -> bool:
        """As for the inner algorithm. A wrapper whose before_step does more overrides this."""
        return self.inner.sees_gradients

    def before_step(self, model: PolicyModel, gradient: Mapping[str, Tensor]) -> None:
        self.inner.before_step(model, gradient)

    def warm_iterations(self, samples_per_iteration: int) -> int:
        return self.inner.warm_iterations(samples_per_iteration)

    def updates_in(self, iteration: int, samples_per_iteration: int) -> int:
        return self.inner.updates_in(iteration, samples_per_iteration)

    def updates_before(self, iteration: int, samples_per_iteration: int) -> int:
        return self.inner.updates_before(iteration, samples_per_iteration)

    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration | None:
        return self.inner.exploration(progress, samples, environments, num_envs)

    def targets(self, rollout: Rollout, reward: Tensor, hyper: dict[str, float]) -> Targets:
        return self.inner.targets(rollout, reward, hyper)

    def hyperparameters(self, progress: float) -> dict[str, float]:
        return self.inner.hyperparameters(progress)

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        return self.inner.summarize(metrics)

    @property
    def reads_steps(self) -> bool:
        return self._decides_unlike(Wrapper) or self.inner.reads_steps

    def adapt(self, hyper: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        return self.inner.adapt(hyper, metrics)

    def stop_early(self, metrics: dict[str, float]) -> bool:
        return self.inner.stop_early(metrics)
