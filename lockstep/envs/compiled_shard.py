"""One shard's compiled environments.

Shape legend: B environments of a shard.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numba.core.errors import NumbaError, NumbaExperimentalFeatureWarning

from lockstep.config.settings import SettingsError
from lockstep.core.arrays import split_entries
from lockstep.envs.base import Observation, ShardEnv, StepResult
from lockstep.envs.compiled import CompiledEnv
from lockstep.envs.convert import ObservationWriter
from lockstep.envs.episodes import Seeds
from lockstep.envs.multiagent.policies import Views, by_policy
from lockstep.envs.settings import EnvConfig
from lockstep.kernels.bound import Bound
from lockstep.kernels.cache import compiled, part
from lockstep.kernels.random import derive, mix
from lockstep.models.action_spaces import composite

_OWN = {"random": np.uint64, "episode": np.int64, "steps": np.int64, "ended": np.bool_}
"""Fields that every state has: the random generator, the number of the episode, its steps, and whether it has ended."""
_STEP, _OBSERVE = 0, 1
reset, step, observe = CompiledEnv.reset, CompiledEnv.step, CompiledEnv.observe  # placeholders that _compile replaces
agents = size = 0  # placeholders for N (0 without agents) and the size of an agent's observation


@part
def _begin(state, key, start_level, num_levels):
    """Begin the next episode, and seed its random generator."""
    state.episode += 1
    state.steps = 0
    seed = derive(key, state.episode)
    if num_levels:
        seed = mix(np.uint64(start_level) + seed % np.uint64(num_levels))
    state.random = seed


@part
def _cut(state, limit, cut, first_cut):
    """Whether an episode is truncated after its last step."""
    return state.steps == limit or state.steps == cut or (state.episode == 0 and state.steps == first_cut)


def _advance(states, keys, mode, limits, levels, shown, action, out, reward, ends):
    """Play one step of every environment or match, or begin its next episode if the last one has ended. The rows of a
    match's agents are adjacent. After an agent's own observation, a row contains the number of its policy if there are
    several policies: players, float32 [B]. From column `joint` on, it contains the observations of all agents; joint is
    0 if it does not."""
    (limit, first_cut, cut), (start_level, num_levels), (players, joint) = limits, levels, shown
    count = max(1, agents)  # `agents` is a constant, so Numba compiles only one side of the branches on it
    for m in range(len(states)):
        state, first = states[m], m * count
        if mode == _STEP:
            begins = state.ended
            terminated = truncated = False
            if begins:
                _begin(state, keys[m], start_level, num_levels)
                reset(state)
                reward[first : first + count] = 0
            else:
                state.steps += 1
                if agents:
                    rewards, terminated = step(state, action[first : first + count])
                    for i in range(count):
                        reward[first + i] = rewards[i]
                else:
                    reward[m], terminated = step(state, action[m])
                truncated = _cut(state, limit, cut, first_cut[m]) and not terminated
            state.ended = terminated or truncated
            for i in range(first, first + count):
                ends[0, i] = terminated
                ends[1, i] = truncated
                ends[2, i] = begins
        if agents:
            seen = out[first : first + count]
            observe(state, seen[:, :size])
            if len(players):
                seen[:, size] = players[first : first + count]
            if joint:
                for i in range(count):
                    for j in range(count):
                        seen[i, joint + size * j : joint + size * (j + 1)] = seen[j, :size]
        else:
            observe(state, out[m])


@functools.cache
def _compile(cls: type[CompiledEnv]) -> Any:
    """_advance, compiled with the functions of an environment."""
    names = {name: part(getattr(cls, name)) for name in ("reset", "step", "observe")}
    length = cls.observation_space.shape[0] if cls.agents else 0
    return compiled(_advance, agents=len(cls.agents), size=length, **names)


class CompiledShard(ShardEnv):
    """B environments whose states are records in one array. One compiled call steps them all.

    With several agents, environment j is agent j % N of match j // N. The seed of a match is that of its first agent's
    environment.
    """

    frames_per_step = 1

    def __init__(self, cls: type[CompiledEnv], config: EnvConfig, *, seeds: Seeds, num_envs: int) -> None:
        self._id, self._class = config.id, cls
        if lacking := [name for name in ("observation_space", "action_space", "fields") if not hasattr(cls, name)]:
            raise SettingsError(
                f"env.id={config.id} lacks {' and '.join(lacking)}. A CompiledEnv defines them in its class, not in "
                "__init__, since lockstep makes no object of it."
            )
        self.num_envs = num_envs
        space = self._class.observation_space
        self.observation_space = ObservationWriter(space).space
        self.action_space = self._class.action_space
        if (
            not isinstance(space, spaces.Box)
            or self.observation_space.shape != space.shape
            or self.observation_space.dtype != space.dtype
        ):
            raise SettingsError(
                f"env.id={config.id} observes {space}, but env.adapter=compiled takes a Box of float32 numbers, or of "
                "uint8 pictures [C, H, W]."
            )
        if self._class.agents and len(space.shape) != 1:
            raise SettingsError(f"env.id={config.id} observes {space}, but several agents must observe vectors.")
        if composite(self.action_space):
            raise SettingsError(f"env.id={config.id}: env.adapter=compiled takes no actions of {self.action_space}.")
        agents = max(1, len(self._class.agents))
        assert num_envs % agents == 0, f"{num_envs} environments do not form matches of {agents}"
        options = self._options(config.options)
        limit = int(options.pop("max_episode_steps"))
        first_lengths = np.ascontiguousarray(seeds.first_lengths(num_envs, config.decorrelate)[::agents])
        self._numbers = limit, first_lengths, config.reseed_every
        self._levels = config.start_level, config.num_levels
        index = np.arange(0, num_envs, agents)
        self._keys = seeds.derive(index, np.zeros_like(index)).astype(np.uint64)
        types = {**_OWN, **{name: type(value) for name, value in self._class.options.items()}, **self._class.fields}
        fields = [(name, *kind) if isinstance(kind, tuple) else (name, kind) for name, kind in types.items()]
        self._states = np.zeros(len(index), np.dtype(fields, align=True))
        for name, value in options.items():
            self._states[name] = value
        self._action = np.zeros((num_envs, *(self.action_space.shape or ())), self.action_space.dtype)
        shape, self._joint = space.shape, 0
        self._players: np.ndarray | None = None
        """int64 [B]: the number of the policy that plays each agent, if there are several."""
        self._score = np.zeros(num_envs)
        """float64 [B]: the sum of rewards of the current episodes so far, if there are several policies."""
        own, names = self.observation_space, self._class.agents
        if config.several_policies or config.central_state != "none":
            views = Views(None, list(names), dict.fromkeys(names, own), dict.fromkeys(names, self.action_space), config)
            self.observation_space = views.converted(views.observation_space)
            self._joint = (space.shape[0] + config.several_policies) * (config.central_state != "none")
            shape = (sum(math.prod(entry.shape or ()) for entry in self.observation_space.values()),)
            self._players = np.resize(views.numbers, num_envs) if config.several_policies else None
        self._shown = np.zeros(0, np.float32) if self._players is None else self._players.astype(np.float32)
        """The entry `policy` of each row. Entries are side by side, sorted by key: observation, policy, state."""
        self._out = np.zeros((num_envs, *shape), space.dtype)
        self._advance = _compile(self._class)

    def _options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all options."""
        known = {"max_episode_steps": self._class.max_episode_steps, **self._class.options}
        for name, value in given.items():
            if name not in known:
                raise SettingsError(
                    f"env.options names {name!r}, which {self._id} does not have. It has {', '.join(known)}."
                )
            wanted = type(known[name])
            fits = isinstance(value, (int, float)) if wanted is float else isinstance(value, wanted)
            if not fits or (isinstance(value, bool) and wanted is not bool):
                raise SettingsError(f"env.options.{name}={value!r} must be of the type {wanted.__name__}.")
        return {**known, **given}

    def _arguments(self, mode: int) -> tuple[Any, ...]:
        """The first arguments of _advance."""
        return self._states, self._keys, mode, self._numbers, self._levels, (self._shown, self._joint)

    def kernel(self) -> Bound | None:
        return Bound(self._advance, self._arguments(_STEP))

    def report(self, played: StepResult) -> StepResult:
        if self._players is None:
            return played
        scores = np.stack([self._add(*step) for step in zip(played.reward, played.first, strict=True)])
        return played._replace(metrics=by_policy(self._players, scores))

    def _add(self, reward: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Add the rewards of a step [B] to the scores of episodes, and return the scores."""
        self._score = np.where(first, 0, self._score + reward)
        return self._score

    def _play(self, mode: int, out: Observation) -> StepResult:
        reward, ends = np.empty(self.num_envs, np.float32), np.empty((3, self.num_envs), np.bool_)
        direct = not isinstance(out, dict) and out.flags.c_contiguous
        written: Any = out if direct else self._out
        self._advance(*self._arguments(mode), self._action, written, reward, ends)
        if isinstance(out, dict):
            split_entries(written, out)
        elif not direct:
            out[...] = written
        return StepResult(reward, ends[0], ends[1], ends[2], np.zeros(self.num_envs, np.bool_))

    def _begin(self, mode: int, out: Observation) -> None:
        """The first call, which compiles."""
        try:
            with warnings.catch_warnings():  # harmless: one state's fields may begin with another's
                warnings.simplefilter("ignore", NumbaExperimentalFeatureWarning)
                self._play(mode, out)
        except KeyError as error:
            fields = ", ".join(name for name in self._states.dtype.names or () if name not in _OWN)
            raise SettingsError(
                f"Numba cannot compile env.id={self._id}: it uses state.{error.args[0]}, but the state has only "
                f"{fields}. Name it in `fields`."
            ) from error
        except NumbaError as error:
            text = f"Numba cannot compile env.id={self._id}: {type(error).__name__}: {error}"
            if "wrong tuple length" in text:
                text += "\nThe method step must return two values: the reward, and whether the episode terminated."
            raise SettingsError(text) from error

    def reset(self, out: Observation) -> None:
        self._states["episode"] = -1
        self._states["ended"] = True
        self._score = np.zeros(self.num_envs)
        self._begin(_STEP, out)

    def send(self, action: Any) -> None:
        self._action[...] = action

    def recv(self, out: Observation) -> StepResult:
        step = self._play(_STEP, out)
        if self._players is None:
            return step
        return step._replace(metrics=by_policy(self._players, self._add(step.reward, step.first)))

    def state_dict(self) -> dict[str, np.ndarray]:
        state = {"states": self._states.view(np.uint8).reshape(len(self._states), -1).copy()}
        return state if self._players is None else {**state, "score": self._score.copy()}

    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
    ) -> int:
        """Restore the states. Nothing is replayed."""
        self._states.view(np.uint8).reshape(len(self._states), -1)[...] = state["states"]
        self._score = state.get("score", self._score)
        self._begin(_OBSERVE, out)
        return 0

    def render(self, index: int = 0) -> np.ndarray:
        return self._class.draw(self._states[index // max(1, len(self._class.agents))])

    def close(self) -> None:
        """Do nothing, since there is nothing to release."""
