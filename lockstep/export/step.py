"""One step of a policy as a module from named tensors to named tensors, for `lockstep export`.

Shape legend: B environments, K core state, P distribution parameters.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lockstep.config.settings import SettingsError
from lockstep.core.arrays import torch_type
from lockstep.models.action_spaces import Joint, composite
from lockstep.models.actor_critic import Remembering
from lockstep.models.base import PolicyModel
from lockstep.models.continuous import Scaled
from lockstep.models.core import Core
from lockstep.models.distributions import Discrete
from lockstep.models.encoders import Trunk
from lockstep.models.gaussian import Gaussian
from lockstep.models.layers import Linear, PixelConv2d

FEEDBACK = {"next_state": "state", "next_prev_action": "prev_action"}
"""Outputs that become inputs of the next step."""

# Coefficients of normal_quantile: numerator and denominator, by increasing power.
_CENTER = (
    (3.3871327179, 5.0434271938e1, 1.5929113202e2, 5.9109374720e1),
    (1.0, 1.7895169469e1, 7.8757757664e1, 6.7187563600e1),
)
_TAILS = (
    (1.4234372777, 2.7568153900, 1.3067284816, 1.7023821103e-1),
    (1.0, 7.3700164250e-1, 1.2021132975e-1),
)


_REPEATED = (Discrete, Gaussian, Joint, Scaled)
"""Distributions whose to_env EnvironmentAction repeats. Subclasses that inherit it may choose actions by another rule:
exploration is no part of a file, and torch traces sample and mode."""


class ExportedPolicy(nn.Module):
    """A policy with its normalizers, which takes the most likely action or draws one. It only uses operations that
    other runtimes support.

    Inputs, each with a leading axis B of any length:
        obs, or obs.KEY for each entry of a Dict: raw observations as lockstep's models see them.
        start: bool [B], where an episode begins; only for models with a core or previous actions.
        state: fp32 [B, K], the core's state, if there is a core. Its value at a start does not matter.
        prev_action, prev_reward: [B, ...] and fp32 [B], if the model sees these; their values at a start do not matter.
        noise: fp32 [B, N], fresh uniform numbers in [0, 1) at every step, if actions are drawn.

    Outputs:
        action, or action.0, action.1, … for a Tuple space, or action.KEY for a Dict: in the form that the environment
        takes.
        policy: fp32 [B, P], the parameters of the action distribution, or the values of all actions.
        value: fp32 [B], the state's value, if the model estimates it.
        next_state, next_prev_action: the next step's state and prev_action.

    Args:
        model: computes in fp32; its parameters and statistics are loaded. It is copied.
        observation_space: of a single environment, as the policy sees it.
        uses_previous: whether the model sees the previous action and reward.
        sample: draw actions from the policy instead of taking the most likely one.
    """

    def __init__(
        self, model: PolicyModel, observation_space: gymnasium.Space[Any], uses_previous: bool, sample: bool = False
    ) -> None:
        super().__init__()
        self.model = _plain(model.for_playing())
        self.keys = list(observation_space.spaces) if isinstance(observation_space, spaces.Dict) else None
        self.uses_previous = uses_previous
        self.has_value = self.model.has_value
        self.to_environment = EnvironmentAction(model.distribution)
        self.sample = sample

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.keys is None:
            obs: Any = inputs["obs"].unsqueeze(0)
            first = obs
        else:
            obs = {key: inputs[f"obs.{key}"].unsqueeze(0) for key in self.keys}
            first = obs[self.keys[0]]
        rows = first.shape[1]
        start = inputs["start"].unsqueeze(0) if "start" in inputs else torch.zeros(1, rows, dtype=torch.bool)
        state = inputs["state"] if "state" in inputs else torch.zeros(rows, 0)
        previous = [inputs[name].unsqueeze(0) for name in ("prev_action", "prev_reward") if self.uses_previous]
        output, state = self.model(obs, start, state, *previous)
        distribution = self.model.distribution
        if self.sample:
            action = distribution.sample(output.policy[0], inputs["noise"])
        else:
            action = distribution.mode(output.policy[0])
        outputs = dict(self.to_environment.named(action))
        outputs["policy"] = output.policy[0]
        if self.has_value:
            outputs["value"] = output.value[0]
        if "state" in inputs:
            outputs["next_state"] = state
        if self.uses_previous:
            outputs["next_prev_action"] = action.clone()
        return outputs

    def example(self, observation_space: gymnasium.Space[Any], rows: int) -> dict[str, Tensor]:
        """Zero inputs at the starts of episodes, in the order in which all formats take them."""
        entries = {"obs": observation_space} if self.keys is None else {}
        if isinstance(observation_space, spaces.Dict):
            entries = {f"obs.{key}": entry for key, entry in observation_space.spaces.items()}
        example = {}
        for name, entry in entries.items():
            assert entry.shape is not None
            example[name] = torch.zeros(rows, *entry.shape, dtype=torch_type(entry.dtype))
        if self.model.state_size or self.uses_previous:
            example["start"] = torch.ones(rows, dtype=torch.bool)
        if self.model.state_size:
            example["state"] = torch.zeros(rows, self.model.state_size)
        if self.uses_previous:
            distribution = self.model.distribution
            example["prev_action"] = torch.zeros(rows, *distribution.action_shape, dtype=distribution.action_dtype)
            example["prev_reward"] = torch.zeros(rows)
        if self.sample:
            example["noise"] = torch.full((rows, self.model.distribution.noise_size), 0.5)
        return example


class EnvironmentAction(nn.Module):
    """ActionDistribution.to_env in torch."""

    low: Tensor
    high: Tensor
    offset: Tensor

    def __init__(self, distribution: Any) -> None:
        super().__init__()
        if not any(isinstance(distribution, kind) and type(distribution).to_env is kind.to_env for kind in _REPEATED):
            raise SettingsError(
                f"Actions of {type(distribution).__name__} cannot be exported: its to_env exists only in numpy. "
                "Export supports the distributions of lockstep.models, and subclasses with the same to_env."
            )
        self.distribution: Any = distribution
        self.parts: nn.ModuleList | None = None
        if isinstance(distribution, Joint):
            if composite(distribution.space):
                self.parts = nn.ModuleList(EnvironmentAction(part) for part in distribution.parts)
            else:
                start = np.broadcast_to(getattr(distribution.space, "start", 0), distribution.space.shape or ())
                self.register_buffer("offset", torch.as_tensor(np.array(start, np.int64)))
        elif isinstance(distribution, (Gaussian, Scaled)):
            for name in ("low", "high"):
                bound = np.asarray(getattr(distribution.space, name)).reshape(-1)
                self.register_buffer(name, torch.as_tensor(bound.copy()))

    def named(self, action: Tensor) -> list[tuple[str, Tensor]]:
        """[B, *action_shape] -> the name of each output, and its batch."""
        actions = self(action)
        if self.parts is None:
            return [("action", actions[0])]
        space = self.distribution.space
        names = space.spaces if isinstance(space, spaces.Dict) else range(len(actions))
        return [(f"action.{name}", a) for name, a in zip(names, actions)]

    def forward(self, action: Tensor) -> tuple[Tensor, ...]:
        """[B, *action_shape] -> a batch for each part of the action space"""
        distribution = self.distribution
        if isinstance(distribution, Discrete):
            return (action + distribution.start,)
        if isinstance(distribution, Joint):
            if self.parts is None:
                shape = distribution.space.shape or ()
                return ((action.reshape(-1, *shape) + self.offset).to(torch_type(distribution.space.dtype)),)
            pieces = zip(self.parts, distribution.parts, action.split(distribution.action_sizes, -1), strict=True)
            return tuple(
                x for to, part, a in pieces for x in to(a.reshape(-1, *part.action_shape).to(part.action_dtype))
            )
        low, high = self.low, self.high
        if isinstance(distribution, Scaled):
            action = low + (action.clamp(-1.0, 1.0) + 1) / 2 * (high - low)
        elif distribution.squash:
            action = low + (torch.tanh(action) + 1) / 2 * (high - low)
        action = torch.minimum(torch.maximum(action, low), high)
        return (action.to(torch_type(distribution.space.dtype)).reshape(-1, *distribution.space.shape),)


class _OneStep(nn.Module):
    """A core that runs one step, in plain operations."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor, start: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """[1, B, F], bool [1, B], [B, K] -> [1, B, H], [B, K]"""
        h, state = self.core.step(x[0], state.masked_fill(start[0].unsqueeze(-1), 0.0))
        return h.unsqueeze(0), state


def _plain(model: PolicyModel) -> PolicyModel:
    """Replace modules that are optimized for speed: cores with custom autograd, pixel blocks viewed as words, and
    layers that choose a library by size, which would fix that size."""
    for module in list(model.modules()):
        if isinstance(module, PixelConv2d):
            module.block = 1
        elif isinstance(module, Linear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(module, (Trunk, Remembering)) and module.core is not None:
            module.core = _OneStep(module.core)  # type: ignore[assignment]
    return model


def normal_quantile(p: Tensor) -> Tensor:
    """torch.special.ndtri between 1e-10 and 1 - 1e-10, in operations that every runtime supports (Wichura 1988, AS 241,
    PPND7)."""
    q = p - 0.5
    center = q * _ratio(0.180625 - q * q, *_CENTER)
    tail = q.sign() * _ratio((-torch.minimum(p, 1 - p).log()).sqrt() - 1.6, *_TAILS)
    return torch.where(q.abs() <= 0.425, center, tail)


def _ratio(x: Tensor, above: tuple[float, ...], below: tuple[float, ...]) -> Tensor:
    """The ratio of two polynomials."""
    numerator, denominator = torch.zeros_like(x), torch.zeros_like(x)
    for coefficient in reversed(above):
        numerator = numerator * x + coefficient
    for coefficient in reversed(below):
        denominator = denominator * x + coefficient
    return numerator / denominator
