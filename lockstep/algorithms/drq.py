"""Data-regularized Q-learning (DrQ, Kostrikov et al. 2020, https://arxiv.org/abs/2004.13649): deep Q-learning from
images that are shifted and brightened or darkened at random. Targets are means over several such images.

Shape legend: n items, M copies of observations, K copies of next observations, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.augmentation import NUMBERS, Augmenting, AugmentingConfig, augment
from lockstep.algorithms.base import LossOutput, Setup
from lockstep.algorithms.dqn import distribution_of, disturb
from lockstep.algorithms.losses import huber
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Transitions
from lockstep.models.base import Networks, PolicyModel
from lockstep.models.q import QModel, QModelConfig
from lockstep.models.selection import of_action


@dataclass(frozen=True)
class DrQConfig(AugmentingConfig):
    """Q-learning from augmented images. The defaults are those of DrQ(ε) for Atari 100k (Agarwal et al. 2021)."""

    name = "drq"

    rollout: int = 1
    n_step: int = 10
    double: bool = True
    copies: int = 1
    """M: augmented copies of each item, whose losses are averaged. More make the gradient less noisy and slower."""
    target_copies: int = 1
    """K: augmented copies of each next observation, whose values are averaged for the target. More make targets less
    noisy and slower."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        for setting in ("copies", "target_copies"):
            if getattr(self, setting) < 1:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be at least 1.")

    def validate_with(self, setup: Setup) -> None:
        """Raise SettingsError for settings that do not fit the rest of the experiment."""
        super().validate_with(setup)
        if isinstance(setup.model, QModelConfig) and setup.model.returns != "expected":
            raise SettingsError(
                f"model.returns={setup.model.returns} is a distribution of returns, but algorithm=drq averages "
                "expected ones: use --model.returns expected."
            )

    def build(self) -> DrQ:
        return DrQ(self)


class DrQ(Augmenting[DrQConfig]):
    """Moves the values of augmented copies of a replayed step towards one target, whose value of the next step is a
    mean over augmented copies (equations 1 and 3)."""

    def loss(self, model: Networks, batch: Transitions, hyper: dict[str, float]) -> LossOutput:
        """Huber loss of the expected return, averaged over an item's copies and summed over items."""
        online, target = model
        assert isinstance(online, QModel) and isinstance(target, QModel) and batch.noise is not None
        config, items = self.config, len(batch.weight)
        disturb(online, target, batch.noise)
        draws = batch.noise[2 * online.noise_numbers :].view(-1, items, NUMBERS)
        of_obs, of_next = draws.split([config.copies, config.target_copies])
        obs = augment(batch.obs, of_obs, config.pad, config.intensity)
        next_obs = augment(batch.next_obs, of_next, config.pad, config.intensity)
        q_tm1 = _of_copies(online, obs, config.copies)  # [M, n, A]
        with torch.no_grad():
            q_t = _of_copies(target, next_obs, config.target_copies)  # [K, n, A]
            q_selector = _of_copies(online, next_obs, config.target_copies) if config.compares(online) else q_t
            v_t = of_action(q_t, q_selector.argmax(-1)).mean(0)
            target_tm1 = (batch.reward + batch.discount * v_t).expand(config.copies, items)
        q_tm1 = of_action(q_tm1, batch.action.expand(config.copies, items))
        error = huber(q_tm1, target_tm1, config.huber_delta).mean(0)
        loss = (batch.weight * error).sum()
        with torch.no_grad():
            away = (target_tm1 - q_tm1).mean(0).abs()
            metrics = {
                "loss/value": loss.detach(),
                "value/mean": q_tm1.detach().mean(0).sum(),
                "value/target": target_tm1[0].sum(),
                "value/error": away.sum(),
            }
        return LossOutput(loss, metrics, away)

    def noise_numbers(self, model: PolicyModel, items: int) -> int:
        copies = self.config.copies + self.config.target_copies
        return super().noise_numbers(model, items) + copies * items * NUMBERS


def _of_copies(model: QModel, obs: Any, copies: int) -> Tensor:
    """[1, copies * n, ...] -> the values by which actions are chosen, [copies, n, A]"""
    q = model.choices(distribution_of(model, obs), obs)
    return q.view(copies, -1, q.shape[-1])
