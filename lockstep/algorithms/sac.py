"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905), and its
version for discrete actions (Christodoulou 2019, https://arxiv.org/abs/1910.07207).

Shape legend: T time (1, or the steps of a sequence), n items, C critics, D dimensions of an action, A discrete actions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.algorithms.base import LossOutput, ParameterGroup
from lockstep.algorithms.qpg import QPG, QPGConfig, actor_critics, critic_error, priorities
from lockstep.config.needs import Need
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Sequences, Transitions
from lockstep.models.actor_critic import ActorCritic, mask_of
from lockstep.models.base import Networks, PolicyModel
from lockstep.models.continuous import SquashedGaussian
from lockstep.models.distributions import Categorical
from lockstep.models.selection import of_action

_SHARE_OF_ENTROPY = 0.98
"""The target entropy of discrete actions, as a share of the largest possible entropy."""


@dataclass(frozen=True)
class SACConfig(QPGConfig):
    """A stochastic policy that is rewarded for its entropy."""

    name = "sac"
    policies: ClassVar[tuple[str, ...]] = ("squashed",)
    can_remember: ClassVar[bool] = True

    initial_temperature: float = 1.0
    """Initial α: the weight of entropy against reward. Higher explores more."""
    learn_temperature: bool = True
    """Raise α while the policy's entropy is below the target, and lower it while it is above."""
    temperature_learning_rate: float = 3e-4
    """Step size of log α. Higher keeps the entropy closer to its target and makes α less steady."""
    target_entropy: float | None = None
    """Target entropy in nats, where the bounds of actions are -1 and 1. None means minus the number of action
    dimensions, or for discrete actions 0.98 of the largest entropy over the actions that a mask allows. Higher keeps
    exploring more."""

    needs: ClassVar[tuple[Need, ...]] = (
        Need(("temperature_learning_rate", "target_entropy"), ("algorithm.learn_temperature",)),
    )

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        for setting in ("initial_temperature", "temperature_learning_rate"):
            if not getattr(self, setting) > 0:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be positive.")

    def build(self) -> SAC:
        return SAC(self)


class SAC(QPG[SACConfig]):
    """The critics learn the soft return of the policy, the policy maximizes it, and the temperature controls the
    entropy."""

    metric_names = (
        "loss/critic",
        "loss/actor",
        "loss/temperature",
        "value/mean",
        "value/target",
        "value/error",
        "policy/entropy",
        "policy/temperature",
    )

    def loss(self, model: Networks, batch: Transitions | Sequences, hyper: dict[str, float]) -> LossOutput:
        """Equations 5, 7 and 18 of the paper, summed over items. The critics get no gradient from the policy's loss."""
        online, target = actor_critics(model)
        batch = self.recalled(online, target, batch)
        log_alpha = online.variables["log_temperature"]
        alpha = log_alpha.detach().exp()
        terms = self._discrete if isinstance(online.distribution, Categorical) else self._continuous
        q_tm1, v_t, climb, entropy = terms(online, target, batch, alpha)
        target_tm1 = batch.reward + batch.discount * v_t
        error, size = critic_error(q_tm1, target_tm1)
        critic, actor = (batch.weight * error).sum(), (batch.weight * climb).sum()
        gap = entropy.detach() - self._target_entropy(online, batch)
        temperature = log_alpha.exp() * (batch.weight * gap).sum()
        with torch.no_grad():
            valid = batch.valid.to(size.dtype)
            metrics = {
                "loss/critic": critic.detach(),
                "loss/actor": actor.detach(),
                "loss/temperature": temperature.detach(),
                "value/mean": (q_tm1.mean(0) * valid).sum(),
                "value/target": (target_tm1 * valid).sum(),
                "value/error": (size * valid).sum(),
                "policy/entropy": (entropy * valid).sum(),
                "policy/temperature": alpha * valid.sum(),
            }
        return LossOutput(critic + actor + temperature, metrics, priorities(size, batch.valid))

    def _continuous(
        self, online: ActorCritic, target: ActorCritic, batch: Transitions, alpha: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The critics' values [C, T, n]; the soft value of the next state, the policy's loss and its entropy, [T, n]
        each."""
        distribution = online.distribution
        assert batch.noise is not None and isinstance(distribution, SquashedGaussian)
        noise, next_noise = batch.noise.view(2, *batch.action.shape)
        action, log_prob = distribution.sample_with_log_prob(online.actor(batch.obs), noise)
        climb = alpha * log_prob - online.q(batch.obs, action, frozen=True).amin(0)
        with torch.no_grad():
            next_action, next_log_prob = distribution.sample_with_log_prob(online.actor(batch.next_obs), next_noise)
            v_t = target.q(batch.next_obs, next_action).amin(0) - alpha * next_log_prob
        return online.q(batch.obs, batch.action), v_t, climb, -log_prob

    def _discrete(
        self, online: ActorCritic, target: ActorCritic, batch: Transitions, alpha: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As _continuous, with expectations over all actions instead of samples."""
        log_p = online.actor(batch.obs).log_softmax(-1)
        all_values = online.q_all(batch.obs)
        smallest = all_values.detach().amin(0)
        climb = (log_p.exp() * (alpha * log_p - smallest)).sum(-1)
        with torch.no_grad():
            next_log_p = online.actor(batch.next_obs).log_softmax(-1)
            v_t = (next_log_p.exp() * (target.q_all(batch.next_obs).amin(0) - alpha * next_log_p)).sum(-1)
        return of_action(all_values, batch.action), v_t, climb, -(log_p.exp() * log_p).sum(-1)

    def _target_entropy(self, online: ActorCritic, batch: Transitions) -> float | Tensor:
        """The result of target_entropy; with action masks, the target for the allowed actions of each item, [T, n]."""
        if online.actor.mask is None or self.config.target_entropy is not None:
            return self.target_entropy(online)
        return _SHARE_OF_ENTROPY * mask_of(batch.obs).sum(-1).clamp(min=1).float().log()

    def target_entropy(self, model: PolicyModel) -> float:
        """The entropy in nats at which the temperature stays unchanged."""
        if self.config.target_entropy is not None:
            return self.config.target_entropy
        distribution = model.distribution
        if isinstance(distribution, Categorical):
            return _SHARE_OF_ENTROPY * math.log(distribution.n)
        return -float(math.prod(distribution.action_shape))

    def variables(self, model: PolicyModel) -> dict[str, Tensor]:
        """The logarithm of the temperature.

        Raises:
            SettingsError: no policy reaches the target entropy, so the temperature would rise without end.
        """
        distribution = model.distribution
        discrete = isinstance(distribution, Categorical)
        largest = math.log(distribution.n) if discrete else math.log(2) * math.prod(distribution.action_shape)
        if self.config.learn_temperature and self.target_entropy(model) > largest:
            raise SettingsError(
                f"algorithm.target_entropy={self.config.target_entropy} is more than any policy can have here: at most "
                f"{largest:.4g} nats, if all actions are equally likely. Leave it out, or lower it."
            )
        return {"log_temperature": torch.tensor(math.log(self.config.initial_temperature))}

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The base class's hyperparameters, and `temperature_learning_rate`."""
        rate = self.annealed(self.config.temperature_learning_rate, progress)
        return {**super().hyperparameters(progress), "temperature_learning_rate": rate}

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        """Policy, critics and, if learned, the temperature."""
        temperature = ParameterGroup("variables.", hyper["temperature_learning_rate"])
        return (*super().groups(updates, hyper), *([temperature] if self.config.learn_temperature else []))

    def noise_numbers(self, model: PolicyModel, items: int) -> int:
        if isinstance(model.distribution, Categorical):
            return 0
        return 2 * self.steps_of(items) * model.distribution.noise_size
