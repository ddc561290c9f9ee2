"""A walk whose goal moves away as the agent succeeds: an environment, and a curriculum by its metrics.

    lockstep train ppo-cartpole --env.id examples/curriculum.py:Walk --env.adapter gymnasium --env.metrics success \
        --env.curriculum distance=2 --curriculum examples/curriculum.py:harder --total-steps 20k
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

FURTHEST = 8


class Walk(gymnasium.Env[np.ndarray, np.int64]):
    """Reach `distance` to the right within 20 steps."""

    def __init__(self, distance: int = FURTHEST) -> None:
        self.distance = distance
        self.observation_space = gymnasium.spaces.Box(-30, 30, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def _observe(self) -> np.ndarray:
        return np.array([self.place, self.distance], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(-1, 2)), 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place += 2 * int(action) - 1
        self.steps += 1
        reached = self.place >= self.distance
        return self._observe(), float(reached), reached, self.steps >= 20, {"success": float(reached)}


def harder(metrics: dict[str, float], options: dict[str, Any]) -> dict[str, Any]:
    """Options for the next episodes: one step further once four of five episodes succeed."""
    if metrics.get("env/success", 0.0) > 0.8:
        return {"distance": min(FURTHEST, options["distance"] + 1)}
    return options
