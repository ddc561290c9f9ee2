"""Atari games, stepped by the C++ vector environment of the Arcade Learning Environment (extra `atari`)."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import ale_py
import numpy as np
from ale_py import roms
from ale_py.registration import rom_id_to_name
from ale_py.vector_env import AtariVectorEnv

from lockstep.config.settings import SettingsError
from lockstep.envs.atari import (
    LIFE_LOSS,
    LONGEST,
    PROTOCOLS,
    atari_name,
    atari_protocol,
    check_numbers,
    fire_after_life,
)
from lockstep.envs.base import Adapter, Observation, ShardEnv, StepResult
from lockstep.envs.convert import ObservationWriter
from lockstep.envs.episodes import ActionLog, Seeds
from lockstep.envs.settings import EnvConfig

_OURS = {
    "game": "--env.id",
    "num_envs": "--env.num-envs",
    "batch_size": "--env.num-envs",
    "num_threads": "the layout's env_threads",
    "autoreset_mode": "nothing: it is always next-step",
    "episodic_life": "--env.protocol classic",
    "life_loss_info": "--env.protocol classic",
    "reward_clipping": "--env.reward-clip",
    "continuous": "nothing: only discrete actions are supported",
    "continuous_action_threshold": "nothing: only discrete actions are supported",
}


def games() -> dict[str, str]:
    """Names of the games that ALE ships, each with its ROM's id."""
    multiplayer_only = {"combat", "joust", "maze_craze", "warlords"}
    return {rom_id_to_name(rom): rom for rom in roms.get_all_rom_ids() if rom not in multiplayer_only}


def check_options(options: dict[str, Any]) -> None:
    """Raise SettingsError for an option that AtariVectorEnv does not have, or that another setting decides."""
    allowed = sorted(set(inspect.signature(AtariVectorEnv.__init__).parameters) - set(_OURS) - {"self"})
    for name in options:
        if name in _OURS:
            raise SettingsError(f"env.options cannot set {name!r} of ALE's vector environment: use {_OURS[name]}.")
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise SettingsError(
                f"env.options names {name!r}, which ALE's vector environment does not have.{hint} "
                f"It has {', '.join(allowed)}."
            )
    check_numbers(options)
    for name in ("grayscale", "maxpool", "use_fire_reset", "full_action_space"):
        if options.get(name, True) not in (True, False):  # 1 and 0 are equal to these
            raise SettingsError(f"env.options.{name}={options[name]!r} must be true or false.")


# A seeded reset loads the ROM again and costs as much as 200 to 250 steps; an unseeded one costs about 15. So an
# environment gets a new seed at the first end of an episode after this many steps, or EnvConfig.reseed_every if less.
RESEED_AFTER = 4096


