"""One shard's environments in a gymnasium.vector.VectorEnv.

Shape legend: B environments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from lockstep.config.boundary import ENVIRONMENT_SETTINGS
from lockstep.config.settings import SettingsError
from lockstep.envs.answers import form_of, register, unregister
from lockstep.envs.base import Observation, StepResult
from lockstep.envs.batches import batch_action, locating, refuse_mask, returned_flags, returned_numbers, with_rows
from lockstep.envs.closing import close_all
from lockstep.envs.convert import ObservationWriter
from lockstep.envs.episodes import Seeds
from lockstep.envs.info import EpisodeNumbers
from lockstep.envs.pictures import as_picture
from lockstep.envs.restarting import RestartingShard
from lockstep.envs.settings import EnvConfig

_MODES = ", ".join(f"AutoresetMode.{mode.name}" for mode in AutoresetMode)


class VectorShard(RestartingShard):
    """B environments of a VectorEnv. All of them restart from new seeds every `reseed_every` steps. Until then their
    random streams continue from episode to episode.

    In the modes SAME_STEP and DISABLED, an environment that has ended takes part in one more step, because a VectorEnv
    steps all of them. Its results are discarded, and options["reset_mask"] resets it.
    """

    frames_per_step = 1
    limits_episodes = False

    def __init__(self, env: gymnasium.vector.VectorEnv[Any, Any, Any], config: EnvConfig, *, seeds: Seeds) -> None:
        for name, value in (("num_levels", config.num_levels), ("decorrelate", config.decorrelate)):
            if value:
                raise SettingsError(
                    f"env.{name}={value}: env.id={config.id} is a VectorEnv of gymnasium, which begins episodes by "
                    f"itself. Use --env.{name.replace('_', '-')} 0."
                )
        self._env, self._id, self._seeds = env, config.id, seeds
        self._mode = _mode(env, config.id)
        counted = [name for name in config.metrics if name.startswith("episode.")]
        if counted and self._mode is AutoresetMode.DISABLED:
            raise SettingsError(
                f"env.metrics={','.join(counted)}: in AutoresetMode.DISABLED, gymnasium's RecordEpisodeStatistics "
                "forgets all episodes when one ends. Leave it out, since scores and lengths are metrics anyway, or "
                "use AutoresetMode.NEXT_STEP."
            )
        self.action_space = env.single_action_space
        self._writer = ObservationWriter(env.single_observation_space)
        self.observation_space = self._writer.space
        if self._mode is not AutoresetMode.NEXT_STEP:
            refuse_mask(self.observation_space, config.id, f"in {self._mode}", "Use AutoresetMode.NEXT_STEP")
        # Other classes take one seed for all environments, as VectorEnv.reset declares.
        self.share_seeds = not isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        super().__init__(config.reseed_every, env.num_envs)
        self._action: tuple[np.ndarray, ...] = ()
        tells = seeds.first_index == 0
        self._numbers = EpisodeNumbers(config.metrics, self.num_envs, tells=tells) if config.metrics else None
        self._masks = False
        """Whether a check has shown that the environment resets only what reset_mask names."""
        register([env], config.id)

    def examine(self) -> None:
        self._writer.looks = sys.maxsize

    def _write(self, obs: list[np.ndarray], out: Observation) -> None:
        self._writer.write_arrays(obs, out, self._where)

    def _where(self, j: int) -> str:
        return f"environment {self._seeds.first_index + j}, {self._since} steps after its seed"

    def _restart(self) -> list[np.ndarray]:
        """Restart from the seeds of the current count; return the entries of the observations."""
        self._begin()
        if self._numbers is not None:
            self._numbers.begin(np.arange(self.num_envs))
        index = np.arange(1 if self.share_seeds else self.num_envs)
        seeds = self._seeds.derive(index, np.full(len(index), self._count)).tolist()
        return self._reset(seed=seeds[0] if self.share_seeds else seeds)

    def _reset(self, **arguments: Any) -> list[np.ndarray]:
        with ENVIRONMENT_SETTINGS.applied(thorough=True), locating(f"when it was reset ({self._where(0)}, and others)"):
            answer = self._env.reset(**arguments)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise _misanswered(self._id, "reset", answer, "(observations, infos)")
        return self._writer.arrays(answer[0], self.num_envs)

    def _reset_masked(self, mask: np.ndarray) -> list[np.ndarray]:
        return self._reset(options={"reset_mask": mask.copy()})

    def send(self, action: np.ndarray | tuple[np.ndarray, ...]) -> None:
        parts = action if isinstance(action, tuple) else (action,)
        self._action = tuple(np.asarray(part) for part in parts)
        self._log.append(self._action)

    def recv(self, out: Observation) -> StepResult:
        arrays, result = self._step(self._action)
        self._write(arrays, out)
        return result

    def _step(self, action: tuple[np.ndarray, ...]) -> tuple[list[np.ndarray], StepResult]:
        first, going = self._ended, ~self._ended
        self._since += 1
        if self._mode is AutoresetMode.DISABLED and first.any():  # gymnasium's own classes would refuse the step
            self._reset_masked(first)
        thorough = self._writer.looks > 0
        with ENVIRONMENT_SETTINGS.applied(thorough=thorough), locating(f"in a step ({self._where(0)}, and others)"):
            answer = self._env.step(batch_action(self.action_space, action))
        if not (isinstance(answer, tuple) and len(answer) == 5):
            wanted = "(observations, rewards, terminations, truncations, infos)"
            raise _misanswered(self._id, "step", answer, wanted)
        obs, reward, terminated, truncated, infos = answer
        arrays = self._writer.arrays(obs, self.num_envs)
        reward = returned_numbers("rewards", reward, self.num_envs).astype(np.float32)
        terminated = returned_flags("terminations", terminated, self.num_envs) & going
        truncated = returned_flags("truncations", truncated, self.num_envs) & going & ~terminated
        ended = terminated | truncated
        reward[first] = 0
        if self._mode is not AutoresetMode.NEXT_STEP and first.any():
            arrays = self._begun(arrays, first)
        if self._mode is AutoresetMode.SAME_STEP and ended.any():
            rows = np.flatnonzero(ended)
            arrays = with_rows(arrays, rows, self._final(infos, rows))
        self._ended = ended
        lost = np.zeros(self.num_envs, np.bool_)
        return arrays, StepResult(reward, terminated, truncated, first, lost, self._metrics(infos, first, ended))

    def _metrics(self, infos: Any, first: np.ndarray, ended: np.ndarray) -> np.ndarray | None:
        """The metrics of episodes that have ended; None if env.metrics names none."""
        numbers = self._numbers
        if numbers is None:
            return None
        numbers.begin(np.flatnonzero(first))
        same_step = self._mode is AutoresetMode.SAME_STEP  # infos then are those of the next episode's reset
        numbers.note_all(infos, ~first & ~ended if same_step else ~first)
        numbers.add()
        if same_step and ended.any():
            # gymnasium's wrapper that counts episodes writes its numbers beside final_info.
            counted = {name: infos[name] for name in ("episode", "_episode") if name in infos}
            numbers.note_all({**counted, **infos.get("final_info", {})}, ended)
            numbers.add()
        return numbers.values(ended)

    def _begun(self, arrays: list[np.ndarray], first: np.ndarray) -> list[np.ndarray]:
        """Begin the next episode of some environments. Returns the entries of observations, with new rows for them."""
        before = [] if self._masks else [array.copy() for array in arrays]
        begun = self._reset_masked(first)
        others = ~first
        for x, y in zip(before, begun, strict=False):
            if x[others].tobytes() != y[others].tobytes():
                raise SettingsError(
                    f'env.id={self._id} ignores options["reset_mask"] in its reset, which has to reset only the '
                    f"environments that this array bool [{self.num_envs}] names, and return the others' observations "
                    "as they are. Follow it, or let the VectorEnv reset environments in the step after their end and "
                    'set metadata["autoreset_mode"] to AutoresetMode.NEXT_STEP.'
                )
        self._masks = self._masks or bool(others.any())
        rows = np.flatnonzero(first)
        return with_rows(arrays, rows, [array[rows] for array in begun])

    def _final(self, infos: Any, rows: np.ndarray) -> list[np.ndarray]:
        """The entries of the last observations of environments that have ended."""
        final = infos.get("final_obs") if isinstance(infos, dict) else None
        if final is None:
            raise SettingsError(
                f"env.id={self._id} resets environments in the step of their end (AutoresetMode.SAME_STEP), but its "
                'infos have no "final_obs". Return there the last observations of the environments that ended, as '
                "gymnasium's own VectorEnvs do."
            )
        if isinstance(final, np.ndarray) and final.dtype == object:  # one observation, perhaps nested, or None, each
            space = self._env.single_observation_space
            empty = create_empty_array(space, len(rows), np.zeros)
            return self._writer.arrays(concatenate(space, [final[j] for j in rows], empty), len(rows))
        return [array[rows] for array in self._writer.arrays(final, self.num_envs)]

    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
    ) -> int:
        self._count = int(state["count"])
        arrays = self._restart()
        for action in self._log.load(state):
            arrays, _ = self._step(action)
            heartbeat()
        self._write(arrays, out)
        return self._since * self.num_envs

    def render(self, index: int = 0) -> np.ndarray:
        if self._env.render_mode not in ("rgb_array", "rgb_array_list"):
            raise SettingsError(
                f"env.id={self._id} cannot render images (render_mode={self._env.render_mode!r}). Let it take "
                "render_mode and pass it on."
            )
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            pictures = self._env.render()
        assert pictures is not None
        return as_picture(pictures[index])

    def close(self) -> None:
        unregister([self._env])
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            close_all([self._env])


def _mode(env: gymnasium.vector.VectorEnv[Any, Any, Any], env_id: str) -> AutoresetMode:
    """How a VectorEnv resets environments that have ended."""
    found = (env.metadata or {}).get("autoreset_mode")
    try:
        return found if isinstance(found, AutoresetMode) else AutoresetMode(found)
    except ValueError:
        said = "does not say" if found is None else f"says {found!r} for"
        raise SettingsError(
            f'The VectorEnv of env.id={env_id} {said} metadata["autoreset_mode"], so it is unknown when it resets an '
            f"environment that has ended. Set it to one of {_MODES}."
        ) from None


def _misanswered(env_id: str, method: str, answer: Any, wanted: str) -> SettingsError:
    return SettingsError(
        f"The {method} of env.id={env_id} returned {form_of(answer)}, but a VectorEnv must return {wanted}."
    )
