"""Distributions of continuous actions for algorithms that learn from replay.

Their actions are scaled: -1 and 1 are the bounds of the environment's action space. So networks, noise and entropy have
the same units in every task.

Shape legend: P distribution parameters, D dimensions of an action, X numbers that control exploration.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.config.settings import SettingsError
from lockstep.models.distributions import Distribution, SentBox
from lockstep.models.gaussian import LOG_STD_RANGE, bounded, expected_log_slope, log_slope, numbers_in, standard_normal
from lockstep.portable.numbers import tensor_exp, tensor_tanh

_LOG_TWO_PI = math.log(2 * math.pi)


class Scaled(Distribution):
    """The base class of these distributions.

    Args:
        space: the environment's action space. It must be bounded.
    """

    action_dtype = torch.float32

    def __init__(self, space: spaces.Box):
        if not (np.issubdtype(space.dtype, np.floating) and bounded(space)):
            raise SettingsError(
                f"The action space {space} has no bounds to scale actions to, or is not real-valued. Bound it "
                "(gymnasium.wrappers.RescaleAction), or use PPO, whose actions need no bounds."
            )
        self.space, self.size = space, numbers_in(space)
        self.action_shape = (self.size,)
        self.noise_size = self.encoded_size = self.size
        self._sent = SentBox(space)

    def bound(self, outputs: Tensor) -> Tensor:
        """A network's outputs [..., P] -> parameters of the distribution."""
        return outputs

    def explore(self, params: Tensor, noise: Tensor, numbers: Tensor) -> Tensor:
        """A sample: the policy itself explores."""
        return self.sample(params, noise)

    def uniform(self, params: Tensor, noise: Tensor) -> Tensor:
        """A uniform action: noise [..., D] -> [..., D]"""
        return 2 * noise - 1

    def to_env(self, action: np.ndarray) -> Any:
        low, high = self.space.low.reshape(-1), self.space.high.reshape(-1)
        scaled = low + (np.clip(action, -1.0, 1.0) + 1) / 2 * (high - low)
        return np.clip(scaled, low, high).astype(self.space.dtype).reshape(-1, *self.space.shape)

    def from_env(self, action: np.ndarray) -> Tensor:
        """A batch of the action space -> stored actions [B, D]"""
        low, high = (bound.reshape(-1).astype(np.float64) for bound in (self.space.low, self.space.high))
        scaled = (action.reshape(len(action), -1) - low) / np.where(high > low, high - low, 1.0) * 2 - 1
        return torch.from_numpy(scaled.astype(np.float32))

    def to_env_tensor(self, action: Tensor) -> Tensor:
        return self._sent.fitted(self._sent.scaled(action.clamp(-1.0, 1.0)))

    def encode(self, action: Tensor) -> Tensor:
        """The action as the environment executes it, for critics."""
        return action.clamp(-1.0, 1.0)

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        return params


class Deterministic(Scaled):
    """One action, which is the parameters themselves. Exploration adds normal noise and clips the action to the
    bounds."""

    description = "A single action. The parameters are its D numbers, of which −1 and 1 are scaled to the bounds."
    exact = True
    knows_chances = False
    acting = "deterministic"

    def __init__(self, space: spaces.Box):
        super().__init__(space)
        self.num_params = self.size

    def bound(self, outputs: Tensor) -> Tensor:
        return torch.tanh(outputs)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        return params

    def explore(self, params: Tensor, noise: Tensor, numbers: Tensor) -> Tensor:
        """numbers [..., 1]: the noise's standard deviation"""
        return (params + numbers * standard_normal(noise)).clamp(-1.0, 1.0)

    def mode(self, params: Tensor) -> Tensor:
        return params

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """0, since there is no density. Algorithms with this distribution need none."""
        return torch.zeros(params.shape[:-1], device=params.device)

    def entropy(self, params: Tensor) -> Tensor:
        return torch.zeros(params.shape[:-1], device=params.device)


