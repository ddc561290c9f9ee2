"""Recurrent deep Q-learning from replayed sequences (R2D2, Kapturowski et al. 2019,
https://openreview.net/forum?id=r1lyTjAqYX). Each sequence is stored with the core's state, and a burn-in adapts this
state to the current parameters. Rescaled values are learned by n-step double Q-learning. Sequences are drawn by
priority.

Shape legend: L steps of burn-in, M steps that are learned from, N steps of a return, n sequences, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.base import LossOutput, Setup
from lockstep.algorithms.dqn import DQN, DQNConfig, disturb
from lockstep.algorithms.losses import huber, mixed_priority
from lockstep.config.needs import Need
from lockstep.config.settings import SettingsError, Steps
from lockstep.core.arrays import map_structure
from lockstep.core.transitions import Sequences
from lockstep.models.base import Networks
from lockstep.models.q import QModel, QModelConfig
from lockstep.models.selection import of_action


@dataclass(frozen=True)
class R2D2Config(DQNConfig):
    """Q-learning from sequences. The defaults are those of rlpyt's R2D1 for Atari (arXiv:1909.01500), except for ε,
    which is that of Kapturowski et al. 2019, and huber_delta."""

    name = "r2d2"

    rollout: int = 40
    """Steps per environment and iteration. A sequence begins at the first step of every rollout, since the core's state
    is stored there. In rollouts shorter than burn_in + unroll, sequences overlap: each step is learned from at several
    positions, and more states are stored. In rollouts longer than unroll, some steps are never learned from."""
    batch_size: int = 32
    """Sequences per gradient step. More make the step less noisy and slower."""
    warmup: Steps = 100_000
    burn_in: int = 40
    """L: steps at the beginning of a sequence that only update the core's state. More reduce the effect of the stale
    stored state and cost time."""
    unroll: int = 80
    """M: steps that are learned from, through which gradients flow back. More learn longer dependencies and cost
    time."""
    n_step: int = 5
    rescaling: float = 1e-3
    """ε of the function that rescales values, h(x) = sign(x) (sqrt(|x| + 1) - 1) + εx. Higher compresses large returns
    less."""
    priority_max: float = 0.9
    """η: a sequence's priority is η times its largest error plus 1 - η times its mean error. Higher prefers sequences
    with one surprise to those with many small ones."""
    max_grad_norm: float = 80.0
    discount: float = 0.997
    double: bool = True
    target_period: int = 2_500
    epsilon_end: float = 0.4
    """Final ε of the environment that explores most. Higher keeps exploring more."""
    epsilon_fraction: float = 0.0
    epsilon_spread: float = 7.0
    """α of ε_i = ε^(1 + α i / (N - 1)) for environment i of N (Horgan et al. 2018), once ε has fallen, or always if
    algorithm.anneal sets ε. With 0, all environments have the same ε. Higher makes their ε differ more."""

    needs: ClassVar[tuple[Need, ...]] = (Need(("priority_max",), ("algorithm.replay.prioritized",)),)

    @property
    def sequence_steps(self) -> tuple[int, int]:
        return self.burn_in, self.unroll

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        for setting, least in (("burn_in", 0), ("unroll", 1)):
            if getattr(self, setting) < least:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be at least {least}.")
        if not self.rescaling > 0:
            raise SettingsError(f"algorithm.rescaling={self.rescaling} must be positive, for example 0.001.")
        if not 0 <= self.priority_max <= 1:
            raise SettingsError(f"algorithm.priority_max={self.priority_max} must be between 0 and 1.")

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        super().validate_with(setup)
        if isinstance(setup.model, QModelConfig) and setup.model.returns != "expected":
            raise SettingsError(
                f"algorithm=r2d2 rescales expected returns, but model.returns={setup.model.returns}. Use "
                "--model.returns expected."
            )

    def first_errors(
        self, value: np.ndarray, reward: np.ndarray, discount: np.ndarray, next_value: np.ndarray, valid: np.ndarray
    ) -> np.ndarray:
        """Errors of new sequences [n], mixed as those of the loss. NumPy rounds roots equally on every CPU."""
        q_t = _unscale(next_value.astype(np.float64), self.rescaling, np)
        error = np.abs(rescale(reward + discount * q_t, self.rescaling, np) - value) * valid
        total = np.zeros(error.shape[1])
        for each in error:  # in this order
            total += each
        mean = total / np.maximum(valid.sum(0), 1)
        return self.priority_max * error.max(0) + (1 - self.priority_max) * mean

    def build(self) -> R2D2:
        return R2D2(self)


class R2D2(DQN[R2D2Config]):
    """Moves the values of a replayed sequence's actions towards the n-step returns that followed them."""

    def loss(self, model: Networks, batch: Any, hyper: dict[str, float]) -> LossOutput:
        """Huber loss of rescaled values (squared errors if huber_delta is large), summed over the valid steps of
        Sequences."""
        online, target = model
        assert isinstance(online, QModel) and isinstance(target, QModel) and isinstance(batch, Sequences)
        disturb(online, target, batch.noise)
        config, steps = self.config, len(batch.action)
        q, choices = _unroll(online, batch, config.burn_in)
        with torch.no_grad():
            target_q, target_choices = _unroll(target, batch, config.burn_in)
            best = (choices if config.double else target_choices).argmax(-1)
            index = torch.arange(steps, device=best.device).unsqueeze(1) + batch.ahead
            q_t = unscale(of_action(target_q, best).gather(0, index), config.rescaling)
            target_tm1 = rescale(batch.reward + batch.discount * q_t, config.rescaling)
        q_tm1 = of_action(q[:steps], batch.action)
        valid = batch.valid.to(q_tm1.dtype)
        error = huber(q_tm1, target_tm1, config.huber_delta) * valid
        loss = (batch.weight * error.sum(0)).sum()
        with torch.no_grad():
            size = (target_tm1 - q_tm1).abs() * valid
            metrics = {
                "loss/value": loss.detach(),
                "value/mean": (q_tm1 * valid).sum(),
                "value/target": (target_tm1 * valid).sum(),
                "value/error": size.sum(),
            }
        return LossOutput(loss, metrics, mixed_priority(size, batch.valid, config.priority_max))


