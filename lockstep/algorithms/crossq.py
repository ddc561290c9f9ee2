"""CrossQ: SAC without target networks, with batch renormalization (Bhatt et al. 2024, https://arxiv.org/abs/1902.05605).

The critics see each item's (s, a) and (s', a') in one batch, so that both are normalized by the same statistics. This
replaces the target network. Each shard normalizes its slice of the minibatch by the slice's statistics. Acting and the
critics in the policy's loss use running statistics, which follow the mean over shards.

Shape legend: n items of a slice, C critics, D dimensions of an action, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.algorithms.base import LossOutput, OptimizerConfig, ParameterGroup, PlainGroup, Setup
from lockstep.algorithms.qpg import critic_error
from lockstep.algorithms.sac import SAC, SACConfig
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Transitions
from lockstep.models.actor_critic import ActorCritic
from lockstep.models.base import PolicyModel
from lockstep.models.continuous import SquashedGaussian
from lockstep.models.renorm import RenormMLPs

_OPTIMIZER = OptimizerConfig(eps=1e-8, betas=(0.5, 0.999))


@dataclass(frozen=True)
class CrossQConfig(SACConfig):
    """SAC without target networks. It needs model.batch_renorm."""

    name = "crossq"
    batch_renorm: ClassVar[bool] = True
    can_remember: ClassVar[bool] = False

    learning_rate: float = 1e-3
    actor_learning_rate: float = 1e-3
    temperature_learning_rate: float = 1e-3
    optimizer: OptimizerConfig = _OPTIMIZER
    policy_period: int = 3
    """Gradient steps of the critics per step of the policy and of the temperature. More let the policy use better
    values, but learn more slowly."""
    statistics_rate: float = 0.01
    """Share of the distance that running statistics move towards those of a minibatch. Lower makes them steadier and
    slower to follow changes."""
    renorm_warmup: int = 100_000
    """Gradient steps with plain batch normalization, before learning uses running statistics, too. More let the
    statistics settle first; fewer start batch renormalization earlier."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        if self.policy_period < 1 or self.renorm_warmup < 0:
            raise SettingsError(
                f"algorithm.policy_period={self.policy_period} must be at least 1, and algorithm.renorm_warmup="
                f"{self.renorm_warmup} at least 0. The paper has 3 and 100000."
            )
        if not 0 < self.statistics_rate <= 1:
            raise SettingsError(
                f"algorithm.statistics_rate={self.statistics_rate} must be above 0 and at most 1, for example 0.01."
            )

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        super().validate_with(setup)
        self.require_defaults("target_period", "target_rate", why="no target networks. Leave it out.")
        if self.replay.prioritized:
            raise SettingsError(
                "algorithm.replay.prioritized draws minibatches whose statistics are not those of the replay memory, "
                "which CrossQ's normalization needs. Leave it out."
            )
        if self.batch_size < 2 * setup.shards:
            raise SettingsError(
                f"algorithm.batch_size={self.batch_size} leaves each of scheme.shards={setup.shards} one item, but a "
                "shard normalizes its items by their variance, which would be 0. Use at least "
                f"{2 * setup.shards}; 64 items per shard are better."
            )

    def build(self) -> CrossQ:
        return CrossQ(self)


