"""Which policy plays which agent of a match, and what policies and critics observe.

Shape legend: N agents of a match, B environments of a shard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import nn

from lockstep.config.settings import Names, SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs.info import labels
from lockstep.envs.settings import SEPARATE, SHARED, EnvConfig
from lockstep.models.policies import POLICY, Part, PoliciesSpace

STATE = "state"
"""The entry of an observation that shows critics the whole match."""
OBSERVATION = "observation"
"""The entry for an agent's own observation, if that has no entries."""
SCORE = "score"
"""The prefix of metrics with the scores of policies."""
Spaces = Mapping[Any, spaces.Space[Any]]
"""Spaces by agent."""


def policies_of(config: EnvConfig, agents: list[Any]) -> dict[Any, str]:
    """The name of each agent's policy.

    Raises:
        SettingsError: env.policies has no known form, or its function does not return names.
    """
    if config.policies == SHARED:
        return dict.fromkeys(agents, SHARED)
    if config.policies != SEPARATE and ":" not in config.policies:
        raise SettingsError(
            f"env.policies={config.policies!r} must be {SHARED}, {SEPARATE}, or a function, as in "
            "--env.policies file.py:policy_of."
        )
    name_of = str if config.policies == SEPARATE else load_object(config.policies)
    if not callable(name_of):
        raise SettingsError(f"env.policies={config.policies} is {name_of!r}, but must be a function.")
    found = {}
    for agent in agents:
        try:
            found[agent] = name_of(agent)
        except Exception as error:
            raise SettingsError(
                f"env.policies={config.policies} raised {type(error).__name__}: {error} for the agent {agent!r}. It "
                f"must return the name of a policy for each of {', '.join(map(repr, agents))}."
            ) from error
    for agent, name in found.items():
        if isinstance(name, str) and hasattr(nn.ModuleDict(), name):
            raise SettingsError(
                f"env.policies={config.policies} gives the agent {agent!r} the policy {name!r}, a name that PyTorch "
                "needs. Use another name."
            )
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", name)):
            raise SettingsError(
                f"env.policies={config.policies} gives the agent {agent!r} the policy {name!r}, but a policy's name "
                "must be a text of letters, digits, _ and -. Return such a name from a function (file.py:NAME)."
            )
    return found


def sides_of(config: EnvConfig, agents: list[Any]) -> dict[str, list[Any]]:
    """The agents that opponents play instead, by their policy (EnvConfig.players); empty if there is one policy.

    Raises:
        SettingsError: there is no such policy, or opponents would play all agents.
    """
    if not config.several_policies:
        return {}
    policies = policies_of(config, agents)
    sides = {side: [agent for agent in agents if policies[agent] == side] for side in config.players()}
    known = ", ".join(dict.fromkeys(policies.values()))
    for side, played in sides.items():
        if not played:
            raise SettingsError(
                f"The opponents {' '.join(config.opponents)} would play agents of the policy {side!r}, but "
                f"env.policies={config.policies} makes the policies {known}. Name one of these."
            )
    if sum(map(len, sides.values())) == len(agents):
        raise SettingsError(
            f"The opponents {' '.join(config.opponents)} would play all agents of the policies {known}, so no policy "
            "is left. Leave one of them out."
        )
    return sides


def learners_of(config: EnvConfig, agents: list[Any]) -> list[Any]:
    """The agents that policies of the run play in all matches. Raises SettingsError like sides_of."""
    played = [agent for side in sides_of(config, agents).values() for agent in side]
    return [agent for agent in agents if agent not in played]