def rescale(x: Any, epsilon: float, library: Any = torch) -> Any:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + εx (Pohlen et al. 2018, arXiv:1805.11593). It compresses large returns, so
    rewards need not be clipped.

    Args:
        library: torch, or NumPy for arrays.
    """
    # equivalent, without a difference that cancels for small x
    return x / (library.sqrt(abs(x) + 1) + 1) + epsilon * x


def unscale(y: Tensor, epsilon: float) -> Tensor:
    """The inverse of rescale (Pohlen et al. 2018, proposition A.2)."""
    # In float64: the difference of roots cancels for small values, and epsilon makes it worse.
    return _unscale(y.double(), epsilon, torch).to(y.dtype)


def _unscale(y: Any, epsilon: float, library: Any) -> Any:
    root = library.sqrt(1 + 4 * epsilon * (abs(y) + 1 + epsilon))
    return library.sign(y) * (library.square((root - 1) / (2 * epsilon)) - 1)


def _unroll(model: QModel, batch: Sequences, burn_in: int) -> tuple[Tensor, Tensor]:
    """Action values after the burn-in, through which no gradient flows, and the values by which actions are chosen:
    [M+N, n, A] each."""

    def inputs(steps: slice, state: Tensor) -> tuple[Any, ...]:
        action, reward = batch.prev_action, batch.prev_reward
        return (
            map_structure(lambda leaf: leaf[steps], batch.obs),
            batch.start[steps],
            state,
            None if action is None else action[steps],
            None if reward is None else reward[steps],
        )

    state = batch.state
    if burn_in:
        with torch.no_grad():
            _, state = model.features(*inputs(slice(0, burn_in), state))
    learned = inputs(slice(burn_in, None), state)
    numbers, _ = model.describe(*learned)
    return model.expected(numbers), model.choices(numbers, learned[0])
