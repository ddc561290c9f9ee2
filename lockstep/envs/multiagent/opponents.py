"""Who plays the agents of a match that the policy does not: chance, a function of the user's, or trained policies.

Shape legend: M opponents of a match, K core state.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.core.arrays import map_structure
from lockstep.envs.base import EnvConfig, allocate_observation
from lockstep.envs.convert import ObservationWriter
from lockstep.envs.gym import is_callable, single_action
from lockstep.models.base import ActionDistribution
from lockstep.models.capture import Inference
from lockstep.models.distributions import make_distribution
from lockstep.models.observations import ACTION_MASK

if TYPE_CHECKING:
    from lockstep.evaluation.policy import Policy
    from lockstep.run.checkpoint import Checkpoint

RANDOM = "random"
"""The opponent that draws each action from those that are allowed, uniformly wherever there are bounds."""


def resolved(config: EnvConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    """Opponents with the iteration and the digest of each run among them, as RUN@ITERATION#DIGEST.

    Raises:
        SettingsError: there is no such run, checkpoint or function, or nobody to play in these environments.
    """
    from lockstep.envs.multiagent.pettingzoo import agents_of

    if names and agents_of(dataclasses.replace(config, opponents=())) < 2:
        raise SettingsError(
            f"Opponents ({', '.join(names)}) play the other agents of a match, but env.id={config.id} has none: it is "
            "no environment of PettingZoo's for two or more. Leave them out."
        )
    return tuple(_resolved(config, name) for name in names)


def _resolved(config: EnvConfig, name: str) -> str:
    from lockstep import envs

    if name == RANDOM:
        return name
    if is_callable(name):
        if not callable(load_object(name)):
            raise SettingsError(
                f"The opponent {name} is no function: (observation, action space, generator) -> action."
            )
        return name
    run, _, digest = _parts(name)
    if not digest:
        found = _found(name)
        name = f"{run}@{found.iteration}#{_digest(found)}"
    played, trained = _loaded(name)[2:], envs.spaces(config)
    if played != trained:
        raise SettingsError(
            f"The opponent {name} observes {played[0]} and acts in {played[1]}, but in env.id={config.id} agents "
            f"observe {trained[0]} and act in {trained[1]}. Name a run on the same environment."
        )
    return name


def _parts(name: str) -> tuple[str, str | None, str | None]:
    """A run's folder, its checkpoint and the digest of that, as far as an opponent's name says."""
    found = re.fullmatch(r"(.+?)(?:@(\d+|latest|best))?(?:#([0-9a-f]{16}))?", name)
    return (name, None, None) if found is None else (found[1], found[2], found[3])


def _found(name: str) -> Checkpoint:
    """The checkpoint that an opponent's name stands for."""
    from lockstep.evaluation.policy import find_checkpoint

    run, checkpoint, _ = _parts(name)
    try:
        return find_checkpoint(run, checkpoint)
    except SettingsError as error:
        raise SettingsError(
            f"The opponent {name.partition('#')[0]}, looked for from {Path.cwd()}: {error} Opponents are {RANDOM}, "
            "RUN, RUN@ITERATION or file.py:play."
        ) from error


def _digest(checkpoint: Checkpoint) -> str:
    from lockstep.core.digests import state_digest

    tensors, _ = checkpoint.part("learner")
    return state_digest({name: x for name, x in tensors.items() if name.startswith(("parameter.", "normalizer."))})[:16]


class Opponents:
    """Those of one match, one of whom is drawn for every episode and plays all M agents.

    Args:
        names: as EnvConfig.opponents has them, resolved.
        observation_space: of an agent, as the environment has it.
        action_space: of an agent.
        count: M.

    Raises:
        SettingsError: a run is gone, or not what it was.
    """

    def __init__(
        self, names: tuple[str, ...], observation_space: spaces.Space[Any], action_space: spaces.Space[Any], count: int
    ) -> None:
        self._players = [_player(name, observation_space, action_space, count) for name in names]
        self._playing = self._players[0]

    def begin(self, draw: np.random.Generator) -> None:
        """Another match, in which all that is random comes from `draw`."""
        self._draw = draw
        self._playing = self._players[int(draw.integers(len(self._players)))]
        self._playing.begin()

    def act(self, observations: list[Any], asked: list[int]) -> list[Any]:
        """Actions of those opponents that are asked, in order, given what each of all M sees."""
        return self._playing.act(observations, asked, self._draw)


def _actions(distribution: ActionDistribution, space: spaces.Space[Any], action: Tensor, rows: list[int]) -> list[Any]:
    """Some rows of a batch of actions, as an environment takes them one by one."""
    parts = distribution.to_env(action.numpy())
    return [single_action(space, parts if isinstance(parts, tuple) else (parts,), i) for i in rows]


class _Function:
    """A function of the user's: (observation, action space, generator) -> action."""

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
                    f"The opponent {self._name} answered {action!r}, but may choose from {[int(x) for x in allowed]} "
                    f"now, of {space}. Have it return one of these."
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
        return _actions(distribution, space, distribution.at_random(noise, allowed), [0])[0]


class _Trained:
    """A run's policy, which samples its actions. Its call has the shape of the match alone, so its bits do not depend
    on which matches are beside it."""

    def __init__(self, name: str, seen: spaces.Space[Any], action_space: spaces.Space[Any], count: int) -> None:
        policy, self._actor, *_ = _loaded(name)
        self._writer = ObservationWriter(seen)
        self._distribution = policy.model.distribution
        self._action_space = action_space
        self._obs = allocate_observation(self._writer.space, (1, count))
        self._rows = map_structure(lambda leaf: leaf[0].numpy(), self._obs)
        self._start = torch.ones(1, count, dtype=torch.bool)
        self._state = torch.zeros(count, policy.model.state_size)

    def begin(self) -> None:
        self._start[:] = True

    @torch.inference_mode()
    def act(self, observations: list[Any], asked: list[int], draw: np.random.Generator) -> list[Any]:
        self._writer.write_list(observations, self._rows)
        out, state = self._actor(self._obs, self._start, self._state, None, None)
        if self._state.shape[1]:
            self._state[asked] = state[asked]
            self._start[0, asked] = False
        noise = torch.from_numpy(draw.random((len(observations), self._distribution.noise_size), np.float32))
        action = self._distribution.sample(out.policy[0], noise)
        return _actions(self._distribution, self._action_space, action, asked)


@functools.lru_cache
def _loaded(name: str) -> tuple[Policy, Inference, spaces.Space[Any], spaces.Space[Any]]:
    """A run's policy, and its observation and action space, once for all matches of this process."""
    from lockstep import envs
    from lockstep.evaluation.policy import load_policy

    run, iteration, digest = _parts(name)
    place = name.partition("#")[0]
    if _digest(_found(name)) != digest:
        raise SettingsError(
            f"The opponent {place} is not what it was when this run began. Restore the run's folder, or name it anew, "
            "without what follows #."
        )
    policy = load_policy(run, iteration)
    if policy.experiment.model.uses_previous:
        raise SettingsError(
            f"The opponent {place} has a model that sees its previous action and reward (model.uses_previous), which "
            "opponents are not told. Name a run without."
        )
    return policy, Inference(policy.model.for_acting().cpu()), *envs.spaces(policy.experiment.env)


def _player(
    name: str, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], count: int
) -> _Function | _Trained:
    if name == RANDOM:
        return _Function(name, _Chance(action_space), action_space)
    if is_callable(name):
        return _Function(name, load_object(name), action_space)
    return _Trained(name, observation_space, action_space, count)