class DiagonalGaussian(Scaled):
    """A diagonal normal distribution whose means lie within the bounds; parameters are D means and D log deviations.
    Actions are clipped only when they are used, so their density stays that of the normal distribution (MPO).

    Log deviations are clamped, as in the SAC of Spinning Up and Stable-Baselines3. In states where the network exceeds
    the range, it gets no gradient, but other states still move its weights.

    Args:
        std: the deviation for a network output of 0, which is close to the outputs before learning.
    """

    description = (
        "A diagonal normal distribution. The parameters are D means and D log standard deviations. The action is "
        "clipped to −1 and 1, which are scaled to the bounds."
    )
    exact = True

    def __init__(self, space: spaces.Box, std: float = 1.0):
        super().__init__(space)
        self.num_params = 2 * self.size
        self.log_std = math.log(std)

    def bound(self, outputs: Tensor) -> Tensor:
        mean, log_std = outputs.split(self.size, -1)
        return torch.cat([tensor_tanh(mean), (log_std + self.log_std).clamp(*LOG_STD_RANGE)], -1)

    def split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log deviations, [..., D] each."""
        mean, log_std = params.split(self.size, -1)
        return mean, log_std

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self.split(params)
        return mean + tensor_exp(log_std) * standard_normal(noise)

    def mode(self, params: Tensor) -> Tensor:
        return self.split(params)[0]

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        return normal_log_prob(*self.split(params), action)

    def entropy(self, params: Tensor) -> Tensor:
        return (self.split(params)[1] + 0.5 * (1 + _LOG_TWO_PI)).sum(-1)


class SquashedGaussian(DiagonalGaussian):
    """tanh of a diagonal normal distribution (Haarnoja et al. 2018, appendix C)."""

    description = (
        "tanh of a diagonal normal distribution. The parameters are its D means and D log standard deviations. −1 and "
        "1 are scaled to the bounds."
    )

    def bound(self, outputs: Tensor) -> Tensor:
        mean, log_std = outputs.split(self.size, -1)
        return torch.cat([mean, log_std.clamp(*LOG_STD_RANGE)], -1)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        return tensor_tanh(super().sample(params, noise))

    def sample_with_log_prob(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """[..., P], [..., D] -> actions [..., D] and log-probabilities [...], both differentiable."""
        return _SquashedSample.apply(*self.split(params), standard_normal(noise))  # type: ignore[no-any-return]

    def mode(self, params: Tensor) -> Tensor:
        return tensor_tanh(super().mode(params))

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        u = torch.atanh(action.clamp(-1 + 1e-6, 1 - 1e-6))
        return super().log_prob(params, u) - log_slope(u).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """The entropy of the normal distribution plus the expected log slope of tanh."""
        return super().entropy(params) + expected_log_slope(*self.split(params)).sum(-1)


class _SquashedSample(torch.autograd.Function):
    """a = tanh(u) of u = μ + σ ε, and its log-probability: [..., D] each -> [..., D], [...]. The handwritten backward
    pass needs a third of the operations: the derivative of tanh's log slope with respect to u is -2 a."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        scaled = log_std.exp() * normal
        u = mean + scaled
        action = torch.tanh(u)
        ctx.save_for_backward(action, scaled)
        return action, (-0.5 * (normal.square() + _LOG_TWO_PI) - log_std - log_slope(u)).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (action, scaled), of_log_prob = ctx.saved_tensors, gradients[1].unsqueeze(-1)
        of_mean = torch.addcmul(gradients[0] * (1 - action.square()), action, of_log_prob, value=2)
        return of_mean, of_mean * scaled - of_log_prob, None


def normal_log_prob(mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
    """Log-density of a diagonal normal distribution: [..., D] each -> [...]"""
    return (-0.5 * (((x - mean) * torch.exp(-log_std)).square() + _LOG_TWO_PI) - log_std).sum(-1)
