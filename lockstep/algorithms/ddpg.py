"""Deep deterministic policy gradient (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971).

Shape legend: T time (1, or the steps of a sequence), n items, D dimensions of an action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lockstep.algorithms.base import LossOutput
from lockstep.algorithms.offpolicy import Exploration
from lockstep.algorithms.qpg import QPG, QPGConfig, actor_critics, critic_error, priorities
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Sequences, Transitions
from lockstep.models.actor_critic import ActorCritic
from lockstep.models.base import Networks


@dataclass(frozen=True)
class DDPGConfig(QPGConfig):
    """A deterministic policy, improved along the critic's gradient."""

    name = "ddpg"
    policies: ClassVar[tuple[str, ...]] = ("deterministic",)
    can_remember: ClassVar[bool] = True

    noise_std: float = 0.1
    """Standard deviation of the normal noise on actions, where the bounds are -1 and 1. Higher explores more."""
    noise_theta: float = 1.0
    """θ: how fast the noise returns to 0. With 1 it is independent at every step. Lower makes it an Ornstein-Uhlenbeck
    process with the same deviation, which pushes in one direction for about 1/θ steps. Papers give the deviation of its
    steps instead, σ = noise_std sqrt(1 - (1 - θ)²). The σ = 0.2 and θ = 0.15 of Lillicrap et al. 2016 correspond to a
    noise_std of 0.38."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        if not self.noise_std >= 0:
            raise SettingsError(f"algorithm.noise_std={self.noise_std} must not be negative, for example 0.1.")
        if not 0 < self.noise_theta <= 1:
            raise SettingsError(f"algorithm.noise_theta={self.noise_theta} must be above 0 and at most 1.")

    def build(self) -> DDPG[Any]:
        return DDPG(self)


DDPGConfigT = TypeVar("DDPGConfigT", bound=DDPGConfig)


class DDPG(QPG[DDPGConfigT]):
    """Critics learn the return of the target policy, and the policy maximizes the first critic."""

    target_acts = True
    metric_names = ("loss/critic", "loss/actor", "value/mean", "value/target", "value/error")

    def __init__(self, config: DDPGConfigT) -> None:
        super().__init__(config)
        self.noise_theta = config.noise_theta
        self.policy_period = 1
        """Gradient steps of the critics per step of the policy."""

    @property
    def update_period(self) -> int:
        return self.policy_period

    def loss(self, model: Networks, batch: Transitions | Sequences, hyper: dict[str, float]) -> LossOutput:
        """Squared errors of the critics, and the negative value of the policy's actions, summed over items."""
        online, target = actor_critics(model)
        batch = self.recalled(online, target, batch)
        with torch.no_grad():
            action = self.next_action(target, batch)
            target_tm1 = batch.reward + batch.discount * target.q(batch.next_obs, action).amin(0)
        q_tm1 = online.q(batch.obs, batch.action)
        error, size = critic_error(q_tm1, target_tm1)
        total = critic = (batch.weight * error).sum()
        actor = torch.zeros_like(critic)
        if self.policy_period == 1 or hyper["update"] % self.policy_period == 0:
            q_of_policy = online.q(batch.obs, online.actor(batch.obs), frozen=True)[0]
            actor = -(batch.weight * q_of_policy).sum()
            total = critic + actor
        with torch.no_grad():
            valid = batch.valid.to(size.dtype)
            metrics = {
                "loss/critic": critic.detach(),
                "loss/actor": self.policy_period * actor.detach(),
                "value/mean": (q_tm1.mean(0) * valid).sum(),
                "value/target": (target_tm1 * valid).sum(),
                "value/error": (size * valid).sum(),
            }
        return LossOutput(total, metrics, priorities(size, batch.valid))

    def next_action(self, target: ActorCritic, batch: Transitions) -> Tensor:
        """The action at which targets evaluate next_obs: [T, n, D]."""
        return target.actor(batch.next_obs)

    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration:
        """Uniform in the warm-up, then the policy's action with noise."""
        numbers = torch.full((len(environments), 1), self.config.noise_std)
        return Exploration(samples < self.config.warmup, numbers)
