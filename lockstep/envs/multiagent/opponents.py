"""Opponents, which play the agents of a match that the policy does not play. They are random, a user's function, or a
trained run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from lockstep.envs.settings import RANDOM
from lockstep.models.action_spaces import make_distribution
from lockstep.models.base import ActionDistribution
from lockstep.models.observations import ACTION_MASK

RUN_PLAYER = "lockstep.evaluation.opponents:TrainedPlayer"
"""The class that plays a trained run. It is imported when a match needs it, because it opens runs."""


AgentSpaces = Mapping[Any, tuple[spaces.Space[Any], spaces.Space[Any]]]
"""By agent: its observation space and its action space."""


class Player(Protocol):
    """Plays some agents of a match."""

    def begin(self, agents: Sequence[Any]) -> None:
        """Begin another match, in which it plays these agents."""

    def act(self, seen: Mapping[Any, Any], asked: Sequence[Any], draw: np.random.Generator) -> dict[Any, Any]:
        """Return the actions of the agents that are asked, given the observations of all opponents' agents."""
        ...


class Opponents:
    """The opponents of one match. For each side, every episode draws one opponent, which plays all agents of that side.

    Args:
        names: opponents by side: EnvConfig.players, resolved.
        agents: the spaces of all agents, as the environment declares them.

    Raises:
        SettingsError: a run is missing or has changed.
    """

    def __init__(self, names: Mapping[str, Sequence[str]], agents: AgentSpaces) -> None:
        self._players = {side: [_player(name, agents) for name in each] for side, each in names.items()}
        self._playing: list[tuple[Sequence[Any], Player]] = []

    def begin(self, sides: Mapping[str, Sequence[Any]], draw: np.random.Generator) -> None:
        """Begin another match with these agents on each side. All random numbers of opponents come from `draw`."""
        self._draw, self._playing = draw, []
        for side, agents in sides.items():
            players = self._players[side]
            player = players[int(draw.integers(len(players)))]
            player.begin(agents)
            self._playing.append((agents, player))

    def act(self, seen: Mapping[Any, Any], asked: Sequence[Any]) -> dict[Any, Any]:
        """Return the actions of the opponents' agents that are asked, given the observations of all of them."""
        actions = {}
        for agents, player in self._playing:
            if own := [agent for agent in asked if agent in agents]:
                actions |= player.act(seen, own, self._draw)
        return actions


def single_actions(
    distribution: ActionDistribution, space: spaces.Space[Any], action: Tensor, rows: list[int]
) -> list[Any]:
    """Rows of a batch of actions, each in the form that one environment takes."""
    parts = distribution.to_env(action.numpy())
    return [single_action(space, parts if isinstance(parts, tuple) else (parts,), i) for i in rows]


class _Functions:
    """A user's function, or one for each agent: (observation, action space, generator) -> action."""

    def __init__(self, name: str, functions: Mapping[Any, Callable[..., Any]], agents: AgentSpaces) -> None:
        self._name, self._functions, self._agents = name, functions, agents

    def begin(self, agents: Sequence[Any]) -> None:
        pass

    def act(self, seen: Mapping[Any, Any], asked: Sequence[Any], draw: np.random.Generator) -> dict[Any, Any]:
        return {agent: self._move(agent, seen[agent], draw) for agent in asked}

    def _move(self, agent: Any, observation: Any, draw: np.random.Generator) -> Any:
        space = self._agents[agent][1]
        action = self._functions[agent](observation, space, draw)
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


class RandomPlayer:
    """Draws allowed actions at random."""

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self._distribution = make_distribution(action_space)

    def __call__(self, observation: Any, space: spaces.Space[Any], draw: np.random.Generator) -> Any:
        distribution = self._distribution
        mask = observation.get(ACTION_MASK) if isinstance(observation, dict) else None
        allowed = None if mask is None else torch.from_numpy(np.reshape(mask, (1, -1)) != 0)
        noise = torch.from_numpy(draw.random((1, distribution.noise_size), np.float32))
        return single_actions(distribution, space, distribution.at_random(noise, allowed), [0])[0]


def _player(name: str, agents: AgentSpaces) -> Player:
    if name == RANDOM:
        return _Functions(name, {agent: RandomPlayer(acted) for agent, (_, acted) in agents.items()}, agents)
    if is_callable(name):
        function: Callable[..., Any] = load_object(name)
        return _Functions(name, {agent: function for agent in agents}, agents)
    module, _, cls = RUN_PLAYER.partition(":")
    return getattr(import_module(module), cls)(name, agents)
