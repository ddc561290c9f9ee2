"""One shard's environments in a user's batched environment (BatchEnv).

Shape legend: B environments, n of them in `rows`, T steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

from lockstep.config.boundary import ENVIRONMENT_SETTINGS
from lockstep.config.settings import SettingsError
from lockstep.envs.answers import form_of, register, unregister
from lockstep.envs.base import Observation, ShardEnv, StepResult
from lockstep.envs.batches import batch_action, locating, refuse_mask, returned_flags, returned_numbers, with_rows
from lockstep.envs.closing import close_all
from lockstep.envs.convert import ObservationWriter, as_array
from lockstep.envs.episodes import ActionLog, Seeds, episode_state
from lockstep.envs.info import EpisodeNumbers
from lockstep.envs.pictures import as_picture
from lockstep.envs.settings import EnvConfig

_STATE, _OBSERVATION = "state.", "observation."


class BatchShard(ShardEnv):
    """B environments of one object. Every episode starts from a new seed and is truncated after `reseed_every` steps.

    The object steps all environments, so one that has ended takes part in one more step. Its results are discarded, and
    it is reset. So the results of an environment do not depend on when others end.
    """

    frames_per_step = 1

    def __init__(self, env: Any, config: EnvConfig, *, seeds: Seeds) -> None:
        self._env, self._id, self._seeds = env, config.id, seeds
        self.num_envs = env.num_envs
        self.action_space: gymnasium.Space[Any] = env.action_space
        self._writer = ObservationWriter(env.observation_space)
        self.observation_space = self._writer.space
        self._saves = _saves(env, config.id)
        if not self._saves:
            refuse_mask(self.observation_space, config.id, "when a run is resumed", "Define get_state and set_state")
        self._first_length = seeds.first_lengths(self.num_envs, config.decorrelate)
        self._longest = config.reseed_every
        self._start_level, self._num_levels = config.start_level, config.num_levels
        tells = seeds.first_index == 0
        self._numbers = EpisodeNumbers(config.metrics, self.num_envs, tells=tells) if config.metrics else None
        self._offered: dict[str, Any] = {}
        self._log = ActionLog()
        self._action: tuple[np.ndarray, ...] = ()
        self._tensors = False
        """Whether the environment works with tensors."""
        self._arrays: list[np.ndarray] = []
        """The entries of the current observations."""
        self._episode = np.zeros(self.num_envs, np.int64)
        self._steps = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, np.bool_)
        register([env], config.id)

    def reset(self, out: Observation) -> None:
        self._episode[:] = 0
        self._steps[:] = 0
        self._ended[:] = False
        self._log.clear()
        if self._numbers is not None:
            self._numbers.begin(np.arange(self.num_envs))
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            self._arrays = self._begin(np.arange(self.num_envs))
        if self._saves:
            self.state_dict()  # finds a mistake in get_state now, before the first checkpoint
        self._writer.write_arrays(self._arrays, out, self._where)

    def offer(self, options: dict[str, Any]) -> None:
        if options != self._offered:
            self._offered = options
            with ENVIRONMENT_SETTINGS.applied(thorough=True):
                self._env.set_options(dict(options))

    def examine(self) -> None:
        self._writer.looks = sys.maxsize

    def _seed(self, rows: np.ndarray) -> np.ndarray:
        """The seeds of the current episodes of some environments."""
        seeds = self._seeds.derive(rows, self._episode[rows])
        return self._start_level + seeds % self._num_levels if self._num_levels else seeds

    def _begin(self, rows: np.ndarray) -> list[np.ndarray]:
        """Begin the current episodes of some environments; return the entries of their observations [n, ...]."""
        seeds = self._seed(rows)
        with locating(
            f"when it was reset (environment {self._seeds.first_index + rows[0]}, seed {seeds[0]}, and others)"
        ):
            obs = self._env.reset(rows.copy(), seeds)
        self._tensors = _has_tensors(obs)
        return self._writer.arrays(obs, len(rows))

    def _step(
        self, action: tuple[np.ndarray, ...], first: np.ndarray | None = None
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        """Step the object. Returns the entries of the new observations, rewards, terminations and truncations.

        Args:
            first: bool [B], environments that had ended before, so that their infos do not count.
        """
        lowest = self._seeds.first_index
        with locating(f"in a step of the environments {lowest} to {lowest + self.num_envs - 1}"):
            answer = self._env.step(batch_action(self.action_space, action, self._tensors))
        if not (isinstance(answer, tuple) and len(answer) in (5, 6)):
            raise SettingsError(
                f"The step of env.id={self._id} returned {form_of(answer)}, but must return (observations, rewards, "
                "terminated, truncated, final observations), where the last is None unless the batch resets "
                "environments by itself. A dict of numbers for each environment may follow."
            )
        obs, reward, terminated, truncated, final, *infos = answer
        self._note(infos, first)
        reward = returned_numbers("rewards", reward, self.num_envs)
        terminated = returned_flags("terminated", terminated, self.num_envs)
        truncated = returned_flags("truncated", truncated, self.num_envs)
        arrays = self._writer.arrays(obs, self.num_envs)
        over = terminated | truncated
        if final is not None and over.any():
            refuse_mask(self.observation_space, self._id, "after it resets an environment", "Return None instead")
            rows = np.flatnonzero(over)
            arrays = with_rows(arrays, rows, [x[rows] for x in self._writer.arrays(final, self.num_envs)])
        return arrays, reward, terminated, truncated

    def _note(self, infos: list[Any], first: np.ndarray | None) -> None:
        """Read the numbers of a step for env.metrics."""
        if self._numbers is None:
            return
        if not (infos and isinstance(infos[0], dict)):
            raise SettingsError(
                f"env.metrics names numbers that environments report, but the step of env.id={self._id} returns none. "
                "Let it return a dict of arrays as a sixth value, one number for each environment, or leave out "
                "--env.metrics."
            )
        going = np.ones(self.num_envs, np.bool_) if first is None else ~first
        self._numbers.note_all({name: as_array(x) for name, x in infos[0].items()}, going)
        self._numbers.add()

    def send(self, action: np.ndarray | tuple[np.ndarray, ...]) -> None:
        parts = action if isinstance(action, tuple) else (action,)
        self._action = tuple(np.asarray(part) for part in parts)
        if not self._saves:
            self._log.append(self._action, self._steps)

    def recv(self, out: Observation) -> StepResult:
        first = self._ended
        rows = np.flatnonzero(first)
        self._episode += first
        with ENVIRONMENT_SETTINGS.applied(thorough=self._writer.looks > 0):
            if self._numbers is not None:
                self._numbers.begin(first)
            arrays, reward, terminated, truncated = self._step(self._action, first)
            if rows.size:
                arrays = with_rows(arrays, rows, self._begin(rows))
        self._arrays = arrays
        self._steps = np.where(first, 0, self._steps + 1)
        self._writer.write_arrays(arrays, out, self._where)
        cut = (self._episode == 0) & (self._steps == self._first_length) & (self._steps > 0)
        cut |= self._steps == self._longest
        terminated = terminated & ~first
        truncated = (truncated | cut) & ~first & ~terminated
        self._ended = terminated | truncated
        reward = np.where(first, 0, reward).astype(np.float32)
        metrics = self._numbers.values(self._ended) if self._numbers is not None else None
        return StepResult(reward, terminated, truncated, first, np.zeros(self.num_envs, np.bool_), metrics)

    def _where(self, j: int) -> str:
        """A description of environment j and of the last step of its episode."""
        when = f"in step {self._steps[j]} of" if self._steps[j] else "at the start of"
        seed = self._seed(np.array([j]))[0]
        return f"environment {self._seeds.first_index + j}, {when} an episode that begins from seed {seed}"

    def state_dict(self) -> dict[str, np.ndarray]:
        if not self._saves:
            return episode_state(self._episode, self._steps, self._ended, self._log)
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            state = {name: as_array(x) for name, x in self._env.get_state().items()}
        for name, x in state.items():
            if x.shape[:1] != (self.num_envs,) or x.dtype.kind not in "biuf":
                raise SettingsError(
                    f"get_state of env.id={self._id} returned {name!r} of the type {x.dtype} and the shape {x.shape}, "
                    f"but it must hold numbers, and its first axis must have the length {self.num_envs}: one row for "
                    "each environment."
                )
        return {
            "episode": self._episode.copy(),
            "steps": self._steps.copy(),
            "ended": self._ended.copy(),
            **{_STATE + name: x.copy() for name, x in state.items()},
            **{f"{_OBSERVATION}{i}": x.copy() for i, x in enumerate(self._arrays)},
            **(self._numbers.state() if self._numbers is not None else {}),
        }

    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
    ) -> int:
        self._episode = state["episode"].astype(np.int64)
        self._ended = state["ended"].astype(np.bool_)
        steps = state["steps"].astype(np.int64)
        if self._numbers is not None:
            self._numbers.begin(np.arange(self.num_envs))
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            arrays = self._begin(np.arange(self.num_envs))
            if self._saves:
                replayed = 0
                saved = {name[len(_STATE) :]: x.copy() for name, x in state.items() if name.startswith(_STATE)}
                self._env.set_state(
                    {name: torch.from_numpy(x) for name, x in saved.items()} if self._tensors else saved
                )
                arrays = [state[f"{_OBSERVATION}{i}"] for i in range(len(arrays))]
                if self._numbers is not None:
                    self._numbers.load(state)
            else:
                arrays, replayed = self._replay(arrays, self._log.load(state), steps, heartbeat)
        self._arrays, self._steps = arrays, steps
        self._writer.write_arrays(arrays, out, self._where)
        return replayed

    def _replay(
        self,
        arrays: list[np.ndarray],
        actions: list[tuple[np.ndarray, ...]],
        steps: np.ndarray,
        heartbeat: Callable[[], None],
    ) -> tuple[list[np.ndarray], int]:
        """Repeat the last steps [B] of all environments together. Steps before the beginning of an environment's
        episode are discarded."""
        begin = len(actions) - steps
        for t, action in enumerate(actions, 1):
            arrays, _, terminated, truncated = self._step(action)
            rows = np.flatnonzero((begin == t) | ((terminated | truncated) & (begin > t)))
            if rows.size:
                arrays = with_rows(arrays, rows, self._begin(rows))
                if self._numbers is not None:
                    self._numbers.begin(rows)
            heartbeat()
        return arrays, len(actions) * self.num_envs

    def render(self, index: int = 0) -> np.ndarray:
        if not callable(getattr(self._env, "render", None)):
            raise SettingsError(
                f"env.id={self._id} cannot render images. Give its class a method render(index) that returns a "
                "picture, uint8 [H, W, 3]."
            )
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            return as_picture(self._env.render(index))

    def close(self) -> None:
        unregister([self._env])
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            close_all([self._env])


def _saves(env: Any, env_id: str) -> bool:
    """Whether checkpoints contain the state of the environment instead of its actions."""
    has = [callable(getattr(env, name, None)) for name in ("get_state", "set_state")]
    if any(has) and not all(has):
        raise SettingsError(
            f"env.id={env_id} has only one of get_state and set_state. Define both, so that checkpoints keep its "
            "state, or neither, so that resuming repeats its actions."
        )
    return all(has)


def _has_tensors(obs: Any) -> bool:
    if isinstance(obs, (dict, tuple, list)):
        return any(_has_tensors(part) for part in (obs.values() if isinstance(obs, dict) else obs))
    return isinstance(obs, torch.Tensor)
