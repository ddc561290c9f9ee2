"""Environments that are told goals: what would have been earned, had another goal been the wanted one.

They follow gymnasium-robotics' GoalEnv: observations have the entries `observation`, `achieved_goal` and
`desired_goal`, and `compute_reward(achieved_goal, desired_goal, info)` takes batches. `compute_terminated` may, too.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from lockstep.envs.base import EnvConfig
from lockstep.envs.gym import construct
from lockstep.settings import SettingsError

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"


class Goals:
    """An environment's reward as a function of goals.

    Args:
        config: the environment, which is that of training.

    Raises:
        SettingsError: it is not told goals, or is not served by gymnasium.
    """

    def __init__(self, config: EnvConfig) -> None:
        env: Any = construct(config.training()).unwrapped if config.adapter == "gymnasium" else None
        space = getattr(env, "observation_space", None)
        entries = set(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else set()
        if not {ACHIEVED, DESIRED} <= entries or not hasattr(env, "compute_reward"):
            raise SettingsError(
                f"algorithm.replay.hindsight needs an environment that is told goals, and env.id={config.id} is none. "
                f"Its observations need the entries {ACHIEVED} and {DESIRED}, and it the method compute_reward, as "
                "gymnasium_robotics.GoalEnv has them, served by gymnasium. Use lockstep/BitFlip-v0, for example, or "
                "--algorithm.replay.hindsight 0."
            )
        self._env = env
        self._clip = config.reward_clip

    def reward(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        """float32 [n]: for having come to goals [n, ...] that were achieved, where these [n, ...] were desired."""
        reward = np.asarray(self._env.compute_reward(achieved, desired, {}), np.float32)
        return np.clip(reward, -1.0, 1.0) if self._clip else reward

    def terminated(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        """bool [n]: whether the episode would have ended there."""
        compute = getattr(self._env, "compute_terminated", None)
        if compute is None:
            return np.zeros(len(achieved), bool)
        ends = np.asarray(compute(achieved, desired, {}), bool)
        if ends.shape == (len(achieved),):
            return ends
        # gymnasium-robotics' mazes take one goal alone, and would judge a batch as if it were one.
        return np.array([bool(compute(a, d, {})) for a, d in zip(achieved, desired, strict=True)])

    def close(self) -> None:
        """Release the environment."""
        self._env.close()
