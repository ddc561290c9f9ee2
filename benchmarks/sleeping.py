"""An environment whose steps sleep 10 to 30 ms, as if a simulator on another machine computed them."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

SECONDS = 0.020
"""Of a step, on average."""


class Sleeping(gymnasium.Env[np.ndarray, np.int64]):
    """Random observations, and a reward for the action that the first of them asks for. Episodes have 50 steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps, self._seen = 0, self._look()
        return self._seen, {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(SECONDS * self.np_random.uniform(0.5, 1.5))
        reward = float((self._seen[0] > 0) == bool(action))
        self._steps, self._seen = self._steps + 1, self._look()
        return self._seen, reward, self._steps == 50, False, {}

    def _look(self) -> np.ndarray:
        return self.np_random.uniform(-1.0, 1.0, 8).astype(np.float32)
