"""The common parts of Q-value policy gradient algorithms: critics learned from replay, and a policy that maximizes
them.

All losses of a gradient step use the parameters before it. So the policy uses the critics before their update, whereas
sequential implementations use the updated critics. This makes a step a single sum over shards.

Shape legend: n items, C critics, D dimensions of an action.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lockstep.algorithms.base import OptimizerConfig, ParameterGroup, Setup
from lockstep.algorithms.offpolicy import Exploration, OffPolicy, OffPolicyConfig
from lockstep.config.settings import SettingsError
from lockstep.models.actor_critic import ActorCritic, ActorCriticConfig
from lockstep.models.base import Networks

_OPTIMIZER = OptimizerConfig(eps=1e-8)
"""Torch's default Adam, which the papers use."""


@dataclass(frozen=True)
class QPGConfig(OffPolicyConfig):
    """Settings of algorithms with action-value critics and a policy that maximizes them."""

    policies: ClassVar[tuple[str, ...]] = ()
    """Values of model.policy that the algorithm supports."""
    batch_renorm: ClassVar[bool] = False
    """Whether the model's model.batch_renorm must be on. Other algorithms would never learn the statistics."""

    rollout: int = 16
    batch_size: int = 256
    updates: int = 64
    learning_rate: float = 3e-4
    """Step size of the critics. Higher learns faster until it becomes unstable."""
    actor_learning_rate: float = 3e-4
    """Step size of the policy. Higher follows the critics faster, including their errors."""
    anneal_learning_rate: bool = False
    """Lower all learning rates linearly to zero over total_steps."""
    optimizer: OptimizerConfig = _OPTIMIZER
    max_grad_norm: float = 1e9
    """Scale gradients of the critics and of the policy whose norm exceeds this. Lower is safer and slower."""
    target_rate: float = 0.005

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        if not self.actor_learning_rate > 0:
            raise SettingsError(f"algorithm.actor_learning_rate={self.actor_learning_rate} must be positive.")
        if recurrent:
            raise SettingsError(
                f"algorithm={self.name} learns from single steps, which a recurrent core cannot use: --model.core none."
            )

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        super().validate_with(setup)
        model = setup.model
        if not isinstance(model, ActorCriticConfig) or model.policy not in self.policies:
            raise SettingsError(
                f"algorithm={self.name} needs lockstep.models.ActorCriticConfig with policy "
                f"{' or '.join(map(repr, self.policies))}, but the model is {model}."
            )

        if model.batch_renorm != self.batch_renorm:
            raise SettingsError(
                f"algorithm={self.name} needs model.batch_renorm {'on' if self.batch_renorm else 'off'}: use --model."
                f"{'' if self.batch_renorm else 'no-'}batch-renorm."
            )

    @abstractmethod
    def build(self) -> QPG[Any]:
        """The algorithm with these settings."""


QPGConfigT = TypeVar("QPGConfigT", bound=QPGConfig)


class QPG(OffPolicy[QPGConfigT]):
    """Critics and policy, each with its own loss and learning rate."""

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """Those of the base class, and `actor_learning_rate`."""
        hyper = super().hyperparameters(progress)
        rate = self.config.actor_learning_rate / self.config.learning_rate * hyper["learning_rate"]
        return {**hyper, "actor_learning_rate": rate}

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        """The policy and the critics, at every step."""
        return (
            ParameterGroup("actor.", hyper["actor_learning_rate"]),
            ParameterGroup("critics.", hyper["learning_rate"]),
        )

    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration:
        """Uniform in the warm-up, then sampled from the policy."""
        return Exploration(samples < self.config.warmup, torch.zeros(len(environments), 0))


def actor_critics(model: Networks) -> tuple[ActorCritic, ActorCritic]:
    """The online model and the target model."""
    online, target = model
    assert isinstance(online, ActorCritic) and isinstance(target, ActorCritic)
    return online, target


def critic_error(q_tm1: Tensor, target_tm1: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors of critics, [C, 1, n] against [1, n]: their sum over critics [1, n], and the mean absolute error
    [n], as a priority."""
    error = target_tm1 - q_tm1
    return error.square().sum(0), error.detach().abs().mean(0).flatten()
