"""Action distributions as pure functions of their parameters, sampled with given noise.

Shape legend: P parameters, N noise numbers, D dimensions, K numbers of an action, E numbers of an encoded action.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lockstep.config.settings import SettingsError
from lockstep.models.selection import of_action
from lockstep.portable.numbers import tanh

_FORBIDDEN = -1e9
"""Logit of a masked action: its probability is exactly zero in fp32, and its log-probability is finite."""
LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds of the log standard deviation (Haarnoja et al. 2018)."""
_REACH = 3.0
"""Actions within this many deviations of the mean are drawn often enough to learn from."""
_OUT_OF_PROPORTION = 10.0
"""Bounds that are this many times as wide, or as narrow, as the first deviation cause a warning."""
_TINY = 1e-7
"""Noise is kept this far from 0 and 1, where inverse distribution functions are infinite."""


class Distribution(ABC):
    """What the standard model needs from a distribution, beyond lockstep.models.base.ActionDistribution."""

    acting: ClassVar[str] = "sampled"
    """How sample chooses actions, in a word or two."""
    exact: ClassVar[bool] = False
    """Whether choosing actions only takes operations that have the same bits on every CPU."""
    num_params: int
    noise_size: int
    action_shape: tuple[int, ...]
    action_dtype: torch.dtype
    num_logits: int = 0
    """Number of parameters, from the first, that have an entry in an action mask."""
    encoded_size: int
    """E: length of a previous action's encoding for the model."""
    log_std_columns: tuple[int, ...] = ()
    """The parameters that are log standard deviations."""

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """[..., P], uniform noise in (0, 1) [..., N] -> action [..., *action_shape]"""

    def at_random(self, noise: Tensor, allowed: Tensor | None = None) -> Tensor:
        """A random action without any knowledge: uniform noise in (0, 1) [B, N] -> action [B, *action_shape].

        Args:
            allowed: bool [B, num_logits]: an action mask, if any.
        """
        params = torch.zeros(len(noise), self.num_params)
        return self.sample(params if allowed is None else self.mask(params, allowed), noise)

    @abstractmethod
    def mode(self, params: Tensor) -> Tensor:
        """[..., P] -> the most likely action [..., *action_shape]"""

    @abstractmethod
    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """[..., P], [..., *action_shape] -> [...]"""

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """[..., P] -> [...]"""

    @abstractmethod
    def to_env(self, action: np.ndarray) -> Any:
        """Stored actions [B, *action_shape] -> a batch of the action space."""

    @abstractmethod
    def encode(self, action: Tensor) -> Tensor:
        """[..., *action_shape] -> fp32 [..., E], an input of the model."""

    def check_start(self, std: float) -> None:  # noqa: B027 - most begin anywhere
        """Raise SettingsError if nothing can be learned from initial actions around 0 with this deviation."""

    def warning_at_start(self, std: float) -> str:
        """Why learning from initial actions around 0 with this deviation is slow; "" if it is not."""
        return ""

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        """Forbid the actions whose entry in allowed, bool [..., num_logits], is False."""
        assert self.num_logits == self.num_params
        return params.masked_fill(~allowed, _FORBIDDEN)


class Categorical(Distribution):
    """One of n actions, by n logits. Actions are int64 scalars."""

    action_shape = ()
    action_dtype = torch.int64

    def __init__(self, space: spaces.Discrete):
        self.n, self.start = int(space.n), int(space.start)
        self.num_params = self.num_logits = self.noise_size = self.encoded_size = self.n

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """The Gumbel-max trick (Maddison et al. 2014)."""
        return (params - torch.log(-torch.log(noise.clamp(_TINY, 1 - _TINY)))).argmax(-1)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        return of_action(F.log_softmax(params, -1), action)

    def explore(self, params: Tensor, noise: Tensor, numbers: Tensor) -> Tensor:
        """A sample: the policy itself explores."""
        return self.sample(params, noise)

    def uniform(self, noise: Tensor) -> Tensor:
        """Any action: noise [..., N] -> [...]"""
        return noise.argmax(-1)

    def entropy(self, params: Tensor) -> Tensor:
        log_p = F.log_softmax(params, -1)
        return -(log_p.exp() * log_p).sum(-1)

    def to_env(self, action: np.ndarray) -> Any:
        return action + self.start if self.start else action

    def encode(self, action: Tensor) -> Tensor:
        return F.one_hot(action.long(), self.n).float()