def metrics_by_policy(config: EnvConfig, agents: list[Any]) -> Names:
    """The metrics of policies, ordered by the policies' numbers: each policy's score, and its part of each number that
    env.metrics names, as in score_red, score_blue, won_red, won_blue. Empty if there is one policy.

    Args:
        config: its metrics may contain these names.
        agents: the agents of a match.

    Raises:
        SettingsError: two metrics would have the same name.
    """
    if not config.several_policies:
        return ()
    policies = policies_of(config, agents)
    learning = dict.fromkeys(policies[agent] for agent in learners_of(config, agents))
    known = {f"{name}_{policy}" for name in (SCORE, *labels(config.metrics)) for policy in learning}
    asked = tuple(text for text in config.metrics if text not in known)
    found = [f"{name}_{policy}" for name in (SCORE, *labels(asked)) for policy in learning]
    for name in found:
        if found.count(name) > 1:
            raise SettingsError(
                f"env.metrics={','.join(asked)}: with env.policies={config.policies}, two metrics would have the name "
                f"{name}, because {SCORE}_NAME is the score of the policy NAME and KEY_NAME its part of KEY. Rename "
                "the number in a wrapper, or leave it out."
            )
    return tuple(found)


def by_policy(players: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Numbers of agents, split by the policy that plays them: float64 [..., B, policies], NaN for other policies.

    Args:
        players: int64 [B]: the number of the policy that plays each agent.
        numbers: float64 [..., B], such as the sum of rewards of each agent's episode so far.
    """
    own = np.arange(players.max() + 1) == players[:, None]
    return np.where(own, numbers[..., None], np.nan)


class Views:
    """Converts the observations of a match to a form that all policies share, with the entries `policy` and `state`.

    Args:
        env: the environment, for its state().
        agents: the agents that the policies play.
        seen: the observation space of each agent, including opponents.
        acted: the action space of each of `agents`.
        config: the environment's settings.

    Raises:
        SettingsError: the agents' spaces have no common form, or there is no state.
    """

    def __init__(self, env: Any, agents: list[Any], seen: Spaces, acted: Spaces, config: EnvConfig) -> None:
        self._env, self._config = env, config
        self.policies = policies_of(config, agents)
        self._names = list(dict.fromkeys(self.policies.values()))
        self.numbers = np.array([self._names.index(self.policies[agent]) for agent in agents])
        """int64: the number of each agent's policy, in the order of `agents`."""
        self._number = dict(zip(agents, self.numbers.tolist(), strict=True))
        self._own = {self.policies[agent]: (seen[agent], acted[agent]) for agent in agents}
        for agent in agents:
            self._check(agent, seen[agent], acted[agent])
        own = {agent: seen[agent] for agent in agents}
        first = seen[agents[0]]
        self._same_space = all(space == first for space in own.values())
        self._entries = isinstance(first, spaces.Dict)
        entries: dict[str, Any] = dict(first.spaces) if isinstance(first, spaces.Dict) else {OBSERVATION: first}
        if not self._same_space:
            entries = {OBSERVATION: spaces.Box(-np.inf, np.inf, (self._longest(own),), np.float32)}
        for key in self._added():
            if key in entries:
                raise SettingsError(
                    f"The agents of env.id={config.id} observe an entry {key!r}, a name that lockstep needs for "
                    f"env.{'policies' if key == POLICY else 'central_state'}. Rename it in a wrapper."
                )
        if config.central_state != "none":
            entries[STATE] = self._state_space(seen)
        if config.several_policies:
            entries[POLICY] = spaces.Box(0, len(self._names) - 1, (1,), np.float32)
        self.observation_space = spaces.Dict(entries)
        self.action_space = self._common_action(acted)
        self._choices = []
        """The number of actions of each of `agents`, if the numbers differ."""
        if any(space != self.action_space for space in acted.values()):
            self._choices = [space.n for space in map(acted.get, agents) if isinstance(space, spaces.Discrete)]
        self._start = getattr(self.action_space, "start", 0)

    def converted(self, space: spaces.Dict) -> spaces.Dict:
        """The observation space for models, which contains the spaces of each policy if there are several."""
        if not self._config.several_policies:
            return space
        parts = {}
        for name, (seen, acted) in self._own.items():
            entries = {key: entry for key, entry in space.spaces.items() if key != POLICY}
            if not self._same_space:
                entries[OBSERVATION] = spaces.Box(-np.inf, np.inf, seen.shape, np.float32)
            parts[name] = Part(spaces.Dict(entries), acted)
        return PoliciesSpace(space.spaces, parts)

    def of(self, observations: Mapping[Any, Any], agents: list[Any]) -> list[Any]:
        """The observations of these agents as their policies see them, given the observations of all N agents, in
        order."""
        state = self._state(list(observations.values()))
        found = []
        for agent in agents:
            obs = observations[agent]
            shown = dict(obs) if self._entries else {OBSERVATION: obs if self._same_space else self._padded(obs)}
            if state is not None:
                shown[STATE] = state
            if self._config.several_policies:
                shown[POLICY] = np.array([self._number[agent]], np.float32)
            found.append(shown)
        return found

    def actions(self, actions: list[Any]) -> list[Any]:
        """The agents' actions in their own spaces. An action that an agent lacks becomes its last action; only random
        play chooses such actions."""
        if not self._choices:
            return actions
        last = [self._start + count - 1 for count in self._choices]
        return [type(action)(min(action, most)) for action, most in zip(actions, last, strict=True)]

    def _added(self) -> list[str]:
        config = self._config
        return [STATE] * (config.central_state != "none") + [POLICY] * config.several_policies

    def _check(self, agent: Any, seen: spaces.Space[Any], acted: spaces.Space[Any]) -> None:
        """Raise SettingsError if an agent's spaces differ from those of another agent of the same policy."""
        policy = self.policies[agent]
        for kind, own, other in zip(("observation", "action"), (seen, acted), self._own[policy], strict=True):
            if own != other:
                raise SettingsError(
                    f"env.policies={self._config.policies} lets the policy {policy!r} play agents of env.id="
                    f"{self._config.id} with different {kind} spaces: {agent} has {own}, and another one {other}. Give "
                    "them different policies, or wrap the environment."
                )

    def _longest(self, seen: Spaces) -> int:
        for agent, space in seen.items():
            if not (isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f"):
                raise SettingsError(
                    f"The agents of env.id={self._config.id} have different observation spaces, among them {space} of "
                    f"{agent}. Only vectors of floats (Box with one dimension) may differ in length. Wrap the "
                    "environment, for example to flatten observations."
                )
        return max(space.shape[0] for space in seen.values() if space.shape)

    def _padded(self, obs: Any) -> np.ndarray:
        out = np.zeros(self.observation_space[OBSERVATION].shape or (), np.float32)
        out[: len(obs)] = obs
        return out

    def _common_action(self, acted: Spaces) -> spaces.Space[Any]:
        first, *others = acted.values()
        if all(space == first for space in others):
            return first
        discrete = [space for space in acted.values() if isinstance(space, spaces.Discrete)]
        if len(discrete) < len(acted) or len({space.start for space in discrete}) > 1:
            listed = ", ".join(f"{agent} has {space}" for agent, space in acted.items())
            raise SettingsError(
                f"The agents of env.id={self._config.id} act in spaces that have no common form: {listed}. Only "
                "Discrete spaces with the same first action may differ. Wrap the environment."
            )
        return max(discrete, key=lambda space: space.n)

    def _state_space(self, seen: Spaces) -> spaces.Space[Any]:
        config = self._config
        if config.central_state == "state":
            space = getattr(self._env, "state_space", None)
            if not isinstance(space, spaces.Box):
                raise SettingsError(
                    f"env.central_state=state needs the environment's state() and its state_space, a Box, but env.id="
                    f"{config.id} has {space!r} there. Use --env.central-state observations."
                )
            return space
        for agent, space in seen.items():
            if not (isinstance(space, spaces.Box) and space.dtype.kind == "f"):
                raise SettingsError(
                    f"env.central_state=observations joins the observations of all agents, but {agent} of env.id="
                    f"{config.id} observes {space}. Only Box spaces of floats can be joined. Use --env.central-state "
                    "state if the environment has one, or wrap the environment."
                )
        size = sum(int(np.prod(space.shape)) for space in seen.values() if space.shape is not None)
        return spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def _state(self, observations: list[Any]) -> np.ndarray | None:
        """The central state, given the observations of all agents."""
        if self._config.central_state == "none":
            return None
        if self._config.central_state == "state":
            return self._env.state()
        return np.concatenate([np.ravel(obs) for obs in observations]).astype(np.float32)
