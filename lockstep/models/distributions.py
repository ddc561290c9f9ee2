"""Action distributions: pure functions of parameters and noise. This module has their interface and the distributions
over one discrete action. lockstep.models.gaussian has distributions of continuous actions, and
lockstep.models.action_spaces chooses the distribution of a space.

Shape legend: P parameters, N noise numbers, D dimensions, K numbers of an action, E numbers of an encoded action.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.arrays import torch_type
from lockstep.models.selection import is_action, of_action

FORBIDDEN = -1e9
"""Logit of a masked action: its probability is exactly zero in fp32, and its log-probability is finite."""
TINY = 1e-7
"""Noise is kept this far from 0 and 1, where inverse distribution functions are infinite."""


class Constant:
    """Numbers as a tensor on each device that needs them, since a CUDA graph cannot copy them there."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._on_host = torch.from_numpy(np.ascontiguousarray(numbers))
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The tensor on a device."""
        if device not in self._on:
            self._on[device] = self._on_host.to(device)
        return self._on[device]


class SentBox:
    """Converts flat actions on any device to the bounds, the type and the shape of a Box.

    Args:
        space: the Box.
    """

    def __init__(self, space: spaces.Box) -> None:
        self._low, self._high = Constant(space.low.reshape(-1)), Constant(space.high.reshape(-1))
        self._shape, self._type = space.shape, torch_type(space.dtype)

    def scaled(self, unit: Tensor) -> Tensor:
        """Map numbers from [-1, 1] to the bounds."""
        low, high = self._low.on(unit.device), self._high.on(unit.device)
        return low + (unit + 1) / 2 * (high - low)

    def fitted(self, action: Tensor) -> Tensor:
        """[B, D] -> [B, ...], clipped to the bounds"""
        clipped = action.clamp(self._low.on(action.device), self._high.on(action.device))
        return clipped.to(self._type).reshape(-1, *self._shape)


class Distribution(ABC):
    """What the standard model needs from a distribution, beyond lockstep.models.base.ActionDistribution."""

    acting: ClassVar[str] = "sampled"
    """How sample chooses actions, in a word or two."""
    description: ClassVar[str]
    """Sentences for exported policies: see lockstep.models.base.Described."""
    exact: ClassVar[bool] = False
    """Whether choosing actions only needs operations with the same bits on every CPU, and functions of
    lockstep.portable.numbers."""
    knows_chances: ClassVar[bool] = True
    """Whether log_prob returns log-probabilities. Otherwise it returns 0."""
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
        """[..., P], uniform noise in [0, 1], [..., N] -> action [..., *action_shape]"""

    def at_random(self, noise: Tensor, allowed: Tensor | None = None) -> Tensor:
        """A random action, independent of any parameters: uniform noise in [0, 1], [B, N] -> action
        [B, *action_shape].

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
        """A sentence that says why learning from initial actions around 0 with this deviation is slow; "" if it is
        not."""
        return ""

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        """Forbid the actions whose entry in allowed, bool [..., num_logits], is False."""
        assert self.num_logits == self.num_params
        return params.masked_fill(~allowed, FORBIDDEN)


class Discrete(Distribution):
    """One of n actions, by n parameters. Actions are int64 scalars."""

    action_shape = ()
    action_dtype = torch.int64

    def __init__(self, space: spaces.Discrete):
        self.n, self.start = int(space.n), int(space.start)
        self.num_params = self.num_logits = self.encoded_size = self.n

    def to_env(self, action: Any) -> Any:
        return action + self.start if self.start else action

    def from_env(self, action: np.ndarray) -> Tensor:
        """A batch of the action space -> stored actions [B]"""
        return torch.from_numpy(action.astype(np.int64) - self.start)

    def to_env_tensor(self, action: Tensor) -> Tensor:
        return self.to_env(action)

    def encode(self, action: Tensor) -> Tensor:
        return is_action(action.long(), self.n).float()


class Categorical(Discrete):
    """One of n actions, by n logits."""

    description = "One of n actions. The parameters are n logits."

    def __init__(self, space: spaces.Discrete):
        super().__init__(space)
        self.noise_size = self.n

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """The Gumbel-max trick (Maddison et al. 2014)."""
        return (params - torch.log(-torch.log(noise.clamp(TINY, 1 - TINY)))).argmax(-1)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        return of_action(F.log_softmax(params, -1), action)

    def explore(self, params: Tensor, noise: Tensor, numbers: Tensor) -> Tensor:
        """A sample: the policy itself explores."""
        return self.sample(params, noise)

    def uniform(self, params: Tensor, noise: Tensor) -> Tensor:
        """Any action that the mask in params [..., P] allows: noise [..., N] -> [...]"""
        return self.mask(noise, params > FORBIDDEN).argmax(-1)

    def entropy(self, params: Tensor) -> Tensor:
        log_p = F.log_softmax(params, -1)
        return -(log_p.exp() * log_p).sum(-1)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        log_p, log_q = F.log_softmax(params, -1), F.log_softmax(other, -1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)


class EpsilonGreedy(Discrete):
    """The action with the highest value; when exploring, any allowed action with probability ε. Parameters are action
    values.

    Outside training, sample takes a random action with probability 0.001 (Hessel et al. 2018, table 1), so that every
    episode ends.

    Args:
        masked: whether parameters may be those of mask; otherwise all actions are allowed.
    """

    description = "The one of n actions that has the highest value. The parameters are the n values."
    exact = True
    knows_chances = False
    noise_size = 2
    EVALUATION_EPSILON = 0.001
    acting = f"ε-greedy (ε {EVALUATION_EPSILON})"

    def __init__(self, space: spaces.Discrete, *, masked: bool = False):
        super().__init__(space)
        self.masked = masked

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """As the class says: the best action, or rarely a random one."""
        epsilon = torch.full_like(params[..., :1], self.EVALUATION_EPSILON)
        return EpsilonGreedy.explore(self, params, noise, epsilon)  # also if a subclass explores by another rule

    def explore(self, params: Tensor, noise: Tensor, numbers: Tensor) -> Tensor:
        """numbers [..., 1]: ε"""
        return torch.where(noise[..., 0] < numbers[..., 0], self.uniform(params, noise), params.argmax(-1))

    def uniform(self, params: Tensor, noise: Tensor) -> Tensor:
        """Any action that the mask in params [..., P] allows: noise [..., N] -> [...]"""
        if not self.masked:
            return (noise[..., 1] * self.n).long().clamp(max=self.n - 1)
        allowed = params > FORBIDDEN
        count = allowed.sum(-1)
        place = torch.minimum((noise[..., 1] * count).long(), count - 1)
        return (allowed.cumsum(-1) <= place.unsqueeze(-1)).sum(-1)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """0. The probability is unknown, since ε is not a parameter, and it is not needed."""
        return torch.zeros(params.shape[:-1], device=params.device)

    def entropy(self, params: Tensor) -> Tensor:
        return torch.zeros(params.shape[:-1], device=params.device)
