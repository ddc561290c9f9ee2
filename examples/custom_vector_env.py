"""The task of custom_env.py for a whole batch: one object steps all environments of a shard.

lockstep train examples/custom_vector_env.py:recipe
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from gymnasium import spaces

from lockstep import recipes
from lockstep.envs import EnvConfig
from lockstep.envs.batch import uniform
from lockstep.experiment import Experiment
from lockstep.scheme import Scheme


class Reach:
    """Point masses in a plane: accelerate each to the origin, and keep it there. The time limit truncates."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, num_envs: int, steps: int = 100) -> None:
        self.num_envs, self._longest = num_envs, steps
        self._steps = np.zeros(num_envs, np.int64)
        self._position, self._velocity = np.zeros((2, num_envs, 2))

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        self._steps[rows] = 0
        self._position[rows] = uniform(seeds, 2, -1.0, 1.0)
        self._velocity[rows] = 0.0
        return self._observe()[rows]

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, None]:
        self._steps += 1
        self._velocity = 0.95 * self._velocity + 0.05 * np.clip(actions, -1.0, 1.0)
        self._position += self._velocity
        distance = np.sqrt((self._position**2).sum(1))
        lost = distance > 3.0
        # None: lockstep resets those that ended. A batch that does it by itself returns their last observations here.
        return self._observe(), np.where(lost, -10.0, -distance / 10), lost, self._steps >= self._longest, None

    def _observe(self) -> np.ndarray:
        return np.concatenate([self._position, self._velocity], 1).astype(np.float32)


def recipe() -> Experiment:
    """PPO with Gaussian actions on 4,096 point masses."""
    base = recipes.ppo_mujoco()
    return base.replace(
        env=EnvConfig.of(Reach, num_envs=4096),
        algorithm=dataclasses.replace(base.algorithm, rollout=16, epochs=4, learning_rate=1e-3),
        scheme=Scheme(shards=4),
        total_steps=5_000_000,
    )
