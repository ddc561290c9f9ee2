"""TD3: DDPG with less overestimation (Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477).

It adds three things: the smaller value of two critics is the target, the policy moves less often than the critics, and
noise smooths the target policy's action.

Shape legend: T time (1, or the steps of a sequence), n items, D dimensions of an action.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.algorithms.base import ParameterGroup
from lockstep.algorithms.ddpg import DDPG, DDPGConfig
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Transitions
from lockstep.models.actor_critic import ActorCritic
from lockstep.models.base import PolicyModel
from lockstep.models.gaussian import standard_normal


@dataclass(frozen=True)
class TD3Config(DDPGConfig):
    """DDPG with two critics (model.critics is 2), a delayed policy and smoothed targets."""

    name = "td3"

    policy_period: int = 2
    """Gradient steps of the critics per step of the policy. More let the policy use better values, but learn more
    slowly."""
    target_period: int = 2
    smoothing_std: float = 0.2
    """Standard deviation of the noise on the target policy's action. Higher smooths values over a larger
    neighborhood."""
    smoothing_clip: float = 0.5
    """Bound on this noise. Lower smooths values over a smaller neighborhood."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        if self.policy_period < 1:
            raise SettingsError(f"algorithm.policy_period={self.policy_period} must be at least 1.")
        for setting in ("smoothing_std", "smoothing_clip"):
            if not getattr(self, setting) >= 0:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must not be negative.")

    def build(self) -> TD3:
        return TD3(self)


class TD3(DDPG[TD3Config]):
    """DDPG's losses with a smoothed action in the target. The policy only moves at every policy_period-th gradient
    step."""

    def __init__(self, config: TD3Config) -> None:
        super().__init__(config)
        self.policy_period = config.policy_period

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        """The critics at every step, the policy at every policy_period-th."""
        actor, critics = super().groups(updates, hyper)
        return (critics,) if updates % self.policy_period else (actor, critics)

    def next_action(self, target: ActorCritic, batch: Transitions) -> Tensor:
        """The target policy's action with clipped noise, within bounds: [T, n, D]."""
        assert batch.noise is not None
        config, action = self.config, target.actor(batch.next_obs)
        noise = config.smoothing_std * standard_normal(batch.noise).view_as(action)
        return (action + noise.clamp(-config.smoothing_clip, config.smoothing_clip)).clamp(-1.0, 1.0)

    def noise_numbers(self, model: PolicyModel, items: int) -> int:
        return self.steps_of(items) * model.distribution.noise_size
