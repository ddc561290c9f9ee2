"""Environments with several agents (PettingZoo). Each agent of a match is one environment of the shard.

Shape legend: N agents of a match, B environments of a shard, B / N matches.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from lockstep.config.boundary import ENVIRONMENT_SETTINGS
from lockstep.config.settings import SettingsError
from lockstep.envs.answers import BOOLS, NUMBERS, flag, number
from lockstep.envs.base import Observation, StepResult
from lockstep.envs.closing import close_all
from lockstep.envs.construct import PREFIX, construct
from lockstep.envs.convert import single_action
from lockstep.envs.episodes import Seeds
from lockstep.envs.gymnasium_shard import GymShard, emulated, misanswered, seeded
from lockstep.envs.multiagent.match_spaces import TURN, blank, match_spaces, takes_turns
from lockstep.envs.multiagent.opponents import AgentSpaces, Opponents
from lockstep.envs.multiagent.policies import Views, by_policy, learners_of, metrics_by_policy, sides_of
from lockstep.envs.settings import EnvConfig
from lockstep.models.observations import ACTION_MASK

_agents: dict[str, list[Any]] = {}
"""Results of names_of, by id and options."""


def names_of(config: EnvConfig) -> list[Any]:
    """The environment's names of the agents of a match; empty if it is not a PettingZoo environment."""
    if not config.id.startswith(PREFIX):
        return []
    key = f"{config.id} {sorted(config.options.items())}"
    if key not in _agents:
        env = construct(config)
        found = list(getattr(env, "possible_agents", ()))
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            close_all([env])
        if not found:
            raise SettingsError(
                f"The environment env.id={config.id} names no agents. Let its constructor set self.possible_agents to "
                "the list of all agents that may take part in a match."
            )
        _agents[key] = found
    return _agents[key]


def agents_of(config: EnvConfig) -> int:
    """The number of the shard's environments in a match, one for each agent that policies of the run play; 0 if it is
    not a PettingZoo environment."""
    names = names_of(config)
    if config.opponents and not config.several_policies:
        return min(1, len(names))
    return len(learners_of(config, names))


def spaces_of(config: EnvConfig) -> AgentSpaces:
    """The observation and action space of each agent of a match."""
    env = construct(config)
    try:
        return match_spaces(env, config)
    finally:
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            close_all([env])


