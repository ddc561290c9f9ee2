"""Trained runs as opponents: resolves their names, and plays them in a match.

Shape legend: M agents of a match that one policy plays, K core state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.core.arrays import map_structure
from lockstep.core.digests import state_digest
from lockstep.envs.base import allocate_observation
from lockstep.envs.construct import is_callable
from lockstep.envs.multiagent.opponents import AgentSpaces, single_actions
from lockstep.envs.multiagent.pettingzoo import names_of, spaces_of
from lockstep.envs.multiagent.policies import policies_of, sides_of
from lockstep.envs.multiagent.trained import TrainedRun
from lockstep.envs.settings import RANDOM, SHARED, EnvConfig
from lockstep.evaluation.actor import Reader, Spaces
from lockstep.evaluation.policy import Policy, find_checkpoint, load_policy
from lockstep.models.base import ActionDistribution, PolicyModel
from lockstep.models.capture import Inference
from lockstep.models.policies import Policies, PoliciesSpace
from lockstep.run.checkpoint import Checkpoint


def resolved(config: EnvConfig, names: tuple[str, ...]) -> tuple[str, ...]:
    """Opponents with each run among them written as RUN@ITERATION#DIGEST, so that it cannot change.

    Raises:
        SettingsError: a run, checkpoint or function does not exist or does not fit, or these environments have no
            agents for opponents to play.
    """
    if not names:
        return ()
    config = dataclasses.replace(config, opponents=names)
    players = [config.player(name) for name in names]
    agents = names_of(config)
    if len(agents) < 2:
        raise SettingsError(
            f"Opponents ({', '.join(names)}) play the other agents of a match, but env.id={config.id} has no other "
            "agents. Leave the opponents out, or use a PettingZoo environment for two or more."
        )
    sides = sides_of(config, agents) or {"": agents}
    return tuple(f"{side}{'=' * bool(side)}{_resolved(config, player, sides[side])}" for side, player in players)


def _resolved(config: EnvConfig, name: str, agents: list[Any]) -> str:
    """One opponent, which plays these agents."""
    if name == RANDOM:
        return name
    if is_callable(name):
        if not callable(load_object(name)):
            raise SettingsError(
                f"The opponent {name} must be a function (observation, action space, generator) -> action."
            )
        return name
    run = TrainedRun.parse(name)
    if not run.digest:
        found = _found(run)
        name = str(TrainedRun(run.folder, str(found.iteration), _digest(found)))
    spaces = spaces_of(config)
    for policy, played in _policies(name, agents).items():
        for agent in played:
            if misfit := _reader(name, policy, spaces[agent]).misfit:
                raise SettingsError(
                    f"The opponent {name} {misfit}, as {agent} of env.id={config.id}. Name a run on the same "
                    "environment."
                )
    return name


def _found(run: TrainedRun) -> Checkpoint:
    """Open the checkpoint that an opponent's name refers to."""
    try:
        return find_checkpoint(run.folder, run.checkpoint)
    except SettingsError as error:
        raise SettingsError(
            f"The opponent {run.place}, looked for from {Path.cwd()}: {error} Opponents are {RANDOM}, "
            "RUN, RUN@ITERATION or file.py:play. NAME=WHO, who plays the policy NAME, needs several --env.policies."
        ) from error


def _digest(checkpoint: Checkpoint) -> str:
    tensors, _ = checkpoint.part("learner")
    return state_digest({name: x for name, x in tensors.items() if name.startswith(("parameter.", "normalizer."))})[:16]


class TrainedPlayer:
    """The policies of a run, which sample their actions and play the agents that they play in that run. The shapes of
    their batches depend on their own match alone, so their bits do not depend on which other matches a process plays.

    Args:
        name: the run, resolved.
        agents: the spaces of all agents of the match.
    """

    def __init__(self, name: str, agents: AgentSpaces) -> None:
        self._name, self._agents = name, agents
        self._seats: dict[tuple[Any, ...], list[_Seats]] = {}
        """The seats by the agents that the run plays."""
        self._taken: list[_Seats] = []

    def begin(self, agents: Sequence[Any]) -> None:
        key = tuple(agents)
        if key not in self._seats:
            policies = _policies(self._name, list(agents)).items()
            self._seats[key] = [_Seats(self._name, policy, played, self._agents) for policy, played in policies]
        self._taken = self._seats[key]
        for seats in self._taken:
            seats.begin()

    def act(self, seen: Mapping[Any, Any], asked: Sequence[Any], draw: np.random.Generator) -> dict[Any, Any]:
        actions = {}
        for seats in self._taken:
            if own := [agent for agent in asked if agent in seats.agents]:
                actions |= seats.act(seen, own, draw)
        return actions