class EpsilonGreedy(Distribution):
    """The action with the highest value; when exploring, any action with probability ε. Parameters are action values.

    Outside training, sample takes a random action with probability 0.001 (Hessel et al. 2018, table 1), so that every
    episode ends.
    """

    exact = True
    action_shape = ()
    action_dtype = torch.int64
    noise_size = 2
    EVALUATION_EPSILON = 0.001
    acting = f"ε-greedy (ε {EVALUATION_EPSILON})"

    def __init__(self, space: spaces.Discrete):
        self.n, self.start = int(space.n), int(space.start)
        self.num_params = self.encoded_size = self.n

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """See the class."""
        return self.explore(params, noise, torch.full_like(params[..., :1], self.EVALUATION_EPSILON))

    def explore(self, params: Tensor, noise: Tensor, numbers: Tensor) -> Tensor:
        """numbers [..., 1]: ε"""
        return torch.where(noise[..., 0] < numbers[..., 0], self.uniform(noise), params.argmax(-1))

    def uniform(self, noise: Tensor) -> Tensor:
        """Any action: noise [..., N] -> [...]"""
        return (noise[..., 1] * self.n).long().clamp(max=self.n - 1)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """0: ε is not among the parameters, so the probability is not known. It is not needed."""
        return torch.zeros(params.shape[:-1], device=params.device)

    def entropy(self, params: Tensor) -> Tensor:
        return torch.zeros(params.shape[:-1], device=params.device)

    def to_env(self, action: np.ndarray) -> Any:
        return action + self.start if self.start else action

    def encode(self, action: Tensor) -> Tensor:
        return F.one_hot(action.long(), self.n).float()


def bounded(space: spaces.Box) -> bool:
    """Whether the space has bounds that actions can be scaled to. float32's largest numbers, which often mean "none",
    do not count."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(space.high - space.low).all())


class Gaussian(Distribution):
    """A diagonal normal distribution; parameters are D means and D log standard deviations.

    The stored action u is the unbounded sample. The environment receives u clipped to its bounds. With squash it
    receives low + (tanh(u) + 1) / 2 * (high - low), and log_prob and entropy are those of this squashed action
    (Haarnoja et al. 2018, appendix C).
    """

    action_dtype = torch.float32

    def __init__(self, space: spaces.Box, squash: bool = False):
        self.size = int(np.prod(space.shape))
        self.space, self.squash = space, squash
        self.action_shape = (self.size,)
        self.num_params, self.noise_size, self.encoded_size = 2 * self.size, self.size, self.size
        self.log_std_columns = tuple(range(self.size, 2 * self.size))
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
        return log_prob - _log_slope(action).sum(-1) - self.log_scale if self.squash else log_prob

    def entropy(self, params: Tensor) -> Tensor:
        """Exact for the normal distribution; a squashed one adds the expected log slope."""
        mean, log_std = self._split(params)
        entropy = (log_std + 0.5 + 0.5 * math.log(2 * math.pi)).sum(-1)
        if not self.squash:
            return entropy
        return entropy + expected_log_slope(mean, log_std).sum(-1) + self.log_scale

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

    def encode(self, action: Tensor) -> Tensor:
        return torch.tanh(action) if self.squash else action

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        return params

    def at_random(self, noise: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Uniform between the bounds; standard normal without bounds."""
        if not bounded(self.space):
            return super().at_random(noise, allowed)
        if self.squash:
            return torch.atanh(2 * noise.clamp(_TINY, 1 - _TINY) - 1)
        low, high = (torch.from_numpy(end.reshape(-1).astype(np.float32)) for end in (self.space.low, self.space.high))
        return low + noise * (high - low)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = params.split(self.size, -1)
        return mean, bounded_log_std(log_std)


