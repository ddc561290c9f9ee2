"""Model-predictive control with an ensemble of learned dynamics models (Nagabandi et al. 2018,
https://arxiv.org/abs/1708.02596; PETS, Chua et al. 2018, https://arxiv.org/abs/1805.12114).

Models learn to predict the effects of replayed actions. Acting searches for the plan that is best in the models.

Shape legend: E members, n items, O numbers of an observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lockstep.algorithms.base import LossOutput, Setup
from lockstep.algorithms.offpolicy import Exploration, OffPolicy, OffPolicyConfig
from lockstep.config.settings import SettingsError, Steps
from lockstep.core.transitions import Transitions
from lockstep.models.dynamics import DynamicsConfig, DynamicsModel


@dataclass(frozen=True)
class MPCConfig(OffPolicyConfig):
    """Learns the dynamics with which model.planner plans."""

    name = "mpc"

    rollout: int = 50
    batch_size: int = 128
    updates: int = 100
    warmup: Steps = 200
    learning_rate: float = 1e-3
    anneal_learning_rate: bool = False
    max_grad_norm: float = 100.0
    noise_std: float = 0.1
    """Standard deviation of the normal noise on planned actions, where the bounds are -1 and 1. Higher explores more of
    what plans avoid."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        if self.noise_std < 0:
            raise SettingsError(f"algorithm.noise_std={self.noise_std} must not be negative.")
        if self.n_step != 1 or self.replay.prioritized:
            raise SettingsError(
                "algorithm=mpc learns the effects of single steps, drawn uniformly: use --algorithm.n-step 1 "
                "and --algorithm.replay.no-prioritized."
            )

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        super().validate_with(setup)
        if not isinstance(setup.model, DynamicsConfig):
            raise SettingsError(
                f"algorithm=mpc needs a dynamics model, but the model is {type(setup.model).__name__}: use "
                "lockstep.models.dynamics.DynamicsConfig, as in the recipe mpc-pendulum."
            )
        why = "no values and no target network. Leave it out; model.discount discounts plans."
        self.require_defaults("discount", "target_period", "target_rate", why=why)
        if setup.normalize.clip != type(setup.normalize).clip:
            raise SettingsError(
                f"algorithm=mpc refuses normalize.clip={setup.normalize.clip:g}, because its models predict "
                "observations and must distinguish all of them. Leave it out."
            )

    def build(self) -> MPC:
        return MPC(self)


class MPC(OffPolicy[MPCConfig]):
    """Maximum likelihood of observed transitions, for every member. Members differ only in their initial weights."""

    metric_names = ("loss/model", "model/error", "model/reward_error")
    has_target: ClassVar[bool] = False

    def loss(self, model: DynamicsModel, batch: Transitions, hyper: dict[str, float]) -> LossOutput:
        """Negative log-likelihood of changes and rewards under normal distributions, whose variances balance different
        units. It is averaged over members and summed over items. Each term is multiplied by its deviation without a
        gradient: otherwise badly predicted numbers are learned slowly (Seitzer et al. 2022, β = 0.5)."""
        x = model.normalize(batch.obs)
        target = torch.cat([model.normalize(batch.next_obs) - x, batch.reward.unsqueeze(-1)], -1)  # [1, n, O + 1]
        mean, log_variance = model.predict(x, model.actions.encode(batch.action))
        squared = (mean - target).square()
        density = squared * (-log_variance).exp() + log_variance
        loss = ((0.5 * log_variance.detach()).exp() * density).sum(-1).mean(0).sum()
        with torch.no_grad():
            metrics = {
                "loss/model": loss.detach(),
                "model/error": squared[..., :-1].mean((0, 2)).sum(),
                "model/reward_error": squared[..., -1].mean(0).sum(),
            }
        return LossOutput(loss, metrics)

    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration:
        """Uniform in the warm-up, then the plan's actions and normal noise."""
        numbers = torch.full((len(environments), 1), self.config.noise_std)
        return Exploration(samples < self.config.warmup, numbers)