class _Seats:
    """The M agents of a match that one policy of a run plays."""

    def __init__(self, name: str, policy: str, agents: list[Any], all_agents: AgentSpaces) -> None:
        self.agents = agents
        self._actor, self._distribution, state_size = _playing(name, policy, len(agents))
        self._reader = _reader(name, policy, all_agents[agents[0]])
        assert not self._reader.misfit, "resolved has compared the spaces"
        self._action_space = all_agents[agents[0]][1]
        self._obs = allocate_observation(self._reader.space, (1, len(agents)))
        self._rows = map_structure(lambda leaf: leaf[0].numpy(), self._obs)
        self._start = torch.ones(1, len(agents), dtype=torch.bool)
        self._state = torch.zeros(len(agents), state_size)

    def begin(self) -> None:
        self._start[:] = True

    @torch.inference_mode()
    def act(self, seen: Mapping[Any, Any], asked: list[Any], draw: np.random.Generator) -> dict[Any, Any]:
        self._reader.write([seen[agent] for agent in self.agents], self._rows)
        rows = [self.agents.index(agent) for agent in asked]
        noise = torch.from_numpy(draw.random((len(self.agents), self._distribution.noise_size), np.float32))
        with self._actor.arithmetic():
            out, state = self._actor(self._obs, self._start, self._state, None, None)
            action = self._distribution.sample(out.policy[0], noise)
        if self._state.shape[1]:
            self._state[rows] = state[rows]
            self._start[0, rows] = False
        return dict(zip(asked, single_actions(self._distribution, self._action_space, action, rows), strict=True))


@functools.lru_cache
def _loaded(name: str) -> tuple[Policy, dict[str, tuple[PolicyModel, Spaces]]]:
    """A run, and the model and spaces of each policy. They are loaded once for all matches of a process."""
    run = TrainedRun.parse(name)
    if _digest(_found(run)) != run.digest:
        raise SettingsError(
            f"The opponent {run.place} is not what it was when this run began. Restore the run's folder, or name the "
            "opponent without the digest after #."
        )
    policy = load_policy(run.folder, run.checkpoint)
    if policy.experiment.model.uses_previous:
        raise SettingsError(
            f"The opponent {run.place} has model.uses_previous on, but opponents do not receive their previous action "
            "and reward. Name a run with model.uses_previous off."
        )
    spaces = envs.spaces(policy.experiment.env)
    if not isinstance(policy.model, Policies):
        return policy, {SHARED: (policy.model, spaces)}
    assert isinstance(spaces[0], PoliciesSpace)
    return policy, {each: (policy.model[each], part) for each, part in spaces[0].parts.items()}


def _policies(name: str, agents: list[Any]) -> dict[str, list[Any]]:
    """The given agents, by the policy of the run that plays them."""
    policy, parts = _loaded(name)
    env = policy.experiment.env
    found: dict[str, list[Any]] = {}
    for agent, chosen in policies_of(env, agents).items():
        if chosen not in parts:
            against = f" env.opponents={' '.join(env.opponents)}" * bool(env.opponents)
            raise SettingsError(
                f"The opponent {TrainedRun.parse(name).place} has no policy for {agent!r}: it trained "
                f"{', '.join(parts)} (env.policies={env.policies}{against}). Name another run."
            )
        found.setdefault(chosen, []).append(agent)
    return found


@functools.lru_cache
def _playing(name: str, policy: str, count: int) -> tuple[Inference, ActionDistribution, int]:
    """What computes a policy of a run for `count` agents, its distribution and the size of its state; the same for all
    matches of a process."""
    _, parts = _loaded(name)
    playing = parts[policy][0].for_playing().cpu()
    return Inference(playing), playing.distribution, playing.state_size


def _reader(name: str, policy: str, agent: Spaces) -> Reader:
    """The reader that converts observations of an agent with these spaces for a policy of a run."""
    run, parts = _loaded(name)
    return Reader(run.experiment.model, parts[policy][1], agent)
