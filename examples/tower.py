"""A tower whose floors an agent climbs one after the other, and a curriculum that starts at floors reached before.

The levels and the rule follow Obstacle Tower in the PyTorchRL paper (Bou et al. 2020, arXiv:2007.02622, section 4.3):
training has the seeds 0 to 99, tests the seeds 1001 to 1005, and each training episode starts at a floor between 0 and
the highest one that was reached before. Each floor is a dark room with a door, which the agent feels only from the
next cell. What it sees is the floor's texture. So it can learn the doors of the training levels by heart, or learn to
search, which also works in others.

    lockstep train ppo-memory --model.core none --algorithm.discount 0.99 --algorithm.gae-lambda 0.95 \
        --env.id examples/tower.py:Tower --env.adapter gymnasium --env.num-levels 100 --env.curriculum highest=0 \
        --env.metrics passed --curriculum examples/tower.py:higher --total-steps 400k --checkpoint-every 10 \
        --keep-checkpoints 100 --run runs/tower
    lockstep eval runs/tower --checkpoint all --levels 1001..1005 --attempts 5 --plot test.png
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np

FLOORS, SIZE, STEPS = 10, 4, 12
"""Floors, cells along each side of a room, and steps that an episode has for each floor."""
_MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))


class Tower(gymnasium.Env[np.ndarray, np.int64]):
    """Climb as many floors as you can. The reward is 1 for each.

    An episode has STEPS steps, and STEPS more for each floor. It starts at a floor between 0 and `highest`; the info
    reports `passed`, the floor, as long as it is above `highest`.
    """

    def __init__(self, highest: int = 0) -> None:
        self.highest = highest
        self.observation_space = gymnasium.spaces.Box(-4.0, 4.0, (2 * SIZE + 4 + 8,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(4)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.doors = self.np_random.integers(SIZE, size=(FLOORS, 2))
        self.textures = self.np_random.normal(size=(FLOORS, 8)).clip(-4, 4)
        self.floor = int(self.np_random.integers(self.highest + 1))
        self.left = STEPS
        self._enter()
        return self._observe(), {}

    def _enter(self) -> None:
        """Stand in a corner that is not the door."""
        x, y = self.doors[self.floor]
        self.place = np.array([0 if x >= SIZE // 2 else SIZE - 1, 0 if y >= SIZE // 2 else SIZE - 1])

    def _observe(self) -> np.ndarray:
        where = np.zeros((2, SIZE))
        where[[0, 1], self.place] = 1.0
        beside = [float((self.place + move == self.doors[self.floor]).all()) for move in np.array(_MOVES)]
        return np.concatenate([where.ravel(), beside, self.textures[self.floor]]).astype(np.float32)

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place = (self.place + _MOVES[int(action)]).clip(0, SIZE - 1)
        self.left -= 1
        reward, top = 0.0, False
        if (self.place == self.doors[self.floor]).all():
            reward, top = 1.0, self.floor == FLOORS - 1
            self.left += STEPS
            self.floor = min(FLOORS - 1, self.floor + 1)
            self._enter()
        passed = {"passed": float(self.floor)} if self.floor > self.highest else {}
        return self._observe(), reward, top or self.left <= 0, False, passed


def higher(metrics: dict[str, float], options: dict[str, Any]) -> dict[str, Any]:
    """Options for the next episodes. env/passed is the mean over recent episodes of floors that were new to them, so it
    is at most the highest floor reached."""
    return {"highest": max(options["highest"], math.ceil(metrics.get("env/passed", 0.0)))}
