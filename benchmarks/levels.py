"""The processor time of a reset with and without the cache of levels, in turns.

python benchmarks/levels.py benchmarks/levels.py:Maze minigrid:MiniGrid-MultiRoom-N6-v0
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from lockstep import envs
from lockstep.envs.construct import construct
from lockstep.envs.level_cache import LevelCache, kept

LEVELS, TURNS, STEPS = 40, 7, 100
"""Levels of each turn, turns, and steps whose time is given for comparison."""


class Maze(gymnasium.Env[np.ndarray, np.int64]):
    """A walk from one corner of a random maze to the opposite one. A reset draws mazes until the shortest way is long,
    as generators of difficult levels do."""

    size, longest, least = 31, 200, 90

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (27,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        while True:
            walls = np.ones((self.size + 4, self.size + 4), np.bool_)
            walls[2:-2, 2:-2] = self.np_random.random((self.size, self.size)) < 0.38
            walls[2, 2] = walls[-3, -3] = False
            if self._way(walls) >= self.least:
                break
        self.walls, self.place, self.time = walls, (2, 2), 0
        return self._observe(), {}

    def _way(self, walls: np.ndarray) -> int:
        """Steps of the shortest way; 0 if there is none."""
        free, goal = (~walls).tolist(), (len(walls) - 3, len(walls) - 3)
        free[2][2], ahead = False, deque([((2, 2), 0)])
        while ahead:
            (row, column), steps = ahead.popleft()
            if (row, column) == goal:
                return steps
            for near in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
                if free[near[0]][near[1]]:
                    free[near[0]][near[1]] = False
                    ahead.append((near, steps + 1))
        return 0

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        down, right = ((1, 0), (-1, 0), (0, 1), (0, -1))[int(action)]
        near = self.place[0] + down, self.place[1] + right
        self.place = self.place if self.walls[near] else near
        self.time += 1
        reached = self.place == (self.size + 1, self.size + 1)
        return self._observe(), float(reached), reached, self.time == self.longest, {}

    def _observe(self) -> np.ndarray:
        row, column = self.place
        seen = self.walls[row - 2 : row + 3, column - 2 : column + 3].ravel()
        return np.concatenate([seen, np.array(self.place) / len(self.walls)]).astype(np.float32)


def measure(env_id: str) -> dict[str, Any]:
    """Milliseconds of processor time: medians over turns, each a mean over levels."""
    config = envs.resolve(envs.EnvConfig(env_id, adapter="gymnasium"))
    env = construct(config)
    times: dict[str, list[float]] = {"reset": [], "cached": [], "step": []}
    with tempfile.TemporaryDirectory() as root:
        cache = LevelCache(Path(root), config, env)
        for level in range(LEVELS):
            cache.reset(env, level, {})
        size = statistics.mean(size for _, size, _ in kept(Path(root)))
        for turn in range(TURNS):
            ways = [
                ("reset", lambda level: env.reset(seed=level)),
                ("cached", lambda level: cache.reset(env, level, {})),
            ]
            for name, reset in ways[:: 1 if turn % 2 else -1]:
                begin = time.process_time()
                for level in range(LEVELS):
                    reset(level)
                times[name].append(1e3 * (time.process_time() - begin) / LEVELS)
            begin = time.process_time()
            for _ in range(STEPS):
                _, _, terminated, truncated, _ = env.step(env.action_space.sample())
                if terminated or truncated:
                    break
            else:
                times["step"].append(1e3 * (time.process_time() - begin) / STEPS)
    medians = {name: statistics.median(found) for name, found in times.items() if found}
    ranges = {f"{name}_range": [min(found), max(found)] for name, found in times.items() if found}
    return {**medians, **ranges, "kilobytes": size / 1e3}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({"env": name, **measure(name)}), flush=True)
