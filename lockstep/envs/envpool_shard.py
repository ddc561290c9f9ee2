"""One shard's environments in an EnvPool pool."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from typing import Any

import envpool
import gymnasium
import numpy as np
from envpool.registration import registry as _registry

from lockstep.config.settings import SettingsError
from lockstep.envs.atari import LIFE_LOSS, LONGEST, PROTOCOLS, atari_protocol, check_numbers, fire_after_life
from lockstep.envs.base import Observation, StepResult
from lockstep.envs.convert import ObservationWriter
from lockstep.envs.episodes import Seeds
from lockstep.envs.info import EpisodeNumbers
from lockstep.envs.pictures import as_picture
from lockstep.envs.qt import load_qt, missing_qt
from lockstep.envs.restarting import RestartingShard
from lockstep.envs.settings import EnvConfig

ATARI, PROCGEN = "envpool.atari", "envpool.procgen"

_OURS = {
    "num_envs": "--env.num-envs",
    "batch_size": "--env.num-envs",
    "num_threads": "the layout's env_threads",
    "seed": "--seed",
    "env_seed": "--seed",
    "episodic_life": "--env.protocol classic",
    "zero_discount_on_life_loss": "--env.protocol classic",
    "reward_clip": "--env.reward-clip",
    "task": "--env.id",
    "base_path": "the variable ENVPOOL_ASSETS_PATH",
    "gym_reset_return_info": "nothing: it is always on",
}


def settings_of(config: EnvConfig) -> dict[str, Any]:
    """The options that an experiment gives EnvPool: those of its protocol, overridden by its own."""
    settings: dict[str, Any] = {**PROTOCOLS[config.protocol], **config.options}
    if config.protocol != "none":
        settings.setdefault("max_episode_steps", max(1, LONGEST // settings.get("frame_skip", 4)))
    return settings


def family(env_id: str) -> str:
    """The module of EnvPool with this id, such as ATARI; "" for other ids."""
    return _registry.specs[env_id][0] if env_id in _registry.specs else ""


class EnvPoolShard(RestartingShard):
    """B environments of one pool. EnvPool seeds environments only when it makes a pool, so a new pool replaces the old
    one every `reseed_every` steps. Until then an environment's random stream continues from episode to episode."""

    def __init__(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> None:
        super().__init__(config.reseed_every, num_envs)
        self._id = config.id if config.id in _registry.specs else f"{config.id}-v5"
        check_numbers(config.options)
        self._settings = settings_of(config)
        if config.num_levels:
            self._settings |= {"num_levels": config.num_levels, "start_level": config.start_level}
        self._render = render
        self._threads = threads
        self._life_loss = config.protocol in LIFE_LOSS
        self._fire = fire_after_life(config.protocol, config.id, num_envs)
        self._seeds = seeds
        tells = seeds.first_index == 0
        self._numbers = EpisodeNumbers(config.metrics, num_envs, tells=tells) if config.metrics else None
        self._order = np.arange(num_envs, dtype=np.int32)
        self._info: dict[str, np.ndarray] = {}
        """The library's info for the last observations."""
        with warnings.catch_warnings():  # EnvPool's spaces warn about the precision of their bounds
            warnings.simplefilter("ignore")
            spec = self._make_spec()
            self._writer = ObservationWriter(spec.gymnasium_observation_space)
            self.action_space = spec.gymnasium_action_space
        self.frames_per_step = int(getattr(spec.config, "frame_skip", 4)) if self._is_atari else 1
        if self._is_atari:
            steps, sticky = spec.config.max_episode_steps, spec.config.repeat_action_probability
            self.emulator = atari_protocol(sticky, self.frames_per_step, steps * self.frames_per_step)
        self.observation_space = self._writer.space
        self._pool: Any = None  # made by reset, which knows the seeds

    def _elsewhere(self) -> str:
        """A sentence that names the adapter whose options the user may have meant; "" if there is none."""
        known = self._id in gymnasium.registry
        return " --env.adapter gymnasium takes those of gymnasium's (another result)." if known else ""

    @property
    def _is_atari(self) -> bool:
        return family(self._id) == ATARI

    def _make_spec(self) -> Any:
        needs_qt = family(self._id) == PROCGEN
        try:
            if needs_qt:
                load_qt()
            known = set(envpool.make_spec(self._id).config._fields)
            for name in self._settings:
                if name in _OURS:
                    raise SettingsError(f"env.options cannot set {name!r} of EnvPool's {self._id}: use {_OURS[name]}.")
                if name not in known:
                    allowed = sorted(known - set(_OURS))
                    close = difflib.get_close_matches(name, allowed, 1)
                    hint = f" Did you mean {close[0]!r}?" if close else ""
                    raise SettingsError(
                        f"env.options names {name!r}, which EnvPool's {self._id} does not have.{hint} "
                        f"It has {', '.join(allowed)}.{self._elsewhere()}"
                    )
            if self._is_atari and self._settings.get("noop_max", 30) < 1:
                raise SettingsError(
                    "env.options.noop_max must be at least 1 with EnvPool, whose reset crashes the process at 0. "
                    "noop_max=1 plays no no-ops or, in games without FIRE, one."
                )
            return envpool.make_spec(self._id, num_envs=self.num_envs, batch_size=self.num_envs, **self._settings)
        except ImportError as error:  # a system library that a family of environments needs
            hint = f" {missing_qt()}" if needs_qt else ""
            raise SettingsError(f"EnvPool cannot serve {self._id} on this machine: {error}{hint}") from error
        except (TypeError, ValueError) as error:
            raise SettingsError(f"EnvPool's {self._id} refuses env.options {self._settings}: {error}") from error

    def _make_pool(self) -> Any:
        index = np.arange(self.num_envs)
        seed = self._seeds.derive(index, np.full(self.num_envs, self._count))
        settings = dict(self._settings)
        if self._is_atari:
            settings |= {"reward_clip": False, "episodic_life": False}
        if self._render:
            settings["render_mode"] = "rgb_array"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pool = envpool.make_gymnasium(
                self._id,
                num_envs=self.num_envs,
                batch_size=self.num_envs,
                num_threads=self._threads,
                env_seed=seed.tolist(),
                **settings,
            )
            assert (
                pool.observation_space is not None
            )  # EnvPool makes it on first use, so use it where warnings are silenced
            *_, (self._action_name, of_action) = pool.spec.action_array_spec.items()
            self._action_type = of_action.dtype
        return pool

    def _restart(self) -> Any:
        self.close()
        self._pool = self._make_pool()
        self._begin()
        obs, info = self._pool.reset()
        if len(info.get("players", info)["env_id"]) != self.num_envs:
            raise SettingsError(f"{self._id} has several players in one environment, which is not supported yet.")
        self._info = info
        if self._fire is not None:
            self._fire.reset()
        if self._numbers is not None:
            self._numbers.begin(self._order)
        return obs

    def _write(self, obs: Any, out: Observation) -> None:
        """Convert the library's observations [B, ...] into out. A subclass may add entries."""
        self._writer.write(obs, out)

    def _to_library(self, action: np.ndarray) -> np.ndarray:
        """Convert actions [B, ...] of action_space to the library's actions."""
        return action

    def _rewards(self, reward: np.ndarray, terminated: np.ndarray, before: dict[str, np.ndarray]) -> np.ndarray:
        """Rewards [B] of the last step. A subclass may compute rewards that the library does not return.

        Args:
            reward: the library's rewards [B].
            terminated: bool [B]
            before: the info of the step before; `_info` is the info of this step.
        """
        return reward

    def send(self, action: np.ndarray | tuple[np.ndarray, ...]) -> None:
        assert isinstance(action, np.ndarray), "EnvPool has no environments with Tuple actions"
        action = action.astype(self.action_space.dtype)
        if self._fire is not None:
            action = self._fire.replace(action)
        self._log.append((action,))
        self._send(action)
        self._since += 1

    def _send(self, action: np.ndarray) -> None:
        # Send all keys, because EnvPool would make a dict of all its settings at every step to add missing ones.
        action = np.ascontiguousarray(self._to_library(action), self._action_type)
        self._pool.send({self._action_name: action, "env_id": self._order, "players.env_id": self._order})

    def recv(self, out: Observation) -> StepResult:
        obs, reward, terminated, truncated, info = self._pool.recv()
        # Pools with batch_size == num_envs return environments in order. This class relies on it.
        assert (info["env_id"] == self._order).all()
        before, self._info = self._info, info
        self._write(obs, out)
        first = self._ended
        going = ~first
        terminated = terminated & going
        truncated = truncated & going & ~terminated
        self._ended = terminated | truncated
        if self._life_loss:
            lives = info["lives"]
            # Some games stay at zero lives for some frames before they end: that is the end, not a lost life.
            life_lost = (lives < before["lives"]) & (lives > 0) & going & ~self._ended
        else:
            life_lost = np.zeros(self.num_envs, np.bool_)
        reward = self._rewards(reward, terminated, before)
        reward = np.where(first, 0, reward)
        self._read_numbers(first)
        metrics = self._numbers.values(self._ended) if self._numbers is not None else None
        if self._fire is not None:
            reward, pressed = self._fire.take(reward, life_lost, self._ended)
            first = first | pressed
        return StepResult(reward.astype(np.float32), terminated, truncated, first, life_lost, metrics)

    def _read_numbers(self, first: np.ndarray) -> None:
        """Read the metrics of a step; first: bool [B], as in StepResult."""
        if self._numbers is not None:
            self._numbers.begin(first)
            self._numbers.note_all(self._info, ~first)
            self._numbers.add()

    def state_dict(self) -> dict[str, np.ndarray]:
        state = super().state_dict()
        return state if self._fire is None else {**state, **self._fire.state()}

    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
    ) -> int:
        self._count = int(state["count"])
        obs, ended = self._restart(), self._ended
        for (action,) in self._log.load(state):
            self._send(action)
            obs, _, terminated, truncated, self._info = self._pool.recv()
            self._read_numbers(ended)
            ended = (terminated | truncated) & ~ended
            heartbeat()
        self._since = int(state["since"])
        self._ended = state["ended"].astype(np.bool_)
        if self._fire is not None:
            self._fire.load(state)
        self._write(obs, out)
        return self._since * self.num_envs

    def render(self, index: int = 0) -> np.ndarray:
        if not self._render:
            raise SettingsError("This environment was made without rendering: pass render=True to lockstep.envs.make.")
        return as_picture(self._pool.render(env_ids=[index])[0])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
