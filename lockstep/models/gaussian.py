"""Normal distributions of continuous actions, squashed or not.

Shape legend: P parameters, N noise numbers, D dimensions.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lockstep.config.settings import SettingsError
from lockstep.models.distributions import TINY, Distribution, SentBox
from lockstep.portable.numbers import ndtri, tanh

LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds of the log standard deviation (Haarnoja et al. 2018)."""
_REACH = 3.0
"""Actions within this many deviations of the mean are drawn often enough for learning."""
_OUT_OF_PROPORTION = 10.0
"""Bounds that are this many times as wide or as narrow as the initial deviation cause a warning."""


def bounded(space: spaces.Box) -> bool:
    """Whether the space has bounds that actions can be scaled to. float32's largest numbers, which often mean "none",
    do not count."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(space.high - space.low).all())


def numbers_in(space: spaces.Box | spaces.MultiDiscrete) -> int:
    """D: how many numbers an action has.

    Raises:
        SettingsError: there are none.
    """
    size = math.prod(space.shape)
    if not size:
        raise SettingsError(
            f"The action space {space} has no number, so there is nothing to choose. If actions do not matter, let the "
            "environment take one and ignore it, as in Box(-1, 1, (1,)) or Discrete(1)."
        )
    return size


class Gaussian(Distribution):
    """A diagonal normal distribution; parameters are D means and D log standard deviations.

    The stored action u is the unbounded sample. The environment receives u clipped to its bounds. With squash it
    receives low + (tanh(u) + 1) / 2 * (high - low), and log_prob and entropy are those of this squashed action
    (Haarnoja et al. 2018, appendix C).
    """

    description = (
        "A diagonal normal distribution. The parameters are D means and D log standard deviations. The action is "
        "clipped to the bounds of its space or, if model.squash is on, its tanh is scaled to them."
    )
    action_dtype = torch.float32

    def __init__(self, space: spaces.Box, squash: bool = False):
        self.size = numbers_in(space)
        self.space, self.squash = space, squash
        self.action_shape = (self.size,)
        self.num_params, self.noise_size, self.encoded_size = 2 * self.size, self.size, self.size
        self.log_std_columns = tuple(range(self.size, 2 * self.size))
        self._sent = SentBox(space)
        if squash and not bounded(space):
            raise SettingsError(
                f"squash is on, but the action space {space} has no bounds to squash actions to. "
                "Switch it off (--model.no-squash), or bound the space (gymnasium.wrappers.RescaleAction)."
            )
        if squash and (space.high == space.low).any():
            raise SettingsError(
                f"squash is on, but a dimension of the action space {space} has only one value. Switch squash off "
                "(--model.no-squash), or leave that dimension out."
            )
        scale = (space.high.astype(np.float64) - space.low).reshape(-1) / 2 if squash else np.ones(self.size)
        self.log_scale = float(np.log(scale).sum())

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self._split(params)
        return mean + log_std.exp() * standard_normal(noise)

    def mode(self, params: Tensor) -> Tensor:
        return self._split(params)[0]

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self._split(params)
        z = (action - mean) * torch.exp(-log_std)
        log_prob = (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        return log_prob - log_slope(action).sum(-1) - self.log_scale if self.squash else log_prob

    def entropy(self, params: Tensor) -> Tensor:
        """Exact for the normal distribution; a squashed one adds the expected log slope."""
        mean, log_std = self._split(params)
        entropy = (log_std + 0.5 + 0.5 * math.log(2 * math.pi)).sum(-1)
        if not self.squash:
            return entropy
        return entropy + expected_log_slope(mean, log_std).sum(-1) + self.log_scale

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        """The divergence of the normal distributions, which does not change if both are squashed."""
        return normal_kl(*self._split(params), *self._split(other))

    def check_start(self, std: float) -> None:
        low, high = self.space.low, self.space.high
        far = (low > _REACH * std) | (high < -_REACH * std)
        if not self.squash and (far & (low < high)).any():
            remedy = (
                "Squash them (--model.squash), or rescale them (gymnasium.wrappers.RescaleAction)."
                if bounded(self.space)
                else "Shift them in a wrapper (gymnasium.wrappers.TransformAction)."
            )
            raise SettingsError(
                f"A policy begins around 0 with a deviation of {std:g}, from where it cannot reach the actions of "
                f"{self.space}: nearly all would be clipped to one bound, and nothing learned. {remedy}"
            )

    def warning_at_start(self, std: float) -> str:
        with np.errstate(over="ignore"):
            half = ((self.space.high - self.space.low) / 2).reshape(-1)
        half = half[np.isfinite(half) & (half > 0)]
        if self.squash or not half.size:
            return ""
        wide, narrow = half.max() / std, std / half.min()
        if max(wide, narrow) <= _OUT_OF_PROPORTION:
            return ""
        reach = (
            f"{wide:,.0f} times as wide, so the policy hardly leaves their middle"
            if wide > _OUT_OF_PROPORTION
            else f"{narrow:,.0f} times as narrow, so nearly all actions are clipped to a bound"
        )
        return (
            f"The policy starts with actions around 0, with a deviation of {std:g} (--model.initial-std). The bounds "
            f"of {self.space} are {reach}. Scale actions to their bounds with --model.squash or "
            "gymnasium.wrappers.RescaleAction. If the space has no real bounds, make them infinite."
        )

    def to_env(self, action: np.ndarray) -> Any:
        low, high = self.space.low.reshape(-1), self.space.high.reshape(-1)
        if self.squash:
            action = low + (tanh(action) + 1) / 2 * (high - low)
        return np.clip(action, low, high).astype(self.space.dtype).reshape(-1, *self.space.shape)

    def to_env_tensor(self, action: Tensor) -> Tensor:
        return self._sent.fitted(self._sent.scaled(torch.tanh(action)) if self.squash else action)

    def encode(self, action: Tensor) -> Tensor:
        return torch.tanh(action) if self.squash else action

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        return params

    def at_random(self, noise: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Uniform between the bounds; standard normal without bounds."""
        if not bounded(self.space):
            return super().at_random(noise, allowed)
        if self.squash:
            return torch.atanh(2 * noise.clamp(TINY, 1 - TINY) - 1)
        low, high = (torch.from_numpy(end.reshape(-1).astype(np.float32)) for end in (self.space.low, self.space.high))
        return low + noise * (high - low)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = params.split(self.size, -1)
        return mean, bounded_log_std(log_std)