class Joint(Distribution):
    """Independent distributions side by side: their actions are concatenated, log-probabilities and entropies add.

    Serves MultiDiscrete and MultiBinary spaces (int64 actions [K]) and Tuple spaces (float32 [K], in which whole
    numbers are exact up to 2**24).
    """

    def __init__(self, space: gymnasium.Space[Any], parts: tuple[Distribution, ...]):
        self.space, self.parts = space, parts
        self.action_sizes = tuple(math.prod(part.action_shape) for part in parts)
        self.action_shape = (sum(self.action_sizes),)
        self.action_dtype = torch.float32 if isinstance(space, spaces.Tuple) else torch.int64
        self.param_sizes = tuple(part.num_params for part in parts)
        self.num_params = sum(self.param_sizes)
        self.noise_sizes = tuple(part.noise_size for part in parts)
        self.noise_size = sum(self.noise_sizes)
        self.num_logits = sum(part.num_logits for part in parts)
        self.encoded_size = sum(part.encoded_size for part in parts)
        offsets = np.cumsum([0, *self.param_sizes])
        self.log_std_columns = tuple(
            int(offset) + column
            for offset, part in zip(offsets, parts, strict=False)
            for column in part.log_std_columns
        )

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        noises = noise.split(self.noise_sizes, -1)
        return self._join([d.sample(p, n) for d, p, n in zip(self.parts, self._split(params), noises, strict=True)])

    def at_random(self, noise: Tensor, allowed: Tensor | None = None) -> Tensor:
        masks = [None] * len(self.parts) if allowed is None else self._masks(allowed)
        noises = noise.split(self.noise_sizes, -1)
        return self._join([d.at_random(n, m) for d, n, m in zip(self.parts, noises, masks, strict=True)])

    def mode(self, params: Tensor) -> Tensor:
        return self._join([d.mode(p) for d, p in zip(self.parts, self._split(params), strict=True)])

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        triples = zip(self.parts, self._split(params), self._actions(action), strict=True)
        return torch.stack([d.log_prob(p, a) for d, p, a in triples]).sum(0)

    def entropy(self, params: Tensor) -> Tensor:
        return torch.stack([d.entropy(p) for d, p in zip(self.parts, self._split(params), strict=True)]).sum(0)

    def check_start(self, std: float) -> None:
        for part in self.parts:
            part.check_start(std)

    def warning_at_start(self, std: float) -> str:
        return next(filter(None, (part.warning_at_start(std) for part in self.parts)), "")

    def to_env(self, action: np.ndarray) -> Any:
        if not isinstance(self.space, spaces.Tuple):
            shaped = action.reshape(-1, *self.space.shape)  # type: ignore[misc]
            return (shaped + getattr(self.space, "start", 0)).astype(self.space.dtype)
        arrays = np.split(action, np.cumsum(self.action_sizes)[:-1], axis=-1)
        return tuple(
            part.to_env(array.reshape(-1, *part.action_shape).astype(_NUMPY[part.action_dtype]))
            for part, array in zip(self.parts, arrays, strict=True)
        )

    def encode(self, action: Tensor) -> Tensor:
        return torch.cat([d.encode(a) for d, a in zip(self.parts, self._actions(action), strict=True)], -1)

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        triples = zip(self.parts, self._split(params), self._masks(allowed), strict=True)
        return torch.cat([d.mask(p, m) for d, p, m in triples], -1)

    def _split(self, params: Tensor) -> tuple[Tensor, ...]:
        return params.split(self.param_sizes, -1)

    def _masks(self, allowed: Tensor) -> tuple[Tensor, ...]:
        return allowed.split([part.num_logits for part in self.parts], -1)

    def _join(self, actions: list[Tensor]) -> Tensor:
        flat = [a if d.action_shape else a.unsqueeze(-1) for d, a in zip(self.parts, actions, strict=True)]
        return torch.cat([a.to(self.action_dtype) for a in flat], -1)

    def _actions(self, action: Tensor) -> list[Tensor]:
        pieces = action.split(self.action_sizes, -1)
        return [a if d.action_shape else a.squeeze(-1) for d, a in zip(self.parts, pieces, strict=True)]


