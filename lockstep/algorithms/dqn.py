"""Deep Q-learning (Mnih et al. 2015, https://www.nature.com/articles/nature14236) and its extensions.

Each extension has a switch: double (van Hasselt et al. 2016), n-step returns, prioritized replay (Schaul et al. 2016),
and, in the model, dueling streams, noisy layers, categorical returns (C51, Bellemare et al. 2017), quantiles (QR-DQN,
Dabney et al. 2018) and implicit quantiles (IQN, Dabney et al. 2018, https://arxiv.org/abs/1806.06923). Rainbow (Hessel
et al. 2018, https://arxiv.org/abs/1710.02298) uses all of them except quantiles.

Shape legend: n items, A actions, K atoms or quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lockstep.algorithms.base import LossOutput, Setup
from lockstep.algorithms.epsilon import acting_epsilon, check_epsilon, falling_epsilon
from lockstep.algorithms.losses import huber
from lockstep.algorithms.offpolicy import Exploration, OffPolicy, OffPolicyConfig
from lockstep.config.needs import Need
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Transitions
from lockstep.models.base import Networks, PolicyModel
from lockstep.models.q import QModel, QModelConfig, midpoints
from lockstep.models.selection import numbers_of_action


@dataclass(frozen=True)
class DQNConfig(OffPolicyConfig):
    """Q-learning from replay with a target network. The defaults are for Atari."""

    name = "dqn"
    values_actions = True

    learning_rate: float = 1e-4
    anneal_learning_rate: bool = False
    max_grad_norm: float = 10.0
    double: bool = False
    """Let the online network choose the next action and the target network evaluate it. On overestimates returns
    less."""
    epsilon_start: float = 1.0
    """Initial ε: the share of random actions. Higher explores more."""
    epsilon_end: float = 0.01
    """Final ε. Higher keeps exploring more."""
    epsilon_fraction: float = 0.1
    """Share of total_steps over which ε falls, counted from the first step, warm-up included. Longer explores more."""
    epsilon_spread: float = 0.0
    """α of ε_i = ε^(1 + α i / (N - 1)) for environment i of N (Horgan et al. 2018), once ε has fallen, or always if
    algorithm.anneal sets ε. With 0, all environments have the same ε. Higher makes their ε differ more; Ape-X has 7
    with epsilon_end 0.4."""
    huber_delta: float = 1.0
    """δ of the Huber loss of expected returns: larger errors count linearly. Lower learns less from large errors; a
    large number, such as 1e9, gives half the squared error."""
    samples: int = 64
    """N: implicit quantiles of each item that a gradient step moves. More make the step less noisy and slower."""
    target_samples: int = 64
    """N': implicit quantiles of each item's target. More make the target less noisy and slower to compute."""

    later: ClassVar[frozenset[str]] = OffPolicyConfig.later | {"huber_delta"}
    needs: ClassVar[tuple[Need, ...]] = (
        Need(("samples", "target_samples"), ("model.returns",), ("implicit",)),
        Need(("huber_delta",), ("model.returns",), ("expected",)),
    )

    @property
    def copies_target(self) -> bool:
        """Whether the target network is a copy of the model after every gradient step, so that only their noise
        differs."""
        return self.target_period == 1 and self.target_rate == 1

    def compares(self, online: QModel) -> bool:
        """Whether the online network must choose the next action for the target network: with double Q-learning, unless
        both choose the same action."""
        return self.double and (online.noise_numbers > 0 or not self.copies_target)

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        check_epsilon(self)
        if self.epsilon_spread < 0:
            raise SettingsError(f"algorithm.epsilon_spread={self.epsilon_spread} must not be negative.")
        if not 0 < self.huber_delta <= 1e30:
            raise SettingsError(
                f"algorithm.huber_delta={self.huber_delta} must be above 0 and at most 1e30, for example 1. A large "
                "number, such as 1e9, gives half the squared error."
            )
        for setting in ("samples", "target_samples"):
            if getattr(self, setting) < 1:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be at least 1.")
        if recurrent and not self.sequences:
            raise SettingsError(
                f"algorithm={self.name} learns from single steps, which a recurrent core cannot use: --model.core "
                "none, or the recipes r2d2-atari and r2d2-memory, which learn from sequences."
            )

    def warnings(self, setup: Setup) -> Iterator[str]:
        """Also warns if ε falls during the warm-up, whose actions are random anyway.

        The fall of ε is counted from the first step, as in Stable-Baselines3 and CleanRL, so their epsilon_fraction
        means the same here. The code of Mnih et al. 2015 and Dopamine count it from the end of the warm-up.
        """
        yield from super().warnings(setup)
        total, per_iteration = setup.total_steps, setup.samples_per_iteration
        fall, learning = self.epsilon_fraction * total, self.build().warm_iterations(per_iteration) * per_iteration
        falls = "epsilon" not in self.anneal and self.epsilon_start != self.epsilon_end
        if falls and 0 < fall <= learning:
            fraction = min(1.0, math.ceil(100 * (fall + learning) / total) / 100)
            yield (
                f"ε falls from {self.epsilon_start:g} to {self.epsilon_end:g} in the first {fall:,.0f} steps "
                f"(algorithm.epsilon_fraction={self.epsilon_fraction:g}), but learning begins after {learning:,} "
                "(algorithm.warmup), so the agent hardly explores once it learns. Use --algorithm.epsilon-fraction "
                f"{fraction:g}, a shorter --algorithm.warmup, or more --total-steps."
            )

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        super().validate_with(setup)
        if not isinstance(setup.model, QModelConfig):
            raise SettingsError(
                f"algorithm={self.name} needs a Q-network, but the model is {type(setup.model).__name__}: use "
                "lockstep.models.QModelConfig, as in the recipe dqn-atari."
            )
        if self.keeps_policy and setup.model.returns == "categorical":
            raise SettingsError(
                "algorithm.replay.first_priority=error compares expected returns, but the priorities of "
                "model.returns=categorical are cross-entropies. Use --algorithm.replay.first-priority largest."
            )
        if setup.model.uses_previous and not self.sequences:
            raise SettingsError(
                f"algorithm={self.name} learns from single steps, which have no previous action and reward: use "
                "--model.no-previous-action-reward, or the recipes r2d2-atari and r2d2-memory, which learn from "
                "sequences."
            )

    def build(self) -> DQN[Any]:
        return DQN(self)


DQNConfigT = TypeVar("DQNConfigT", bound=DQNConfig)


class DQN(OffPolicy[DQNConfigT]):
    """Moves the value of a replayed action towards its reward plus the discounted value of the best next action."""

    metric_names = ("loss/value", "value/mean", "value/target", "value/error")
    _spread: tuple[Any, Tensor] | None = None
    """The last exploration numbers, with the arguments that led to them. They rarely change."""

    def loss(self, model: Networks, batch: Transitions, hyper: dict[str, float]) -> LossOutput:
        """Huber loss of the expected return, cross-entropy of atoms, or quantile regression, summed over items."""
        online, target = model
        assert isinstance(online, QModel) and isinstance(target, QModel)
        taus = self._draw(online, target, batch)
        return self.loss_of_features(online, target, features_of(online, batch.obs), batch, taus)

    def loss_of_features(
        self,
        online: QModel,
        target: QModel,
        features: Tensor,
        batch: Transitions,
        taus: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> LossOutput:
        """The loss, given the online network's features of the observations [1, n, F], and fractions of implicit
        quantiles [1, n, N] and [1, n, N']."""
        tau, target_tau = taus
        dist_tm1 = numbers_of_action(_numbers(online, features, tau), batch.action)
        with torch.no_grad():
            next_features = features_of(target, batch.next_obs)
            dist_t = _numbers(target, next_features, target_tau)
            if self.config.compares(online):
                if online.noisy_trunk or not self.config.copies_target:
                    next_features = features_of(online, batch.next_obs)
                q_selector = online.choices(_numbers(online, next_features, None), batch.next_obs)
            else:
                described = dist_t if target_tau is None else target.head(next_features)
                q_selector = target.choices(described, batch.next_obs)
            dist_t = numbers_of_action(dist_t, q_selector.argmax(-1))
        reward, discount = batch.reward.unsqueeze(-1), batch.discount.unsqueeze(-1)
        if online.atoms is not None:
            target_dist = project(dist_t.softmax(-1), reward + discount * online.atoms, online.atoms)
            # The loss is the divergence, which learning can bring to 0: the cross-entropy minus the target's entropy.
            priority = -(target_dist * dist_tm1.log_softmax(-1)).sum(-1)
            error = priority + torch.xlogy(target_dist, target_dist).sum(-1)
            q_tm1, target_tm1 = (dist_tm1.softmax(-1) * online.atoms).sum(-1), (target_dist * online.atoms).sum(-1)
        elif online.quantiles:
            target_dist = reward + discount * dist_t
            error = quantile_huber(dist_tm1, target_dist, tau)
            q_tm1, target_tm1 = dist_tm1.mean(-1), target_dist.mean(-1)
            priority = (target_tm1 - q_tm1).abs()
        else:
            q_tm1, target_tm1 = dist_tm1.squeeze(-1), (reward + discount * dist_t).squeeze(-1)
            error = huber(q_tm1, target_tm1, self.config.huber_delta)
            priority = (target_tm1 - q_tm1).abs()
        loss = (batch.weight * error).sum()
        with torch.no_grad():
            metrics = {
                "loss/value": loss.detach(),
                "value/mean": q_tm1.detach().sum(),
                "value/target": target_tm1.sum(),
                "value/error": (target_tm1 - q_tm1).abs().sum(),
            }
        return LossOutput(loss, metrics, priority.detach().flatten())

    def noise_numbers(self, model: PolicyModel, items: int) -> int:
        assert isinstance(model, QModel)
        samples = self.config.samples + self.config.target_samples if model.implicit else 0
        return 2 * model.noise_numbers + items * samples

    def _draw(self, online: QModel, target: QModel, batch: Transitions) -> tuple[Tensor | None, Tensor | None]:
        """Set the noise of noisy layers, and draw fractions of implicit quantiles [1, n, N] and [1, n, N']."""
        if batch.noise is None:
            return None, None
        disturb(online, target, batch.noise)
        if not online.implicit:
            return None, None
        config, shape = self.config, batch.reward.shape
        tau, target_tau = batch.noise[2 * online.noise_numbers :].split(
            [shape.numel() * config.samples, shape.numel() * config.target_samples]
        )
        return tau.view(*shape, config.samples), target_tau.view(*shape, config.target_samples)

    def hyperparameters(self, progress: float) -> dict[str, float]:
        """The base class's hyperparameters, and `epsilon`."""
        return {**super().hyperparameters(progress), "epsilon": falling_epsilon(self.config, progress)}

    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration:
        epsilon = acting_epsilon(self.config, self.annealings, progress, samples)
        fallen = "epsilon" in self.annealings or epsilon == self.config.epsilon_end
        spread = self.config.epsilon_spread if fallen else 0.0
        given = epsilon, spread, environments, num_envs
        if self._spread is None or self._spread[0] != given:
            place = torch.tensor(list(environments), dtype=torch.float64) / max(1, num_envs - 1)
            numbers = torch.as_tensor(epsilon, dtype=torch.float64) ** (1 + spread * place)
            self._spread = given, numbers.to(torch.float32).unsqueeze(-1)
        return Exploration(samples < self.config.warmup, self._spread[1])


def disturb(online: QModel, target: QModel, noise: Tensor | None) -> None:
    """Set the noise of noisy layers in both networks. Each takes different numbers from the beginning of noise [Z]."""
    if noise is not None and online.noise_numbers:
        first, second = noise[: 2 * online.noise_numbers].chunk(2)
        online.set_noise(first)
        target.set_noise(second)


def project(probability: Tensor, values: Tensor, atoms: Tensor) -> Tensor:
    """Project a categorical distribution over other values onto evenly spaced atoms (Bellemare et al. 2017, algorithm
    1): each value's probability goes to its two neighbors, in proportion to how close they are.

    Args:
        probability: [..., K], of the values.
        values: [..., K]; values beyond the outermost atoms are clamped to them.
        atoms: [K], increasing.

    Returns:
        [..., K]
    """
    step = (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    place = ((values.clamp(atoms[0], atoms[-1]) - atoms[0]) / step).unsqueeze(-1)
    near = (1 - (place - torch.arange(len(atoms), device=atoms.device)).abs()).clamp(min=0)  # [..., value, atom]
    return (probability.unsqueeze(-1) * near).sum(-2)


def quantile_huber(quantiles: Tensor, target: Tensor, tau: Tensor | None = None) -> Tensor:
    """The quantile regression loss with κ = 1 (Dabney et al. 2018, arXiv:1710.10044, equation 10; arXiv:1806.06923,
    equation 3), summed over quantiles.

    Args:
        quantiles: [..., K]
        target: [..., K'], samples of the target distribution.
        tau: [..., K], the fractions of the quantiles; None means the midpoints of K equal parts.

    Returns:
        [...]
    """
    if tau is None:
        tau = midpoints(quantiles.shape[-1], quantiles.device)
    error = target.unsqueeze(-2) - quantiles.unsqueeze(-1)  # [..., quantile, sample]
    size = huber(error, torch.zeros_like(error), delta=1.0)
    return ((tau.unsqueeze(-1) - (error.detach() < 0).float()).abs() * size).mean(-1).sum(-1)


def features_of(model: QModel, obs: Any) -> Tensor:
    """[1, n, ...] -> the input of the head, [1, n, F], each item separately."""
    leaf = next(iter(obs.values())) if isinstance(obs, dict) else obs
    start = torch.ones(leaf.shape[:2], dtype=torch.bool, device=leaf.device)
    return model.features(obs, start, torch.zeros(leaf.shape[1], 0, device=leaf.device))[0]


def _numbers(model: QModel, features: Tensor, tau: Tensor | None) -> Tensor:
    """[1, n, F], fractions of implicit quantiles [1, n, K] -> [1, n, A, K]"""
    return model.head(features) if tau is None else model.head(features, tau)


def distribution_of(model: QModel, obs: Any, tau: Tensor | None = None) -> Tensor:
    """[1, n, ...], fractions of implicit quantiles [1, n, K] -> the head's numbers [1, n, A, K]"""
    return _numbers(model, features_of(model, obs), tau)