def check_initial_std(std: float) -> None:
    """Raise SettingsError for an initial deviation that is out of range."""
    if not 0.01 <= std <= 5:
        raise SettingsError(f"model.initial_std={std} must be between 0.01 and 5, for example 0.6.")


def bounded_log_std(log_std: Tensor) -> Tensor:
    """Log deviations clamped to their bounds.

    clamp has no gradient outside the bounds, so a value that crosses a bound would never return. Here, gradients that
    lead back are kept, and only those that lead further out become 0. This matters most for free deviations, which are
    parameters with no other gradients.
    """
    return _Bounded.apply(log_std) if torch.is_grad_enabled() else log_std.clamp(*LOG_STD_RANGE)  # type: ignore[no-any-return]


class _Bounded(torch.autograd.Function):
    """clamp with the gradients that bounded_log_std describes. Within the bounds, it equals clamp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(*LOG_STD_RANGE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        (x,), (gradient,) = ctx.saved_tensors, gradients
        low, high = LOG_STD_RANGE
        # A gradient step subtracts the gradient, so a positive one lowers x.
        return gradient.masked_fill(((x > high) & (gradient < 0)) | ((x < low) & (gradient > 0)), 0.0)


def normal_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """KL divergence of diagonal normal distributions in nats: [..., D] each -> [...]"""
    ratio = (2 * (log_std - other_log_std)).exp()
    distance = ((mean - other_mean) * (-other_log_std).exp()).square()
    return (0.5 * (ratio + distance - 1) + other_log_std - log_std).sum(-1)


def standard_normal(noise: Tensor) -> Tensor:
    """Uniform numbers in (0, 1) -> standard normal numbers, by the inverse distribution function."""
    return ndtri(noise.clamp(TINY, 1 - TINY))


def expected_log_slope(mean: Tensor, log_std: Tensor) -> Tensor:
    """Mean of the log slope of tanh under normal distributions: [..., D] each -> [..., D].

    It uses the trapezoidal rule, which handles the slope's bend near 0 even for wide distributions, where Gaussian
    quadrature fails. It is accurate to 0.001 for deviations up to 7.4, the largest one.
    """
    nodes, weights = _trapezoids(mean.device, mean.dtype)
    u = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * nodes
    return (log_slope(u) * weights).sum(-1)


@functools.cache
def _trapezoids(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The nodes and weights of the trapezoidal rule. They are made once, since copying numbers to a GPU waits for
    it."""
    nodes = np.linspace(-5, 5, 48)
    weights = np.exp(-(nodes**2) / 2)
    with torch.inference_mode(False):
        return tuple(torch.tensor(x, dtype=dtype, device=device) for x in (nodes, weights / weights.sum()))  # type: ignore[return-value]


def log_slope(u: Tensor) -> Tensor:
    """log d tanh(u) / du = log(1 - tanh(u)^2), computed without cancellation."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))