_NUMPY = {torch.int64: np.int64, torch.float32: np.float32}


def make_distribution(space: gymnasium.Space[Any], *, squash: bool = False) -> Distribution:
    """The distribution over an action space: Discrete, MultiDiscrete, MultiBinary, Box of floats, or Tuple of these.

    Raises:
        SettingsError: the space is not supported.
    """
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, spaces.MultiDiscrete):
        return Joint(space, tuple(Categorical(spaces.Discrete(int(n))) for n in space.nvec.reshape(-1)))
    if isinstance(space, spaces.MultiBinary):
        return Joint(space, (Categorical(spaces.Discrete(2)),) * math.prod(space.shape))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return Gaussian(space, squash)
    nested = isinstance(space, spaces.Tuple) and any(isinstance(part, spaces.Tuple) for part in space.spaces)
    if isinstance(space, spaces.Tuple) and len(space.spaces) and not nested:
        return Joint(space, tuple(make_distribution(part, squash=squash) for part in space.spaces))
    raise SettingsError(
        f"There is no action distribution for {space}. Allowed are Discrete, MultiDiscrete, MultiBinary, Box of "
        "floats, and a flat Tuple of these: wrap the environment, or write your own ModelConfig."
    )


def bounded_log_std(log_std: Tensor) -> Tensor:
    """Log deviations clamped to their bounds.

    clamp has no gradient outside the bounds, so a value that crosses one would never return. Here gradients that lead
    back pass, and only those that lead further out become 0. It matters most for a free deviation, a parameter that
    nothing else moves.
    """
    return _Bounded.apply(log_std) if torch.is_grad_enabled() else log_std.clamp(*LOG_STD_RANGE)  # type: ignore[no-any-return]


class _Bounded(torch.autograd.Function):
    """clamp with the gradients that bounded_log_std describes. Within the bounds, both are equal."""

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


def standard_normal(noise: Tensor) -> Tensor:
    """Uniform numbers in (0, 1) -> normal ones, by the inverse distribution function."""
    return torch.special.ndtri(noise.clamp(_TINY, 1 - _TINY))


def expected_log_slope(mean: Tensor, log_std: Tensor) -> Tensor:
    """Mean of the log slope of tanh under normal distributions: [..., D] each -> [..., D].

    Uses the trapezoidal rule, which handles the slope's bend near 0 even for wide distributions, where Gaussian
    quadrature fails: accurate to 0.001 up to 7.4, the largest deviation.
    """
    nodes, weights = _trapezoids(mean.device, mean.dtype)
    u = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * nodes
    return (_log_slope(u) * weights).sum(-1)


@functools.cache
def _trapezoids(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The nodes and weights of the trapezoidal rule. Made once, since copying numbers to a GPU waits for it."""
    nodes = np.linspace(-5, 5, 48)
    weights = np.exp(-(nodes**2) / 2)
    with torch.inference_mode(False):
        return tuple(torch.tensor(x, dtype=dtype, device=device) for x in (nodes, weights / weights.sum()))  # type: ignore[return-value]


def _log_slope(u: Tensor) -> Tensor:
    """log d tanh(u) / du = log(1 - tanh(u)^2), without its cancellation."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))
