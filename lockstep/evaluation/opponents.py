"""Trained runs as opponents: resolves their names, and plays them in a match.

Shape legend: M opponents of a match, K core state.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.core.arrays import map_structure
from lockstep.core.digests import state_digest
from lockstep.envs.base import allocate_observation
from lockstep.envs.construct import is_callable
from lockstep.envs.convert import ObservationWriter
from lockstep.envs.multiagent.opponents import RANDOM, single_actions
from lockstep.envs.multiagent.pettingzoo import agents_of
from lockstep.envs.settings import EnvConfig
from lockstep.evaluation.policy import Policy, find_checkpoint, load_policy
from lockstep.models.capture import Inference
from lockstep.run.checkpoint import Checkpoint


def resolved(config: EnvConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    """Opponents with each run among them written as RUN@ITERATION#DIGEST, so that it cannot change.

    Raises:
        SettingsError: a run, checkpoint or function does not exist or does not fit, or these environments have no
            agents for opponents to play.
    """
    config.check_opponents(names)
    if names and agents_of(dataclasses.replace(config, opponents=())) < 2:
        raise SettingsError(
            f"Opponents ({', '.join(names)}) play the other agents of a match, but env.id={config.id} has no other "
            "agents. Leave the opponents out, or use a PettingZoo environment for two or more."
        )
    return tuple(_resolved(config, name) for name in names)


def _resolved(config: EnvConfig, name: str) -> str:
    if name == RANDOM:
        return name
    if is_callable(name):
        if not callable(load_object(name)):
            raise SettingsError(
                f"The opponent {name} must be a function (observation, action space, generator) -> action."
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
    """The run's folder, the checkpoint and the checkpoint's digest in an opponent's name; None for missing ones."""
    found = re.fullmatch(r"(.+?)(?:@(\d+|latest|best))?(?:#([0-9a-f]{16}))?", name)
    return (name, None, None) if found is None else (found[1], found[2], found[3])


def _found(name: str) -> Checkpoint:
    """Open the checkpoint that an opponent's name refers to."""
    run, checkpoint, _ = _parts(name)
    try:
        return find_checkpoint(run, checkpoint)
    except SettingsError as error:
        raise SettingsError(
            f"The opponent {name.partition('#')[0]}, looked for from {Path.cwd()}: {error} Opponents are {RANDOM}, "
            "RUN, RUN@ITERATION or file.py:play."
        ) from error


def _digest(checkpoint: Checkpoint) -> str:
    tensors, _ = checkpoint.part("learner")
    return state_digest({name: x for name, x in tensors.items() if name.startswith(("parameter.", "normalizer."))})[:16]


class TrainedPlayer:
    """A run's policy, which samples its actions. The shape of its batch depends on its own match alone, so its bits do
    not depend on which other matches a process plays."""

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
        return single_actions(self._distribution, self._action_space, action, asked)


@functools.lru_cache
def _loaded(name: str) -> tuple[Policy, Inference, spaces.Space[Any], spaces.Space[Any]]:
    """A run's policy, the function that calls it, and its spaces; loaded once for all matches of a process."""
    run, iteration, digest = _parts(name)
    place = name.partition("#")[0]
    if _digest(_found(name)) != digest:
        raise SettingsError(
            f"The opponent {place} is not what it was when this run began. Restore the run's folder, or name the "
            "opponent without the digest after #."
        )
    policy = load_policy(run, iteration)
    if policy.experiment.model.uses_previous:
        raise SettingsError(
            f"The opponent {place} has model.uses_previous on, but opponents do not receive their previous action and "
            "reward. Name a run with model.uses_previous off."
        )
    return policy, Inference(policy.model.for_acting().cpu()), *envs.spaces(policy.experiment.env)