class Match:
    """A PettingZoo environment in which all agents act at every step and remain until the match is over.

    If agents take turns (AECEnv), the policy acts for all of them, but only the action of the agent to move counts. The
    action masks of the others only allow the first action, so nothing is learned from it. The entry `turn` says which
    agent moves. A terminated agent sees zeros (or the numbers of its space nearest to them), and a truncated one its
    last observation. Both earn nothing, and their actions are ignored.

    With opponents, one policy plays one agent, or several policies play the agents that no opponent plays. If agents
    take turns, a step lasts until it is a policy's turn again. The match is over when all agents of policies are out.

    If agents move at once, each has an info in every step until it is out. If they take turns, an agent has the info of
    the environment's last(): when it is its turn again after its own action, and when it is out.

    Args:
        env: a ParallelEnv, or an AECEnv whose actions are discrete.
        config: its settings.

    Raises:
        SettingsError: the agents have different spaces, or take turns with actions that cannot be masked.
    """

    def __init__(self, env: Any, config: EnvConfig) -> None:
        self.env = env
        self._names = list(env.possible_agents)
        self._turns = takes_turns(env)
        agents = match_spaces(env, config)
        self._has_entries = isinstance(env.observation_space(self._names[0]), spaces.Dict)
        """Whether the environment's observations have entries."""
        self._blank = {name: blank(*agents[name]) for name in self._names}
        """By agent: its observation after it has terminated."""
        self._sides = sides_of(config, self._names)
        """By side: the agents that opponents play in all matches."""
        self._own, self._others = learners_of(config, self._names), [x for side in self._sides.values() for x in side]
        """Agents that policies play, and agents that opponents play."""
        self.observation_space, self.action_space = agents[self._own[0]]
        self.views: Views | None = None
        """Converts the agents' observations to what the run sees, if this is more."""
        if config.several_policies or config.central_state != "none":
            observed = {name: seen for name, (seen, _) in agents.items()}
            self.views = Views(env, self._own, observed, {name: agents[name][1] for name in self._own}, config)
            self.observation_space, self.action_space = self.views.observation_space, self.views.action_space
        self._opponents = Opponents(config.players(), agents) if config.opponents else None
        self.over = True
        """Whether the next step must begin another match."""
        self._told: dict[Any, Any] = {}
        """The last observations that the environment does not repeat: of all agents if they move at once, otherwise of
        agents that are out."""
        self._reward: dict[Any, float] = {}
        self._out: dict[Any, bool] = {}
        """By agent that is out: whether it terminated."""
        self._reads_infos = bool(config.metrics)
        self._infos: dict[Any, Any] = {}
        """Infos of the last step, by those of the policy's agents that have one."""
        self._acted: set[Any] = set()
        """The agents that have acted, if they take turns."""
        self._fresh = True
        """Whether the policy has not acted yet."""

    def reset(self, seed: int, draw: np.random.Generator, own: int) -> None:
        """Begin another match.

        Args:
            seed: the seed of the match.
            draw: generates all random numbers of opponents.
            own: the number of the agent that a single policy plays, if opponents play the others.
        """
        if self._opponents is not None and not self._sides:
            self._own = [self._names[own]]
            self._others = [name for name in self._names if name not in self._own]
        with seeded("reset(self, seed=None, options=None), and take all random numbers from a generator of that seed"):
            answer = self.env.reset(seed=seed)
        if not (self._turns or (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Mapping))):
            raise misanswered("reset", answer, "(observations, infos), two dicts")
        self._fresh, self.over = True, False
        self._reward, self._out = dict.fromkeys(self._own, 0.0), {}
        self._infos, self._acted = {}, set()
        self._told = {} if self._turns else dict(answer[0])
        if self._opponents is not None:
            self._opponents.begin(self._sides or {"": self._others}, draw)
            self._answer()

    def step(self, actions: list[Any]) -> None:
        """Play the actions of the policy's agents."""
        if not self._fresh:
            self._reward, self._infos = dict.fromkeys(self._own, 0.0), {}
        self._fresh = False
        if self.over:  # opponents ended the match before the policy could act
            return
        self._told |= {name: self._blank[name] for name, terminated in self._out.items() if terminated}
        actions = actions if self.views is None else self.views.actions(actions)
        by_agent = dict(zip(self._own, actions, strict=True))
        if self._turns:
            mover = self.env.agent_selection
            self._acted.add(mover)
            self._move(by_agent[mover])
            self._answer()
            if not self.over and self.env.agent_selection in self._acted:
                self._inform(self.env.agent_selection, self._infos_of_turns())
        else:
            by_agent |= self._asked([name for name in self._others if name in self.env.agents])
            answer = self.env.step({name: by_agent[name] for name in self.env.agents})
            if not (isinstance(answer, tuple) and len(answer) == 5):
                wanted = "(observations, rewards, terminations, truncations, infos), five dicts"
                raise misanswered("step", answer, wanted)
            obs, *results = answer
            self._told |= {name: seen for name, seen in obs.items() if name not in self._out}
            self._count(*results)

    def observations(self) -> list[Any]:
        """Observations of the policy's agents."""
        if self.views is None:
            return list(self._seen(self._own).values())
        return self.views.of(self._seen(self._names), self._own)

    def rewards(self) -> list[float]:
        """Rewards of the policy's agents in the last step."""
        return [self._reward[name] for name in self._own]

    def infos(self) -> list[Any]:
        """The info of each of the policy's agents in the last step; None for agents that have none."""
        return [self._infos.get(name) for name in self._own]

    def terminated(self) -> np.ndarray:
        """bool, one per agent of the policy: whether it has terminated."""
        return np.array([self._out.get(name, False) for name in self._own])

    def _answer(self) -> None:
        """Let opponents act until it is the policy's turn."""
        while self._opponents and self._turns and not self.over and self.env.agent_selection not in self._own:
            mover = self.env.agent_selection
            self._move(self._asked([mover])[mover])

    def _asked(self, movers: list[Any]) -> dict[Any, Any]:
        """The actions of opponents that move now."""
        if self._opponents is None or not movers:
            return {}
        return self._opponents.act(self._seen(self._others), movers)

    def _move(self, action: Any) -> None:
        """Play the action of the agent to move."""
        env = self.env
        env.step(action)
        self._count(env.rewards, env.terminations, env.truncations, self._infos_of_turns())
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)  # removes the agent
        self.over |= not env.agents

    def _infos_of_turns(self) -> Any:
        """The infos that the environment stores for last(); None if it has none, since lockstep does not need them."""
        return getattr(self.env, "infos", None)

    def _inform(self, name: Any, infos: Any) -> None:
        if self._reads_infos and isinstance(infos, Mapping):
            self._infos[name] = infos.get(name)

    def _count(
        self, rewards: dict[Any, Any], terminations: dict[Any, bool], truncations: dict[Any, bool], infos: Any
    ) -> None:
        playing = [name for name in self._own if name not in self._out]
        for name in playing:
            reward = rewards.get(name, 0.0)
            self._reward[name] += float(reward) if isinstance(reward, NUMBERS) else number(reward)
        for name in self._names:
            if name not in self._out:
                terminated = _flag("terminations", terminations, name)
                if terminated or _flag("truncations", truncations, name):
                    self._out[name] = terminated
                    if self._turns:
                        self._told[name] = self._shown(self.env.observe(name), acting=False)
                    if name in self._told:  # the environment may write later observations into the same arrays
                        self._told[name] = copy.deepcopy(self._told[name])
        for name in playing:
            if not self._turns or name in self._out:
                self._inform(name, infos)
        self.over = all(name in self._out for name in self._own) or not self.env.agents

    def _seen(self, names: list[Any]) -> dict[Any, Any]:
        """Current observations of agents."""
        if not self._turns:
            return {name: self._told.get(name, self._blank[name]) for name in names}
        env, mover = self.env, self.env.agent_selection
        live = [name for name in env.agents if name not in self._out]  # an environment may leave others in its list
        return {
            name: self._shown(env.observe(name), name == mover)
            if name in live
            else self._told.get(name, self._blank[name])
            for name in names
        }

    def _shown(self, obs: Any, acting: bool) -> Any:
        """An agent's observation if agents take turns. Only the mask of the agent to move allows a choice."""
        shown = dict(obs) if self._has_entries else {"observation": obs}
        pause = self._blank[self._names[0]][ACTION_MASK]
        if not acting:
            shown[ACTION_MASK] = pause
        elif ACTION_MASK not in shown:
            shown[ACTION_MASK] = np.ones_like(pause)
        shown[TURN] = np.array([acting], np.int8)
        return shown