class Ale(Adapter):
    """Atari games by name."""

    threads = True
    decorrelates = True

    def ids(self) -> list[str]:
        return list(games())

    def games(self) -> list[str]:
        return list(games())

    def find(self, env_id: str) -> str | None:
        return atari_name(env_id, games())

    def make(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> AleShard:
        return AleShard(config, seeds=seeds, num_envs=num_envs, threads=threads, render=render)


class AleShard(ShardEnv):
    """B games of one ROM. Each environment starts from its seed. At the end of the first episode after RESEED_AFTER
    steps, it gets a new seed. This cuts no episode. Until then its random stream continues from episode to episode.

    The library resets an environment on the step after its end. If a new seed is due, a seeded reset follows at once,
    and its observation is returned.
    """

    def __init__(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> None:
        check_options(config.options)
        limit: dict[str, Any] = {"max_num_frames_per_episode": LONGEST}
        settings = {"game": games()[config.id], **limit, **PROTOCOLS[config.protocol], **config.options}
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        fixed: dict[str, Any] = {"reward_clipping": False, "episodic_life": False, "num_threads": threads}
        self._envs = [AtariVectorEnv(num_envs=num_envs, **settings, **fixed)]
        if render:
            # A second environment with equal seeds and actions plays the same game and draws it in color at full size.
            color = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1, "maxpool": False}
            self._envs.append(AtariVectorEnv(num_envs=num_envs, **(settings | color), **fixed))
        self.num_envs = num_envs
        self._writer = ObservationWriter(self._envs[0].single_observation_space)
        self.observation_space = self._writer.space
        self.action_space = self._envs[0].single_action_space
        self.frames_per_step = int(settings.get("frameskip", 4))
        self.emulator = atari_protocol(
            settings.get("repeat_action_probability", 0.0),
            self.frames_per_step,
            settings["max_num_frames_per_episode"],
        )
        self._seeds = seeds
        self._first_length = seeds.first_lengths(num_envs, config.decorrelate)
        self._reseed_after = min(config.reseed_every, RESEED_AFTER)
        self._life_loss = config.protocol in LIFE_LOSS
        self._fire = fire_after_life(config.protocol, config.id, num_envs)
        self._log = ActionLog()
        self._count = np.zeros(num_envs, np.int64)  # seeded resets so far
        self._steps = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, np.bool_)
        self._lives = np.zeros(num_envs, np.int32)
        self._picture: np.ndarray | None = None

    def reset(self, out: Observation) -> None:
        self._count[:] = 0
        self._steps[:] = 0
        self._ended[:] = False
        self._log.clear()
        if self._fire is not None:
            self._fire.reset()
        obs, info = self._seeded_reset(np.ones(self.num_envs, np.bool_))
        self._lives = info["lives"]
        self._writer.write(obs, out)

    def _seeded_reset(self, mask: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        index = np.flatnonzero(mask)
        seed = self._seeds.derive(index, self._count[index])
        results = [env.reset(seed=seed, options={"reset_mask": mask}) for env in self._envs]
        self._picture = np.asarray(results[-1][0])
        return results[0]  # type: ignore[return-value]

    def send(self, action: np.ndarray) -> None:
        action = np.asarray(action, np.int32)
        if self._fire is not None:
            action = self._fire.replace(action)
        self._log.append((action,), self._steps)
        for env in self._envs:
            env.send(action)

    def _recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        results = [env.recv() for env in self._envs]
        self._picture = results[-1][0]
        return results[0]

    def recv(self, out: Observation) -> StepResult:
        obs, reward, terminated, truncated, info = self._recv()
        first, going = self._ended, ~self._ended
        # The library does not know when decorrelation cuts an episode, so a seeded reset follows the first episode.
        cut_first = (self._count == 0) & (self._first_length > 0)
        renew = first & ((self._steps >= self._reseed_after) | cut_first)
        self._steps += 1
        if renew.any():
            self._count[renew] += 1
            self._steps[renew] = 0
            obs, info = self._seeded_reset(renew)
        self._writer.write(obs, out)
        terminated = terminated & going
        cut = cut_first & (self._steps == self._first_length)
        truncated = (truncated | cut) & going & ~terminated
        self._ended = terminated | truncated
        lives = info["lives"]
        if self._life_loss:
            # Some games stay at zero lives for some frames before they end. This is the end, not a lost life.
            life_lost = (lives < self._lives) & (lives > 0) & going & ~self._ended
        else:
            life_lost = np.zeros(self.num_envs, np.bool_)
        self._lives = lives
        reward = np.where(first, 0, reward)
        if self._fire is not None:
            reward, pressed = self._fire.take(reward, life_lost, self._ended)
            first = first | pressed
        return StepResult(reward.astype(np.float32), terminated, truncated, first, life_lost)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {
            "count": self._count.copy(),
            "steps": self._steps.copy(),
            "ended": self._ended.copy(),
            **(self._fire.state() if self._fire is not None else {}),
            **self._log.last(int(self._steps.max())),
        }

    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
    ) -> int:
        self._count = state["count"].astype(np.int64)
        self._steps = state["steps"].astype(np.int64)
        self._ended = state["ended"].astype(np.bool_)
        actions = self._log.load(state)
        # Environments were seeded at different times, so each gets its seeded reset where its actions begin. Its steps
        # before that are discarded.
        begin = len(actions) - self._steps
        obs, info = self._seeded_reset(np.ones(self.num_envs, np.bool_))
        for t, (action,) in enumerate(actions):
            if t and (begin == t).any():
                self._seeded_reset(begin == t)
            for env in self._envs:
                env.send(action)
            obs, _, _, _, info = self._recv()
            heartbeat()
        if len(actions) and (begin == len(actions)).any():
            obs, info = self._seeded_reset(begin == len(actions))
        self._lives = info["lives"]
        if self._fire is not None:
            self._fire.load(state)
        self._writer.write(obs, out)
        return len(actions) * self.num_envs

    def render(self, index: int = 0) -> np.ndarray:
        if len(self._envs) == 1:
            raise SettingsError("This environment was made without rendering: pass render=True to lockstep.envs.make.")
        assert self._picture is not None
        return self._picture[index, -1]

    def close(self) -> None:
        for env in self._envs:
            env.close()
        self._envs = []
