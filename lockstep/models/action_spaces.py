"""The action distribution of an action space.

Shape legend: P parameters, K numbers of an action.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep.config.settings import SettingsError
from lockstep.core.arrays import torch_type
from lockstep.models.base import Diverging
from lockstep.models.distributions import Categorical, Constant, Distribution
from lockstep.models.gaussian import Gaussian, numbers_in


class Joint(Distribution):
    """Independent distributions side by side: their actions are concatenated, log-probabilities and entropies add.

    Serves MultiDiscrete and MultiBinary spaces (int64 actions [K]), and Tuple and Dict spaces (float32 [K], in which
    whole numbers are exact up to 2**24).
    """

    description = "Independent distributions, one for each part of the action. Their parameters follow one another."

    def __init__(self, space: gymnasium.Space[Any], parts: tuple[Distribution, ...]):
        self.space, self.parts = space, parts
        self.action_sizes = tuple(math.prod(part.action_shape) for part in parts)
        self.action_shape = (sum(self.action_sizes),)
        self.action_dtype = torch.float32 if composite(space) else torch.int64
        self.param_sizes = tuple(part.num_params for part in parts)
        self.num_params = sum(self.param_sizes)
        self.noise_sizes = tuple(part.noise_size for part in parts)
        self.noise_size = sum(self.noise_sizes)
        self.num_logits = sum(part.num_logits for part in parts)
        self.encoded_size = sum(part.encoded_size for part in parts)
        self._start = Constant(np.asarray(getattr(space, "start", 0)))
        self._sent = self.action_dtype if composite(space) else torch_type(space.dtype)
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

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        found = []
        for part, p, q in zip(self.parts, self._split(params), self._split(other), strict=True):
            assert isinstance(part, Diverging)
            found.append(part.kl(p, q))
        return torch.stack(found).sum(0)

    def check_start(self, std: float) -> None:
        for part in self.parts:
            part.check_start(std)

    def warning_at_start(self, std: float) -> str:
        return next(filter(None, (part.warning_at_start(std) for part in self.parts)), "")

    def to_env(self, action: np.ndarray) -> Any:
        if not composite(self.space):
            shaped = action.reshape(-1, *self.space.shape)  # type: ignore[misc]
            return (shaped + getattr(self.space, "start", 0)).astype(self.space.dtype)
        arrays = np.split(action, np.cumsum(self.action_sizes)[:-1], axis=-1)
        return tuple(
            part.to_env(array.reshape(-1, *part.action_shape).astype(_NUMPY[part.action_dtype]))
            for part, array in zip(self.parts, arrays, strict=True)
        )

    def to_env_tensor(self, action: Tensor) -> Tensor:
        assert not composite(self.space)
        shaped = action.reshape(-1, *self.space.shape)  # type: ignore[misc]
        return (shaped + self._start.on(action.device)).to(self._sent)

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


def composite(space: gymnasium.Space[Any]) -> bool:
    """Whether actions consist of parts. A batch of them is a tuple of arrays."""
    return isinstance(space, (spaces.Tuple, spaces.Dict))


def action_parts(space: gymnasium.Space[Any]) -> tuple[gymnasium.Space[Any], ...]:
    """The spaces of an action's parts, in the order of batches; the space itself if actions have no parts."""
    if isinstance(space, spaces.Dict):
        return tuple(space.spaces.values())
    return tuple(space.spaces) if isinstance(space, spaces.Tuple) else (space,)


def choices_of(space: gymnasium.Space[Any]) -> tuple[int, ...]:
    """The numbers of choices of an action's discrete parts, in the order of an action mask."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(n) for n in space.nvec.flat)
    if isinstance(space, spaces.MultiBinary):
        return (2,) * math.prod(space.shape)
    return sum(map(choices_of, action_parts(space)), ()) if composite(space) else ()


def make_distribution(space: gymnasium.Space[Any], *, squash: bool = False) -> Distribution:
    """The distribution over an action space: Discrete, MultiDiscrete, MultiBinary, Box of floats, or a Tuple or Dict of
    these.

    Raises:
        SettingsError: the space is not supported.
    """
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, spaces.MultiDiscrete):
        numbers_in(space)  # refuses a space without any
        return Joint(space, tuple(Categorical(spaces.Discrete(int(n))) for n in space.nvec.reshape(-1)))
    if isinstance(space, spaces.MultiBinary):
        return Joint(space, (Categorical(spaces.Discrete(2)),) * math.prod(space.shape))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return Gaussian(space, squash)
    parts = action_parts(space)
    if composite(space) and parts and not any(map(composite, parts)):
        return Joint(space, tuple(make_distribution(part, squash=squash) for part in parts))
    raise SettingsError(
        f"There is no action distribution for {space}. Allowed are Discrete, MultiDiscrete, MultiBinary, Box of "
        "floats, and a flat Tuple or Dict of these: wrap the environment, or write your own ModelConfig."
    )
