"""One shard's gymnasium environments, stepped in the calling process."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep.config.boundary import ENVIRONMENT_SETTINGS
from lockstep.config.settings import SettingsError
from lockstep.envs.answers import BOOLS, NUMBERS, flag, form_of, number, register, unregister
from lockstep.envs.atari import atari_protocol
from lockstep.envs.base import Observation, ShardEnv, StepResult
from lockstep.envs.closing import close_all, closed_on_error
from lockstep.envs.construct import construct
from lockstep.envs.convert import ObservationWriter, single_action
from lockstep.envs.curriculum import pack, typed
from lockstep.envs.episodes import ActionLog, Seeds, episode_state
from lockstep.envs.info import EpisodeNumbers
from lockstep.envs.level_cache import LevelCache
from lockstep.envs.pictures import as_picture
from lockstep.envs.settings import EnvConfig
from lockstep.system.output import add_note, reserve_streams


def emulated(env: Any) -> tuple[int, str]:
    """Frames per step and a description of the emulator, for Atari games and Doom's matches; 1 and "" for other
    environments."""
    game: Any = env.unwrapped
    if (tics := getattr(game, "tics_per_action", None)) is not None:
        return tics, f"{tics} tics an action"
    ale, frames = getattr(game, "ale", None), getattr(game, "_frameskip", None)
    if ale is None or not isinstance(frames, int):
        return 1, ""
    longest = ale.getInt("max_num_frames_per_episode") or math.inf
    if game.spec is not None and game.spec.max_episode_steps is not None:
        longest = min(longest, game.spec.max_episode_steps * frames)
    while isinstance(env, gymnasium.Wrapper):
        frames *= env.frame_skip if isinstance(env, gymnasium.wrappers.AtariPreprocessing) else 1
        env = env.env
    return frames, atari_protocol(ale.getFloat("repeat_action_probability"), frames, longest)


class GymShard(ShardEnv):
    """B gymnasium environments in a Python loop. Every episode starts from a new seed and is truncated after
    `reseed_every` steps, which limits the number of steps that a restore has to replay."""

    def __init__(self, config: EnvConfig, *, seeds: Seeds, num_envs: int, render: bool = False) -> None:
        self.num_envs = num_envs
        self._seeds = seeds
        self._config, self._render = config, render
        self._offered: dict[str, Any] = {}
        self._given: list[dict[str, Any]] = []
        """The options that a curriculum gave to the current episode of each environment; empty without a curriculum."""
        self._agents = 1
        """The number of the shard's environments in one element of _envs. They begin and end episodes together."""
        self._envs: list[Any] = []
        with closed_on_error(self._envs):
            seen, self.action_space = self._construct(config, render)
            self._writer = ObservationWriter(seen)
            register(self._envs, config.id)
            # The cache supports neither several agents nor environments that render.
            self._levels = None if render or self._agents > 1 else LevelCache.of(config, self._envs[0])
            """The cache of environments after their resets, if the user wants one."""
        self.observation_space = self._writer.space
        lengths = seeds.first_lengths(num_envs, config.decorrelate)
        self._first_length = np.repeat(lengths[:: self._agents], self._agents)
        self._longest = config.reseed_every
        self._start_level, self._num_levels = config.start_level, config.num_levels
        tells = seeds.first_index == 0
        self._numbers = EpisodeNumbers(config.metrics, num_envs, tells=tells) if config.metrics else None
        self._log = ActionLog()
        self._action: tuple[np.ndarray, ...] = ()
        self._obs: list[Any] = [None] * num_envs
        self._episode = np.zeros(num_envs, np.int64)
        self._steps = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, np.bool_)
        self._gone = np.zeros(num_envs, np.bool_)
        """Environments that have terminated although their episode continues, such as an agent while others play."""

    def _construct(self, config: EnvConfig, render: bool) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Make the environments and add them to _envs; return their observation and action space."""
        for _ in range(self.num_envs):
            self._envs.append(construct(config, render))
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(self._envs[0], name, None), gymnasium.Space):
                raise SettingsError(
                    f"The environment env.id={config.id} has no {name}. Let its constructor set self.{name} to a "
                    "space of gymnasium.spaces."
                )
        self.frames_per_step, self.emulator = emulated(self._envs[0])
        return self._envs[0].observation_space, self._envs[0].action_space

    def reset(self, out: Observation) -> None:
        self._episode[:] = 0
        self._steps[:] = 0
        self._log.clear()
        self._ended[:] = False
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            for j in range(0, self.num_envs, self._agents):
                self._play_one(j, None)
        self._writer.write_list(self._obs, out, self._where)

    def examine(self) -> None:
        self._writer.looks = sys.maxsize

    def _seed(self, j: int) -> int:
        """The seed of the current episode of environment j."""
        seed = int(self._seeds.derive(np.array([j]), self._episode[j : j + 1])[0])
        return self._start_level + seed % self._num_levels if self._num_levels else seed

    def _reset_one(self, j: int, seed: int) -> None:
        """Begin an episode of environment j and its group."""
        if self._given and self._given[j] != self._offered:
            self._rebuild(j, self._offered)
        with seeded("reset(self, *, seed=None, options=None), and pass the seed on with super().reset(seed=seed)"):
            if self._levels is None:
                answer = self._envs[j].reset(seed=seed)
            else:
                given = self._given[j] if self._given else {}
                self._envs[j], answer = self._levels.reset(self._envs[j], seed, given)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise misanswered("reset", answer, "(observation, info), as in gymnasium since 0.26")
        self._obs[j], _ = answer
        if self._numbers is not None:
            self._numbers.begin(j)

    def offer(self, options: dict[str, Any]) -> None:
        self._offered = options
        self._given = self._given or [options] * self.num_envs

    def _rebuild(self, j: int, options: dict[str, Any]) -> None:
        """Replace environment j by one with these options."""
        made = construct(dataclasses.replace(self._config, options={**self._config.options, **options}), self._render)
        reserve_streams()
        with closed_on_error([made]):
            if (made.observation_space, made.action_space) != (self._envs[j].observation_space, self.action_space):
                raise SettingsError(
                    f"The curriculum's options {options} change the observation or action space of env.id="
                    f"{self._config.id}. Return only options that do not change these spaces."
                )
        unregister(self._envs[j : j + 1])
        close_all(self._envs[j : j + 1])
        self._envs[j], self._given[j] = made, options
        register(self._envs[j : j + 1], self._config.id)

    def _step_one(self, j: int, action: tuple[np.ndarray, ...], step: StepResult) -> None:
        """Play one step of environment j and its group; write rewards and ends into step."""
        answer = self._envs[j].step(single_action(self.action_space, action, j))
        try:
            self._obs[j], reward, terminated, truncated, info = answer
        except (TypeError, ValueError):
            wanted = "(observation, reward, terminated, truncated, info), as in gymnasium since 0.26"
            raise misanswered("step", answer, wanted) from None
        step.terminated[j] = terminated if isinstance(terminated, BOOLS) else flag("terminated", terminated)
        step.truncated[j] = truncated if isinstance(truncated, BOOLS) else flag("truncated", truncated)
        step.reward[j] = reward if isinstance(reward, NUMBERS) else number(reward)
        if self._numbers is not None:
            self._numbers.note(j, info)

    def _play_one(self, j: int, step: StepResult | None) -> None:
        """Play one step of environment j, or begin its episode if `step` is None."""
        try:
            if step is None:
                self._reset_one(j, self._seed(j))
            else:
                self._step_one(j, self._action, step)
        except SettingsError as error:
            where = self._where(j, 0 if step is None else int(self._steps[j]) + 1)
            raise type(error)(f"{error} It was {where}.") from error
        except Exception as error:
            add_note(error, self._doing(j, first=step is None))
            raise

    def send(self, action: np.ndarray | tuple[np.ndarray, ...]) -> None:
        parts = action if isinstance(action, tuple) else (action,)
        self._action = tuple(np.asarray(part) for part in parts)
        self._log.append(self._action, self._steps)

    def recv(self, out: Observation) -> StepResult:
        step = self._nothing_yet()
        self._episode += step.first
        with ENVIRONMENT_SETTINGS.applied(thorough=self._writer.looks > 0):
            for j in range(0, self.num_envs, self._agents):
                self._play_one(j, None if step.first[j] else step)
        self._steps = np.where(step.first, 0, self._steps + 1)
        self._writer.write_list(self._obs, out, self._where)
        shortened = (self._episode == 0) & (self._steps == self._first_length) & (self._steps > 0)
        cut = shortened | (self._steps == self._longest)
        terminated = step.terminated | (cut & self._gone)
        step = step._replace(terminated=terminated, truncated=(step.truncated | cut) & ~terminated)
        self._ended = step.terminated | step.truncated
        if self._numbers is None:
            return step
        self._numbers.add()
        return step._replace(metrics=self._numbers.values(self._ended, shortened))

    def _doing(self, j: int, *, first: bool) -> str:
        """What environment j was doing when it raised an error."""
        when = "when it was reset"
        if not first:
            actions = [single_action(self.action_space, self._action, row) for row in range(j, j + self._agents)]
            when = f"in step {self._steps[j] + 1} of an episode, upon action {', '.join(map(str, actions))}"
        environment = f"Environment {self._seeds.first_index + j}"
        return f"{environment} raised this error {when}. The episode's seed is {self._seed(j)}."

    def _where(self, j: int, step: int | None = None) -> str:
        """A description of environment j and of a step of its episode, by default the last step."""
        step = int(self._steps[j]) if step is None else step
        when = f"in step {step} of" if step else "at the start of"
        return f"environment {self._seeds.first_index + j}, {when} an episode that begins from seed {self._seed(j)}"

    def _nothing_yet(self) -> StepResult:
        no = np.zeros((3, self.num_envs), np.bool_)
        return StepResult(np.zeros(self.num_envs, np.float32), no[0], no[1], self._ended, no[2])

    def state_dict(self) -> dict[str, np.ndarray]:
        state = episode_state(self._episode, self._steps, self._ended, self._log)
        if self._given:
            state["options"] = np.stack([pack(given).numpy() for given in self._given])
        return state

    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
    ) -> int:
        self._episode = state["episode"].astype(np.int64)
        steps = state["steps"].astype(np.int64)
        self._ended = state["ended"].astype(np.bool_)
        actions = self._log.load(state)
        for j, row in enumerate(state["options"].tolist() if self._given else ()):
            given = typed(self._offered, row)
            if given != self._given[j]:
                self._rebuild(j, given)
        ignored = self._nothing_yet()
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            for j in range(0, self.num_envs, self._agents):
                self._offered = self._given[j] if self._given else {}
                self._reset_one(j, self._seed(j))
                for action in actions[len(actions) - int(steps[j]) :]:
                    self._step_one(j, action, ignored)
                    if self._numbers is not None:
                        self._numbers.add()
                    heartbeat()
        self._steps = steps
        self._writer.write_list(self._obs, out, self._where)
        return int(steps.sum())

    def render(self, index: int = 0) -> np.ndarray:
        env = self._envs[index // self._agents]
        mode = getattr(env, "render_mode", None)
        if mode not in ("rgb_array", "rgb_array_list"):
            raise SettingsError(
                f"This environment cannot render images (render_mode={mode!r}). Pass render=True to "
                "lockstep.envs.make, and let a callable of your own take render_mode and pass it on."
            )
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            return as_picture(env.render())

    def close(self) -> None:
        unregister(self._envs)
        envs, self._envs = self._envs, []
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            close_all(envs)


def misanswered(method: str, answer: Any, wanted: str) -> SettingsError:
    """The error for an environment's method that returned something else than `wanted`."""
    return SettingsError(
        f"The environment's {method} returned {form_of(answer)}, but must return {wanted}. Fix the environment, or "
        "wrap it."
    )


@contextlib.contextmanager
def seeded(form: str) -> Iterator[None]:
    """Raise SettingsError if an environment's reset, which is called inside, takes no seed. form: how to define it."""
    try:
        yield
    except TypeError as error:
        if "unexpected keyword argument 'seed'" not in str(error):
            raise
        raise SettingsError(
            f"The environment's reset does not take a seed ({error}), so no episode could be repeated. Define it as "
            f"{form}."
        ) from error
