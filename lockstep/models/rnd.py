"""The networks of random network distillation, which learn in addition to the policy, and their settings.

Shape legend: T time, B environments, D numbers of an observation, F features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import gymnasium
import torch
from torch import Tensor, nn

from lockstep.config.needs import Need, OfWeights
from lockstep.config.settings import SettingsError
from lockstep.models.layers import initialize_orthogonal, reproducible_initialization
from lockstep.models.observations import ObservationLayout, entry, flatten_entry

_CLIP = 5.0
"""Bound on normalized observations (Burda et al. 2018, section 2.4)."""
_CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel size and stride (Burda et al. 2018, appendix A.4)."""
_SMALLEST = 36
"""The smallest side of an image that the convolutions accept; smaller images are flattened."""


@dataclass(frozen=True)
class RNDConfig:
    """Intrinsic rewards by random network distillation. The defaults are those of the paper for hard Atari games."""

    coef: float = 0.0
    """Weight of intrinsic advantages relative to those of the task's reward; 0 switches distillation off. Higher
    explores more and attends less to the task. The paper's weights 1 and 2 correspond to 0.5."""
    discount: float = 0.99
    """γ of intrinsic returns, which continue across the ends of episodes. Higher looks further ahead for novelty."""
    gae_lambda: float = 0.95
    """λ of intrinsic advantages. Higher has less bias, lower has less variance."""
    value_coef: float = 0.5
    """Weight of the intrinsic value's loss. Higher learns these values sooner."""
    share: float = 0.25
    """Share of the samples from which the predictor learns. Higher lets novelty fade sooner."""
    features: int = 512
    """Outputs of the random network, which the predictor predicts. More distinguish observations better and cost
    time."""

    needs: ClassVar[tuple[Need, ...]] = (
        Need(("discount", "gae_lambda", "value_coef", "share", "features"), ("algorithm.rnd.coef",), words="above 0"),
    )
    of_weights: ClassVar[OfWeights] = (("coef", bool), ("features", int))

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        for setting in ("coef", "value_coef"):
            if not getattr(self, setting) >= 0:
                raise SettingsError(f"algorithm.rnd.{setting}={getattr(self, setting)} must be at least 0.")
        for setting in ("discount", "gae_lambda"):
            if not 0 <= getattr(self, setting) <= 1:
                raise SettingsError(f"algorithm.rnd.{setting}={getattr(self, setting)} must be between 0 and 1.")
        if not 0 < self.share <= 1:
            raise SettingsError(f"algorithm.rnd.share={self.share} must be above 0 and at most 1.")
        if self.features < 1:
            raise SettingsError(f"algorithm.rnd.features={self.features} must be at least 1.")


class Curiosity(nn.Module):
    """A fixed random network, a network that learns to predict it, and a value of intrinsic returns.

    All three see the whole normalized observation and compute in fp32.

    Args:
        space: the observation space.
        features: F.
        seed: the seed of the initial weights.
    """

    def __init__(self, space: gymnasium.Space[Any], features: int, seed: int) -> None:
        super().__init__()
        self.layout = ObservationLayout.of(space)
        self.size = self.layout.vector_size + sum(math.prod(shape) for _, shape in self.layout.images)
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.zeros(self.size), persistent=False)
        self.register_buffer("std", torch.ones(self.size), persistent=False)
        with reproducible_initialization(seed):
            self.random = _Network(self.layout, features).requires_grad_(False)
            self.predictor = _Network(self.layout, features, hidden=2)
            self.critic = _Network(self.layout, 1, hidden=1, width=features)

    def vector(self, obs: Any) -> Tensor:
        """All numbers of observations [T, B, ...], images first: fp32 [T, B, D]"""
        images = [flatten_entry(entry(obs, key)).float() for key, _ in self.layout.images]
        return torch.cat([*images, self.layout.vector(obs)], -1)

    def normalize_with(self, mean: Tensor, std: Tensor) -> None:
        """Set the statistics (fp32 [D]) that normalize observations."""
        self.mean.copy_(mean)
        self.std.copy_(std)

    def forward(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Observations [T, B, ...] -> their prediction errors and intrinsic values, fp32 [T, B] each.

        The error is the mean of squared errors over features.
        """
        x = ((self.vector(obs) - self.mean) / self.std).clamp(-_CLIP, _CLIP)
        with torch.no_grad():
            wanted = self.random(x)
        return (self.predictor(x) - wanted).square().mean(-1), self.critic(x).squeeze(-1)


class _Network(nn.Module):
    """Normalized observations [T, B, D] -> [T, B, out]: convolutions for large images, then dense layers."""

    def __init__(self, layout: ObservationLayout, out: int, *, hidden: int = 0, width: int = 0) -> None:
        super().__init__()
        width = width or out
        self._shapes = [shape for _, shape in layout.images]
        self.images = nn.ModuleList()
        size = layout.vector_size
        for shape in self._shapes:
            convolutions, pixels = _convolutions(shape)
            self.images.append(convolutions)
            size += pixels
        sizes = [size, *[width] * (hidden + 1)]
        layers: list[nn.Module] = []
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.dense = nn.Sequential(*layers, nn.Linear(width, out))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                initialize_orthogonal(module, math.sqrt(2))

    def forward(self, x: Tensor) -> Tensor:
        sizes = [math.prod(shape) for shape in self._shapes]
        *images, vector = x.split([*sizes, x.shape[-1] - sum(sizes)], -1)
        parts = [vector]
        for image, shape, convolutions in zip(images, self._shapes, self.images, strict=True):
            parts.append(convolutions(image.reshape(-1, *shape)).view(*x.shape[:2], -1))
        return self.dense(torch.cat(parts, -1))


def _convolutions(shape: tuple[int, int, int]) -> tuple[nn.Module, int]:
    """Layers for images [N, C, H, W], and the size of their output for one image."""
    channels, height, width = shape
    if min(height, width) < _SMALLEST:
        return nn.Flatten(), math.prod(shape)
    layers: list[nn.Module] = []
    for out, kernel, stride in _CONVOLUTIONS:
        layers += [nn.Conv2d(channels, out, kernel, stride), nn.LeakyReLU()]
        channels, height, width = out, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return nn.Sequential(*layers, nn.Flatten()), channels * height * width