def _flag(kind: str, flags: dict[Any, Any], name: Any) -> bool:
    """Whether an environment reports an end for an agent. Agents without a report continue to play."""
    value = flags.get(name, False)
    return bool(value) if isinstance(value, BOOLS) else flag(f"{kind}[{name!r}]", value)


class MatchShard(GymShard):
    """Matches in a Python loop. If policies play L agents of a match, environment j of the shard is agent j % L of
    match j // L. The seed of a match is that of its first agent's environment, and the episodes of its agents begin and
    end together. If a single policy has opponents, environment j is one agent of match j, a different one in every
    episode.

    Metrics are those of each environment's agent. With several policies, each policy also has its score and its part of
    the metrics: see lockstep.envs.multiagent.policies.metrics_by_policy."""

    def __init__(self, config: EnvConfig, *, seeds: Seeds, num_envs: int, render: bool = False) -> None:
        own = metrics_by_policy(config, names_of(config))
        asked = tuple(text for text in config.metrics if text not in own)
        super().__init__(dataclasses.replace(config, metrics=asked), seeds=seeds, num_envs=num_envs, render=render)
        self._columns = [(*own, *asked).index(text) for text in config.metrics]
        """The column of each metric among those of policies, followed by those of all agents."""
        self._players: np.ndarray | None = None
        """int64 [B]: the number of the policy that plays each agent, if metrics of policies are reported."""
        self._score = np.zeros(num_envs)
        """float64 [B]: the sum of rewards of the current episodes so far."""
        views = self._matches[0].views
        if views is not None:
            assert isinstance(self.observation_space, spaces.Dict)
            self.observation_space = views.converted(self.observation_space)
            self._players = np.resize(views.numbers, num_envs) if own and config.metrics else None

    def _construct(self, config: EnvConfig, render: bool) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        self._agents = agents_of(config)
        assert self.num_envs % self._agents == 0, f"{self.num_envs} environments do not form matches of {self._agents}"
        self._matches: list[Match] = []
        for _ in range(self.num_envs // self._agents):
            self._envs.append(construct(config, render))
            self._matches.append(Match(self._envs[-1], config))
        self.frames_per_step, self.emulator = emulated(self._envs[0])
        return self._matches[0].observation_space, self._matches[0].action_space

    def _reset_one(self, j: int, seed: int) -> None:
        match = self._matches[j // self._agents]
        episode = int(self._episode[j])
        own = (self._seeds.first_index + j + episode) % len(match.env.possible_agents)
        match.reset(seed, self._seeds.stream("opponent", j, episode), own)
        self._obs[j : j + self._agents] = match.observations()
        self._gone[j : j + self._agents] = False
        self._score[j : j + self._agents] = 0
        if self._numbers is not None:
            self._numbers.begin(slice(j, j + self._agents))

    def _step_one(self, j: int, action: tuple[np.ndarray, ...], step: StepResult) -> None:
        rows = range(j, j + self._agents)
        match = self._matches[j // self._agents]
        match.step([single_action(self.action_space, action, row) for row in rows])
        self._obs[j : rows.stop] = match.observations()
        step.reward[j : rows.stop] = match.rewards()
        self._score[j : rows.stop] += step.reward[j : rows.stop]
        self._gone[j : rows.stop] = match.terminated()
        if self._numbers is not None:
            for row, info in zip(rows, match.infos(), strict=True):
                self._numbers.note(row, info)
        if match.over:
            step.terminated[j : rows.stop] = self._gone[j : rows.stop]
            step.truncated[j : rows.stop] = ~self._gone[j : rows.stop]

    def recv(self, out: Observation) -> StepResult:
        step = super().recv(out)
        if self._players is None:
            return step
        asked = np.empty((self.num_envs, 0)) if step.metrics is None else step.metrics
        own = by_policy(self._players, np.column_stack((self._score, asked)).T)
        each = np.concatenate((*own, asked), axis=1)
        return step._replace(metrics=each[:, self._columns])
