"""Maximum a posteriori policy optimisation (Abdolmaleki et al. 2018, https://arxiv.org/abs/1806.06920), with the trust
region split into mean and deviation, each bounded in every dimension separately (arXiv:1812.02256, and Acme,
https://arxiv.org/abs/2006.00979, section 4.4).

Shape legend: n items, N sampled actions per state, D dimensions of an action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.algorithms.base import LossOutput, ParameterGroup
from lockstep.algorithms.qpg import QPG, QPGConfig, actor_critics, critic_error
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Transitions
from lockstep.models.base import Networks, PolicyModel
from lockstep.models.continuous import DiagonalGaussian, normal_log_prob

_LEAST = 1e-8
"""Added to the temperature and to multipliers, so that none becomes 0."""


@dataclass(frozen=True)
class MPOConfig(QPGConfig):
    """The policy is fitted to its own actions, weighted by their values, within a trust region."""

    name = "mpo"
    policies: ClassVar[tuple[str, ...]] = ("gaussian",)

    learning_rate: float = 1e-4
    actor_learning_rate: float = 1e-4
    max_grad_norm: float = 40.0
    n_step: int = 5
    target_rate: float = 1.0
    target_period: int = 100
    actions: int = 20
    """N: actions that are sampled and weighted in each state. More estimate values better and cost time."""
    dual_learning_rate: float = 1e-2
    """Step size of the temperature and of the trust regions' multipliers. Higher enforces the bounds more tightly, but
    less steadily."""
    epsilon: float = 0.1
    """Bound on the KL divergence from the policy to its weighted actions. Higher is greedier."""
    epsilon_mean: float = 2.5e-3
    """Bound on how far the mean moves from the target policy's, as a KL divergence in each dimension. Higher learns
    faster and less stably."""
    epsilon_std: float = 1e-6
    """The same bound for the deviation. Higher lets exploration vanish sooner."""
    initial_temperature: float = 10.0
    """Initial η: higher weights actions more equally."""
    initial_multiplier_mean: float = 10.0
    """Initial weight of the mean's trust region. Higher holds the policy back until the weight has fallen; lower allows
    large first steps."""
    initial_multiplier_std: float = 1000.0
    """Initial weight of the deviation's trust region. Higher and lower act as for the mean."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        if self.actions < 2:
            raise SettingsError(f"algorithm.actions={self.actions} must be at least 2, for example 20.")
        positive = ("dual_learning_rate", "epsilon", "epsilon_mean", "epsilon_std", "initial_temperature")
        for setting in (*positive, "initial_multiplier_mean", "initial_multiplier_std"):
            if not getattr(self, setting) > 0:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be positive.")

    def build(self) -> MPO:
        return MPO(self)


