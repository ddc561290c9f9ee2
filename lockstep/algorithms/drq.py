"""Data-regularized Q-learning (DrQ, Kostrikov et al. 2020, https://arxiv.org/abs/2004.13649): deep Q-learning from
images that are shifted and brightened or darkened at random. Targets are means over several such images.

Shape legend: n items, M copies of observations, K copies of next observations, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from torch import Tensor

from lockstep.algorithms.base import LossOutput, Setup
from lockstep.algorithms.dqn import DQN, DQNConfig, distribution_of, disturb
from lockstep.algorithms.losses import huber
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.core.transitions import Transitions
from lockstep.models.base import Networks, PolicyModel
from lockstep.models.gaussian import standard_normal
from lockstep.models.observations import ObservationLayout
from lockstep.models.q import QModel, QModelConfig
from lockstep.models.selection import of_action

_NUMBERS = 3
"""Uniform numbers for one copy of an item: for the shift of rows, the shift of columns and the brightness."""
_STRONGEST = 2.0
"""The number of standard deviations at which changes of brightness are clipped."""


@dataclass(frozen=True)
class DrQConfig(DQNConfig):
    """Q-learning from augmented images. The defaults are those of DrQ(ε) for Atari 100k (Agarwal et al. 2021)."""

    name = "drq"

    rollout: int = 1
    n_step: int = 10
    double: bool = True
    pad: int = 4
    """The most pixels by which an image is shifted in each direction; copies of border pixels fill the gap. Higher
    varies images more and hides more of their border; 0 switches shifts off."""
    intensity: float = 0.05
    """Standard deviation of the factor by which an image becomes brighter or darker. Higher varies images more; 0
    switches it off."""
    copies: int = 1
    """M: augmented copies of each item, whose losses are averaged. More make the gradient less noisy and slower."""
    target_copies: int = 1
    """K: augmented copies of each next observation, whose values are averaged for the target. More make targets less
    noisy and slower."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        for setting, least in (("pad", 0), ("intensity", 0), ("copies", 1), ("target_copies", 1)):
            if not getattr(self, setting) >= least:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be at least {least}.")

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


class DrQ(DQN[DrQConfig]):
    """Moves the values of augmented copies of a replayed step towards one target, whose value of the next step is a
    mean over augmented copies (equations 1 and 3)."""

    def check(self, observation_space: gymnasium.Space[Any]) -> None:
        """Raise SettingsError for an environment without images."""
        if not ObservationLayout.of(observation_space).images:
            raise SettingsError(
                "algorithm=drq augments images, which are uint8 [C, H, W], but the observations contain none: "
                f"{observation_space}. Use an environment with images, or DQNConfig, which augments nothing."
            )

    def loss(self, model: Networks, batch: Transitions, hyper: dict[str, float]) -> LossOutput:
        """Huber loss of the expected return, averaged over an item's copies and summed over items."""
        online, target = model
        assert isinstance(online, QModel) and isinstance(target, QModel) and batch.noise is not None
        config, items = self.config, len(batch.weight)
        disturb(online, target, batch.noise)
        draws = batch.noise[2 * online.noise_numbers :].view(-1, items, _NUMBERS)
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
        return super().noise_numbers(model, items) + copies * items * _NUMBERS


def augment(obs: Any, draws: Tensor, pad: int, intensity: float) -> Any:
    """Copies of images, each shifted and brightened or darkened at random; other observations are repeated.

    All images and frames of an item change alike. An image is padded by repeating its border and cropped to its size at
    a random place (Kostrikov et al. 2020, section 3). Then it is multiplied by 1 + intensity times a normal number that
    is clipped to two deviations (Schwarzer et al. 2020, arXiv:2007.05929, appendix), rounded, and clipped to [0, 255].

    Args:
        obs: [1, n, ...]; images are uint8 [1, n, C, H, W].
        draws: [copies, n, 3], uniform in (0, 1).

    Returns:
        [1, copies * n, ...]
    """
    numbers = draws.flatten(0, 1)

    def changed(leaf: Tensor) -> Tensor:
        copied = leaf[0].repeat(len(draws), *[1] * (leaf.ndim - 2))
        if leaf.dtype == torch.uint8 and leaf.ndim == 5:
            copied = brightened(shifted(copied, numbers[:, :2], pad), numbers[:, 2], intensity)
        return copied.unsqueeze(0)

    return map_structure(changed, obs)


def shifted(images: Tensor, draws: Tensor, pad: int) -> Tensor:
    """uint8 [N, C, H, W], uniform numbers [N, 2] -> [N, C, H, W], moved by up to pad pixels."""
    if not pad:
        return images
    height, width = images.shape[-2:]
    by = (draws * (2 * pad + 1)).long().clamp(max=2 * pad) - pad
    row = (torch.arange(height, device=by.device) + by[:, :1]).clamp(0, height - 1)
    column = (torch.arange(width, device=by.device) + by[:, 1:]).clamp(0, width - 1)
    place = (row.unsqueeze(2) * width + column.unsqueeze(1)).flatten(1).unsqueeze(1)
    return images.flatten(2).gather(2, place.expand(-1, images.shape[1], -1)).view_as(images)


def brightened(images: Tensor, draws: Tensor, intensity: float) -> Tensor:
    """uint8 [N, C, H, W], uniform numbers [N] -> [N, C, H, W], each image multiplied by its factor."""
    if not intensity:
        return images
    factor = 1 + intensity * standard_normal(draws).clamp(-_STRONGEST, _STRONGEST)
    return (images * factor.view(-1, 1, 1, 1)).round().clamp(0, 255).to(torch.uint8)


def _of_copies(model: QModel, obs: Any, copies: int) -> Tensor:
    """[1, copies * n, ...] -> the values by which actions are chosen, [copies, n, A]"""
    q = model.choices(distribution_of(model, obs), obs)
    return q.view(copies, -1, q.shape[-1])
