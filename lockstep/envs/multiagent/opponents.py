"""The opponents that play the agents of a match that the policy does not play: chance, a user's function, or a trained
run.

Shape legend: M opponents of a match.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs.construct import is_callable
from lockstep.envs.convert import single_action
from lockstep.models.action_spaces import make_distribution
from lockstep.models.base import ActionDistribution
from lockstep.models.observations import ACTION_MASK

RANDOM = "random"
"""The opponent that draws each action from the allowed ones, uniformly if the action space has bounds."""
RUN_PLAYER = "lockstep.evaluation.opponents:TrainedPlayer"
"""The class that plays a trained run. It is imported when a match needs it, because it opens runs."""


class Player(Protocol):
    """Plays all M opponents of a match."""

    def begin(self) -> None:
        """Begin another match."""

    def act(self, observations: list[Any], asked: list[int], draw: np.random.Generator) -> list[Any]:
        """Return actions of the opponents `asked`, in order, given the observations of all M."""
        ...


class Opponents:
    """The opponents of one match. Every episode draws one of them, which plays all M agents.

    Args:
        names: EnvConfig.opponents, resolved.
        observation_space: of an agent, as the environment declares it.
        action_space: of an agent.
        count: M.

    Raises:
        SettingsError: a run is missing or has changed.
    """

    def __init__(
        self, names: tuple[str, ...], observation_space: spaces.Space[Any], action_space: spaces.Space[Any], count: int
    ) -> None:
        self._players = [_player(name, observation_space, action_space, count) for name in names]
        self._playing = self._players[0]

    def begin(self, draw: np.random.Generator) -> None:
        """Begin another match, whose random numbers all come from `draw`."""
        self._draw = draw
        self._playing = self._players[int(draw.integers(len(self._players)))]
        self._playing.begin()

    def act(self, observations: list[Any], asked: list[int]) -> list[Any]:
        """Return actions of the opponents `asked`, in order, given the observations of all M."""
        return self._playing.act(observations, asked, self._draw)


def single_actions(
    distribution: ActionDistribution, space: spaces.Space[Any], action: Tensor, rows: list[int]
) -> list[Any]:
    """Rows of a batch of actions, each in the form that one environment takes."""
    parts = distribution.to_env(action.numpy())
    return [single_action(space, parts if isinstance(parts, tuple) else (parts,), i) for i in rows]


class _Function:
    """A user's function: (observation, action space, generator) -> action."""

    def __init__(self, name: str, function: Callable[..., Any], action_space: spaces.Space[Any]) -> None:
        self._name, self._function, self._space = name, function, action_space

    def begin(self) -> None:
        pass

    def act(self, observations: list[Any], asked: list[int], draw: np.random.Generator) -> list[Any]:
        return [self._move(observations[i], draw) for i in asked]

    def _move(self, observation: Any, draw: np.random.Generator) -> Any:
        action, space = self._function(observation, self._space, draw), self._space
        if isinstance(space, spaces.Discrete):
            mask = observation.get(ACTION_MASK) if isinstance(observation, dict) else None
            if mask is None or not np.any(mask):
                mask = np.ones(space.n)
            allowed = np.flatnonzero(mask) + space.start
            if not space.contains(action) or action not in allowed:
                raise SettingsError(
                    f"The opponent {self._name} returned {action!r}, but the allowed actions of {space} are now "
                    f"{[int(x) for x in allowed]}. Let it return one of these."
                )
        return action


class _Chance:
    """The opponent that plays at random."""

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self._distribution = make_distribution(action_space)

    def __call__(self, observation: Any, space: spaces.Space[Any], draw: np.random.Generator) -> Any:
        distribution = self._distribution
        mask = observation.get(ACTION_MASK) if isinstance(observation, dict) else None
        allowed = None if mask is None else torch.from_numpy(np.reshape(mask, (1, -1)) != 0)
        noise = torch.from_numpy(draw.random((1, distribution.noise_size), np.float32))
        return single_actions(distribution, space, distribution.at_random(noise, allowed), [0])[0]


def _player(name: str, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], count: int) -> Player:
    if name == RANDOM:
        return _Function(name, _Chance(action_space), action_space)
    if is_callable(name):
        return _Function(name, load_object(name), action_space)
    module, _, cls = RUN_PLAYER.partition(":")
    return getattr(import_module(module), cls)(name, observation_space, action_space, count)
