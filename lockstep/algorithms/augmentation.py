"""Q-learning from images that are shifted and brightened or darkened at random, which DrQ and SPR share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import gymnasium
import torch
from torch import Tensor

from lockstep.algorithms.dqn import DQN, DQNConfig
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.models.gaussian import standard_normal
from lockstep.models.observations import ObservationLayout

NUMBERS = 3
"""Uniform numbers for one copy of an item: for the shift of rows, the shift of columns and the brightness."""
_STRONGEST = 2.0
"""The number of standard deviations at which changes of brightness are clipped."""
_AT_ONCE = 8
"""Images that a CPU brightens at once. Their fractions stay in its cache, which takes a quarter of the time."""


@dataclass(frozen=True)
class AugmentingConfig(DQNConfig):
    """Settings of augmentation. The defaults are those of Agarwal et al. 2021 and Schwarzer et al. 2021."""

    pad: int = 4
    """The most pixels by which an image is shifted in each direction; copies of border pixels fill the gap. Higher
    varies images more and hides more of their border; 0 switches shifts off."""
    intensity: float = 0.05
    """Standard deviation of the factor by which an image becomes brighter or darker. Higher varies images more; 0
    switches it off."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        """Raise SettingsError for values out of range."""
        super().validate(envs_per_shard, recurrent=recurrent)
        for setting in ("pad", "intensity"):
            if not getattr(self, setting) >= 0:
                raise SettingsError(f"algorithm.{setting}={getattr(self, setting)} must be at least 0.")


AugmentingConfigT = TypeVar("AugmentingConfigT", bound=AugmentingConfig)


class Augmenting(DQN[AugmentingConfigT]):
    """Q-learning that needs images."""

    def check(self, observation_space: gymnasium.Space[Any]) -> None:
        """Raise SettingsError for an environment without images."""
        name = self.config.name
        if not ObservationLayout.of(observation_space).images:
            raise SettingsError(
                f"algorithm={name} augments images, which are uint8 [C, H, W], but the observations contain none: "
                f"{observation_space}. Use an environment with images, or DQNConfig, which augments nothing."
            )


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
    size = _AT_ONCE if images.device.type == "cpu" else len(images)
    pieces = zip(images.split(size), factor.view(-1, 1, 1, 1).split(size), strict=True)
    return torch.cat([(piece * by).round_().clamp_(0, 255).to(torch.uint8) for piece, by in pieces])
