"""The common parts of Atari's adapters: protocols, options that libraries do not check, and FIRE after a lost life.

Shape legend: B environments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError

PROTOCOLS: dict[str, dict[str, Any]] = {
    "none": {},
    "machado": {
        "repeat_action_probability": 0.25,
        "full_action_space": True,
        "noop_max": 1,  # none; in games without FIRE, EnvPool plays one
    },
    "classic": {
        "repeat_action_probability": 0.0,
        "full_action_space": False,
        "noop_max": 30,
    },
}
"""The options of each protocol, which the libraries call by the same names."""
PROTOCOLS["baselines"] = PROTOCOLS["classic"]
LONGEST = 108_000
"""The most frames of an episode under the protocols; in ALE's environment also without one."""
LIFE_LOSS = ("classic", "baselines")
"""Atari protocols under which a lost life ends the episode for the agent."""


def atari_protocol(sticky: float, skip: int, longest: float) -> str:
    """A description of the settings on which scores depend most.

    Args:
        sticky: probability that the last action is repeated.
        skip: frames per action.
        longest: the most frames of an episode; infinite for no limit.
    """
    limit = f"at most {longest:,} frames" if math.isfinite(longest) else "without a limit of frames"
    return f"sticky actions {sticky:g}, {skip} frames an action, {limit}"


def atari_name(env_id: str, games: Iterable[str]) -> str | None:
    """The name of the Atari game of an id such as ms_pacman or Pong-v5."""
    return {game.lower(): game for game in games}.get(env_id.removesuffix("-v5").replace("_", "").lower())


_WHOLE = {
    "stack_num": 1,
    "img_height": 1,
    "img_width": 1,
    "frame_skip": 1,
    "frameskip": 1,
    "noop_max": 0,
    "max_episode_steps": 0,
    "max_num_frames_per_episode": 0,
}
"""Options that C++ environments do not check, with their least values. Wrong values crash or hang the environments."""


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for numbers that would crash a library or that it would misinterpret."""
    for name, least in _WHOLE.items():
        value = options.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SettingsError(f"env.options.{name}={value!r} must be a whole number of at least {least}.")
    sticky = options.get("repeat_action_probability", 0.0)
    if not isinstance(sticky, (int, float)) or isinstance(sticky, bool) or not 0 <= sticky <= 1:
        raise SettingsError(f"env.options.repeat_action_probability={sticky!r} must lie between 0 and 1.")


FIRE = 1
"""The action's index in minimal action sets and in the full one."""
WITHOUT_FIRE = frozenset(
    {"Asterix", "CrazyClimber", "Freeway", "Frogger", "JourneyEscape", "Koolaid", "KungFuMaster"}
    | {"LostLuggage", "MsPacman", "Pacman", "Skiing", "Surround", "Tutankham"}
)
"""Games whose minimal action set lacks FIRE."""


class FireAfterLife:
    """Replaces the action after a lost life by FIRE, like the wrappers of OpenAI's Baselines, which CleanRL and
    Stable-Baselines3 also use. The agent did not choose this action, so the step counts as a reset step
    (StepResult.first), unless it ends the game or loses another life. Its reward is added to the next step's.

    Args:
        num_envs: B.
    """

    def __init__(self, num_envs: int) -> None:
        self._due = np.zeros(num_envs, np.bool_)
        """bool [B]: whether the next action is FIRE."""
        self._owed = np.zeros(num_envs, np.float64)
        """float64 [B]: rewards of the last step that are added to the next step's."""

    def reset(self) -> None:
        """Clear the state. Called when all environments start anew."""
        self._due[:], self._owed[:] = False, 0.0

    def replace(self, action: np.ndarray) -> np.ndarray:
        """The actions [B] to send."""
        return np.where(self._due, FIRE, action).astype(action.dtype)

    def take(self, reward: np.ndarray, life_lost: np.ndarray, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Process the results of a step.

        Args:
            reward: [B], 0 where the library reset the environment.
            life_lost: bool [B].
            ended: bool [B], where an episode ended.

        Returns:
            The rewards to report [B]; bool [B], where FIRE was pressed and the step counts as a reset step.
        """
        pressed = self._due & ~life_lost & ~ended
        reward = reward + self._owed
        self._owed = np.where(pressed, reward, 0.0)
        self._due = life_lost.copy()
        return np.where(pressed, 0.0, reward), pressed

    def state(self) -> dict[str, np.ndarray]:
        return {"fire.due": self._due.copy(), "fire.owed": self._owed.copy()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self._due = state["fire.due"].astype(np.bool_)
        self._owed = state["fire.owed"].astype(np.float64)


def fire_after_life(protocol: str, game: str, num_envs: int) -> FireAfterLife | None:
    """The replacement of actions under `baselines`, if the game has FIRE; otherwise None."""
    return FireAfterLife(num_envs) if protocol == "baselines" and game not in WITHOUT_FIRE else None
