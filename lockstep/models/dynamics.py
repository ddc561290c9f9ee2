"""An ensemble that predicts the effects of actions, and a policy that plans with it.

Shape legend: T time, B environments, O numbers of an observation, D dimensions of an action, E members, H steps of a
plan, P candidate plans, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F
from torch.quasirandom import SobolEngine

from lockstep.config.needs import Need
from lockstep.config.settings import SettingsError
from lockstep.models.base import ModelConfig, ModelOutput, PolicyModel
from lockstep.models.continuous import Deterministic
from lockstep.models.gaussian import standard_normal
from lockstep.models.layers import reproducible_initialization
from lockstep.models.mlps import MLPs
from lockstep.models.observations import ObservationLayout, observed_by_policies
from lockstep.models.trunk import acting_copy

_LOG_VARIANCES = (-10.0, 5.0)
"""Soft bounds of predicted log variances."""
_FIRST_STD = 0.5
"""Standard deviation of the first candidates, where the bounds are -1 and 1 (Chua et al. 2018: a quarter of the
range)."""


@dataclass(frozen=True)
class DynamicsConfig(ModelConfig):
    """An ensemble of dynamics models and a planner. Observations must be vectors, and actions continuous and
    bounded."""

    has_policy_and_value: ClassVar[bool] = False

    members: int = 5
    """Number of networks, which predict independently. More make plans less sensitive to wrong predictions for unseen
    states and cost time."""
    hidden_sizes: tuple[int, ...] = (200, 200)
    """Hidden layers of each network. Wider layers fit harder dynamics and cost time at every step of every plan."""
    planner: Literal["cem", "mppi"] = "cem"
    """cem refits a normal distribution to the best plans (Chua et al. 2018). mppi weights all plans by their returns
    (Williams et al. 2017)."""
    horizon: int = 20
    """Steps of a plan. Longer plans look further ahead and accumulate more model errors."""
    population: int = 200
    """Plans to try in each round. More find better plans and cost time."""
    rounds: int = 4
    """Rounds of trying and improving plans before each action. More come closer to the best plan and cost time."""
    elites: int = 20
    """Number of best plans to which cem refits. Fewer converge sooner, perhaps to a worse plan."""
    temperature: float = 1.0
    """Temperature of mppi, in units of return. Higher gives worse plans more weight."""
    discount: float = 0.99
    """Weight of a reward one step later in a plan. Lower plans as if the horizon were shorter."""

    needs: ClassVar[tuple[Need, ...]] = (
        Need(("elites",), ("model.planner",), ("cem",)),
        Need(("temperature",), ("model.planner",), ("mppi",)),
    )

    def policy_space(self, observation_space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
        """The space of the policy's observations: all entries except PopArt's task."""
        return observed_by_policies(super().policy_space(observation_space))

    def build(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        precision: Literal["bf16", "fp32"],
        normalize_observations: bool,
        seed: int,
        observation_clip: float = 10.0,
    ) -> DynamicsModel:
        self.validate()
        layout = ObservationLayout.of(observation_space)
        if layout.images or layout.mask_size or not isinstance(action_space, spaces.Box):
            raise SettingsError(
                f"A dynamics model predicts vectors from vectors and continuous actions, but observations are "
                f"{observation_space} and actions {action_space}. Use another environment or algorithm."
            )
        if precision != "fp32":
            raise SettingsError(f"--precision {precision}: plans sum many small predictions. Use --precision fp32.")
        distribution = Deterministic(action_space)
        if (numbers := self.horizon * distribution.size) > SobolEngine.MAXDIM:
            raise SettingsError(
                f"model.horizon={self.horizon} steps of {distribution.size} numbers each make plans of {numbers:,} "
                f"numbers, but the planner searches among at most {SobolEngine.MAXDIM:,}. Use --model.horizon "
                f"{SobolEngine.MAXDIM // distribution.size} or less."
            )
        with reproducible_initialization(seed):
            return DynamicsModel(self, layout, distribution, seed)

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        for name in ("members", "horizon", "population", "rounds", "elites"):
            if getattr(self, name) < 1:
                raise SettingsError(f"model.{name}={getattr(self, name)} must be at least 1.")
        if not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise SettingsError(f"model.hidden_sizes={self.hidden_sizes} must be at least 1 each.")
        if self.planner == "cem" and self.elites > self.population:
            raise SettingsError(f"model.elites={self.elites} cannot be more than model.population={self.population}.")
        if not self.temperature > 0:
            raise SettingsError(f"model.temperature={self.temperature} must be positive, for example 1.")
        if not 0 < self.discount <= 1:
            raise SettingsError(f"model.discount={self.discount} must be above 0 and at most 1.")
        if self.core != "none":
            raise SettingsError(f"model.core={self.core}: a dynamics model has no memory. Use --model.core none.")


class DynamicsModel(PolicyModel):
    """Every member predicts how an action changes an observation and what reward it earns. The policy is the first
    action of the plan with the highest predicted return.

    The state is the rest of the previous step's plan, from which the next search begins. Candidates are the points of a
    Sobol sequence, shifted by set_noise (Cranley and Patterson 1976). They cover the space of plans more evenly than
    random points, and few random numbers suffice to shift them.
    """

    def __init__(self, config: DynamicsConfig, layout: ObservationLayout, distribution: Deterministic, seed: int):
        super().__init__()
        self.config, self.layout = config, layout
        self.distribution = self.actions = distribution
        size, actions = layout.vector_size, distribution.size
        self.layers = MLPs(config.members, (size + actions, *config.hidden_sizes, 2 * (size + 1)), "relu", False)
        self.mean: Tensor
        self.std: Tensor
        self.points: Tensor
        self.shift: Tensor
        self.register_buffer("mean", torch.zeros(size), persistent=False)
        self.register_buffer("std", torch.ones(size), persistent=False)
        numbers = config.horizon * actions
        points = SobolEngine(numbers, scramble=True, seed=seed).draw(config.population)
        self.register_buffer("points", points, persistent=False)
        self.register_buffer("shift", torch.zeros(config.rounds, numbers), persistent=False)
        self.state_size, self.noise_numbers = numbers, config.rounds * numbers

    def predict(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized observations [E or 1, N, O] and actions [E or 1, N, D] in [-1, 1] -> means and log variances of
        the change of each number of the observation and of the reward, [E, N, O + 1] each."""
        mean, log_variance = self.layers(torch.cat([x, action], -1)).chunk(2, -1)
        low, high = _LOG_VARIANCES
        log_variance = high - F.softplus(high - log_variance)
        return mean, low + F.softplus(log_variance - low)

    def normalize(self, obs: Any) -> Tensor:
        """[T, B, ...] -> [T, B, O]"""
        return (self.layout.vector(obs) - self.mean) / self.std

    def returns(self, x: Tensor, plans: Tensor) -> Tensor:
        """Returns [B, P] of plans [B, P, H, D] from normalized observations [B, O], averaged over members.

        Each member follows its own predictions (trajectory sampling with fixed bootstraps, Chua et al. 2018).
        """
        environments, population, horizon, _ = plans.shape
        steps = plans.clamp(-1.0, 1.0).flatten(0, 1).transpose(0, 1)  # [H, B * P, D]
        at = x.repeat_interleave(population, 0).expand(self.config.members, -1, -1)
        total = torch.zeros_like(at[..., 0])
        for h in range(horizon):
            change, _ = self.predict(at, steps[h].expand(self.config.members, -1, -1))
            at = at + change[..., :-1]
            total = total + self.config.discount**h * change[..., -1]
        return total.mean(0).view(environments, population)

    def plan(self, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Improve plans [B, H * D], given normalized observations [B, O]. Also gives the return [B] of the best
        candidate."""
        config, best = self.config, x.new_zeros(x.shape[0])
        std = torch.full_like(mean, _FIRST_STD)
        for shift in self.shift:
            normal = standard_normal((self.points + shift) % 1.0)
            plans = (mean.unsqueeze(1) + std.unsqueeze(1) * normal).clamp(-1.0, 1.0)
            value = self.returns(x, plans.unflatten(-1, (config.horizon, -1)))
            best = value.amax(-1)
            if config.planner == "mppi":
                weight = ((value - best.unsqueeze(-1)) / config.temperature).softmax(-1)
                mean = (weight.unsqueeze(-1) * plans).sum(1)
                continue
            chosen = value.topk(config.elites, -1).indices.unsqueeze(-1)
            elite = plans.gather(1, chosen.expand(-1, -1, plans.shape[-1]))
            mean, std = elite.mean(1), elite.std(1, correction=0)
        return mean, best

    def forward(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        """Plan at each step. The policy's parameters are the first action of the plan."""
        actions, values = [], []
        for x, first in zip(self.normalize(obs), start, strict=True):
            state, value = self.plan(x, state.masked_fill(first.unsqueeze(-1), 0.0))
            action, rest = state.split([self.actions.size, state.shape[-1] - self.actions.size], -1)
            state = torch.cat([rest, torch.zeros_like(action)], -1)
            actions.append(action)
            values.append(value)
        return ModelOutput(torch.stack(actions), torch.stack(values)), state

    def set_noise(self, uniform: Tensor | None) -> None:
        """Shift the candidates of all rounds by uniform numbers in (0, 1); None removes the shift."""
        if uniform is None:
            self.shift.zero_()
        else:
            self.shift.copy_(uniform.view_as(self.shift))

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        self.mean.copy_(mean)
        self.std.copy_(std)

    def for_acting(self) -> DynamicsModel:
        return acting_copy(self)