class CrossQ(SAC):
    """SAC's losses. Critics evaluate observations and next observations in one batch, without target networks."""

    has_target: ClassVar[bool] = False
    config: CrossQConfig

    @property
    def update_period(self) -> int:
        return self.config.policy_period

    def loss(self, model: ActorCritic, batch: Transitions, hyper: dict[str, float]) -> LossOutput:  # type: ignore[override]
        """The losses of SAC (equations 5, 7 and 18 of its paper) with critics as in algorithm 1 of CrossQ's paper,
        summed over items."""
        config, distribution = self.config, model.distribution
        actor_layers, critic_layers = model.actor.layers, model.critics.layers
        assert isinstance(actor_layers, RenormMLPs) and isinstance(critic_layers, RenormMLPs)
        assert isinstance(distribution, SquashedGaussian) and batch.noise is not None
        noise, next_noise = batch.noise.view(2, *batch.action.shape)
        renormalize = hyper.get("number", hyper["update"]) > config.renorm_warmup
        log_alpha = model.variables["log_temperature"]
        alpha = log_alpha.detach().exp()

        with torch.no_grad():
            next_action, next_log_prob = distribution.sample_with_log_prob(model.actor(batch.next_obs), next_noise)
        both = torch.cat(
            [self._inputs(model, batch.obs, batch.action), self._inputs(model, batch.next_obs, next_action)]
        )
        values, seen_by_critics = critic_layers.learn(both, renormalize)  # [C, 2n, 1]
        q_tm1, q_t = values.transpose(1, 2).chunk(2, -1)  # [C, 1, n] each
        target_tm1 = batch.reward + batch.discount * (q_t.detach().amin(0) - alpha * next_log_prob)
        error, size = critic_error(q_tm1, target_tm1)
        critic = error.sum()
        total = critic + _follow(critic_layers, seen_by_critics, size.numel())

        actor = temperature = torch.zeros_like(critic)
        entropy = -next_log_prob
        if config.policy_period == 1 or hyper["update"] % config.policy_period == 0:
            features = model.actor.encoder(batch.obs).flatten(0, 1)
            outputs, seen_by_policy = actor_layers.learn(features, renormalize)
            action, log_prob = distribution.sample_with_log_prob(distribution.bound(outputs), noise)
            actor = (alpha * log_prob - model.q(batch.obs, action, frozen=True).amin(0)).sum()
            temperature = log_alpha.exp() * (-log_prob.detach() - self.target_entropy(model)).sum()
            total = total + actor + temperature + _follow(actor_layers, seen_by_policy, size.numel())
        with torch.no_grad():
            metrics = {
                "loss/critic": critic.detach(),
                "loss/actor": config.policy_period * actor.detach(),
                "loss/temperature": config.policy_period * temperature.detach(),
                "value/mean": q_tm1.mean(0).sum(),
                "value/target": target_tm1.sum(),
                "value/error": size.sum(),
                "policy/entropy": entropy.sum(),
                "policy/temperature": alpha * entropy.numel(),
            }
        return LossOutput(total, metrics, size[0])

    def _inputs(self, model: ActorCritic, obs: object, action: Tensor) -> Tensor:
        """[1, n, ...], actions [1, n, D] -> the critics' inputs [n, F + D]"""
        assert isinstance(model.distribution, SquashedGaussian)
        features = model.critics.encoder(obs)
        return torch.cat([features, model.distribution.encode(action).to(features.dtype)], -1).flatten(0, 1)

    def variables(self, model: PolicyModel) -> dict[str, Tensor]:
        """The logarithm of the temperature.

        Raises:
            SettingsError: actions are discrete, or no policy has the target entropy.
        """
        if not isinstance(model.distribution, SquashedGaussian):
            raise SettingsError("algorithm=crossq needs continuous actions (Box). Use sac-mujoco for discrete ones.")
        return super().variables(model)

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        """The critics at every step, the policy and the temperature at every policy_period-th. Running statistics move
        with the networks that use them."""
        rate = self.config.statistics_rate
        actor, critics, *temperature = super().groups(updates, hyper)
        of_critics = (critics, PlainGroup("statistics.critics.", rate))
        if updates % self.config.policy_period:
            return of_critics
        return (actor, *of_critics, PlainGroup("statistics.actor.", rate), *temperature)


def _follow(layers: RenormMLPs, seen: list[Tensor], items: int) -> Tensor:
    """A loss term whose gradient moves the running statistics towards those of this batch. A plain step of rate λ moves
    them a share λ of the way to the mean over shards."""
    terms = [(p * (items * (p - x)).detach()).sum() for p, x in zip(layers.statistics, seen, strict=True)]
    return torch.stack(terms).sum()
