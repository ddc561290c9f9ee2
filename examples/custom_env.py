"""Your own environment: steer a point to a target. Any gymnasium.Env works.

lockstep train examples/custom_env.py:recipe --layout processes:2
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep import recipes
from lockstep.envs import EnvConfig
from lockstep.experiment import Experiment


class Reach(gymnasium.Env[np.ndarray, np.ndarray]):
    """A point mass in a plane: accelerate it to the origin, and keep it there.

    Observations are position and velocity, float32 [4]; actions are accelerations in [-1, 1], float32 [2]. All
    randomness comes from self.np_random, which reset(seed=...) seeds: that is what makes runs reproducible.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (gymnasium's own declaration)

    def __init__(self, steps: int = 100, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.render_mode = render_mode
        self._steps, self._step = steps, 0
        self._position, self._velocity = np.zeros(2), np.zeros(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        self._position = self.np_random.uniform(-1.0, 1.0, 2)
        self._velocity = np.zeros(2)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        self._velocity = 0.95 * self._velocity + 0.05 * np.clip(action, -1.0, 1.0)
        self._position = self._position + self._velocity
        distance = float(np.linalg.norm(self._position))
        lost = distance > 3.0
        # The time limit truncates: the point could have flown on, so its value is bootstrapped. Losing it terminates.
        return self._observe(), -10.0 if lost else -distance / 10, lost, self._step >= self._steps, {}

    def _observe(self) -> np.ndarray:
        return np.concatenate([self._position, self._velocity]).astype(np.float32)

    def render(self) -> Any:
        picture = np.full((128, 128, 3), 255, np.uint8)
        for point, color in (((0.0, 0.0), (40, 160, 60)), (self._position, (30, 60, 200))):
            x, y = (np.clip((np.asarray(point) + 3) / 6, 0, 1) * 123).astype(int)
            picture[y : y + 5, x : x + 5] = color
        return picture


def recipe() -> Experiment:
    """PPO with Gaussian actions on the point mass."""
    experiment = recipes.ppo_mujoco()
    return experiment.replace(
        env=EnvConfig.of(Reach, num_envs=8),
        algorithm=dataclasses.replace(experiment.algorithm, minibatches=8),
        total_steps=200_000,
    )