class MPO(QPG[MPOConfig]):
    """Evaluates the target policy, weights its actions by their values, and fits the policy to them."""

    metric_names = (
        "loss/critic",
        "loss/actor",
        "value/mean",
        "value/target",
        "value/error",
        "policy/entropy",
        "policy/temperature",
        "policy/kl_weights",
        "policy/kl_mean",
        "policy/kl_std",
    )

    def loss(self, model: Networks, batch: Transitions, hyper: dict[str, float]) -> LossOutput:
        """The critics' squared error, the weighted likelihood, the trust regions and their duals, summed over items."""
        online, target = actor_critics(model)
        distribution = online.distribution
        assert batch.noise is not None and isinstance(distribution, DiagonalGaussian)
        with torch.no_grad():
            old_policy = target.actor(batch.next_obs)  # [1, n, 2D]
            noise = batch.noise.view(self.config.actions, old_policy.shape[1], distribution.size)
            action = distribution.sample(old_policy, noise)  # [N, n, D]
            sampled = target.q(batch.next_obs, action).amin(0)  # [N, n]
            target_tm1 = batch.reward + batch.discount * sampled.mean(0)
        q_tm1 = online.q(batch.obs, batch.action)
        error, size = critic_error(q_tm1, target_tm1)

        duals = online.variables
        temperature = F.softplus(duals["temperature"]) + _LEAST
        weights, dual = weigh(sampled, temperature, self.config.epsilon)  # [N, n], [n]
        new_policy = online.actor(batch.next_obs)
        mean, log_std = distribution.split(new_policy)
        old_mean, old_log_std = distribution.split(old_policy)
        fit = -(
            weights * (normal_log_prob(mean, old_log_std, action) + normal_log_prob(old_mean, log_std, action))
        ).sum(0)
        kl_mean, kl_std = divergences(old_mean, old_log_std, mean, log_std)  # [1, n, D] each
        held = torch.zeros_like(fit)
        for name, kl, bound in (("mean", kl_mean, self.config.epsilon_mean), ("std", kl_std, self.config.epsilon_std)):
            multiplier = F.softplus(duals[f"multiplier_{name}"]) + _LEAST  # [D]
            held = held + (multiplier.detach() * kl + multiplier * (bound - kl.detach())).sum(-1)[0]

        critic, actor = (batch.weight * error).sum(), (batch.weight * (fit + dual + held)).sum()
        with torch.no_grad():
            gain = (weights * (weights * len(weights)).clamp(min=1e-30).log()).sum(0)
            metrics = {
                "loss/critic": critic.detach(),
                "loss/actor": actor.detach(),
                "value/mean": q_tm1.mean(0).sum(),
                "value/target": target_tm1.sum(),
                "value/error": size.sum(),
                "policy/entropy": distribution.entropy(new_policy).sum(),
                "policy/temperature": temperature.detach() * size.numel(),
                "policy/kl_weights": gain.sum(),
                "policy/kl_mean": kl_mean.mean(-1).sum(),
                "policy/kl_std": kl_std.mean(-1).sum(),
            }
        return LossOutput(critic + actor, metrics, size[0])

    def variables(self, model: PolicyModel) -> dict[str, Tensor]:
        """Temperature and multipliers, before softplus makes them positive."""
        config, size = self.config, model.distribution.noise_size
        return {
            "temperature": torch.tensor(inverse_softplus(config.initial_temperature)),
            "multiplier_mean": torch.full((size,), inverse_softplus(config.initial_multiplier_mean)),
            "multiplier_std": torch.full((size,), inverse_softplus(config.initial_multiplier_std)),
        }

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The base class's hyperparameters, and `dual_learning_rate`."""
        rate = self.annealed(self.config.dual_learning_rate, progress)
        return {**super().hyperparameters(progress), "dual_learning_rate": rate}

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        """Policy, critics and duals."""
        return (*super().groups(updates, hyper), ParameterGroup("variables.", hyper["dual_learning_rate"]))

    def noise_numbers(self, model: PolicyModel, items: int) -> int:
        return self.config.actions * items * model.distribution.noise_size


def weigh(values: Tensor, temperature: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The best weights of sampled actions within a KL divergence of epsilon from equal weights (E-step).

    Args:
        values: [N, n], without gradient.
        temperature: η, a scalar.
        epsilon: the bound.

    Returns:
        Weights [N, n], without gradient, which sum to 1 over actions; and the temperature's dual [n]. η minimizes its
        mean over states (equation 9 of the paper).
    """
    scaled = values / temperature
    dual = temperature * (epsilon + scaled.logsumexp(0) - math.log(len(values)))
    return scaled.detach().softmax(0), dual


def divergences(old_mean: Tensor, old_log_std: Tensor, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """KL divergences KL(old ‖ new) in each dimension, [..., D] each: of the old normal distribution from one that has
    only the new mean, and from one that has only the new deviation."""
    of_mean = 0.5 * ((mean - old_mean) * torch.exp(-old_log_std)).square()
    of_std = log_std - old_log_std + 0.5 * (torch.exp(2 * (old_log_std - log_std)) - 1)
    return of_mean, of_std


def inverse_softplus(x: float) -> float:
    """The number whose softplus is x > 0."""
    return x + math.log(-math.expm1(-x))
