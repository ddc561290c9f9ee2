"""The processor time of a reset with and without the cache of levels, in turns.

python benchmarks/levels.py MiniGrid-MultiRoom-N6-v0 minigrid:MiniGrid-ObstructedMaze-Full-v0
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from lockstep import envs
from lockstep.envs.construct import construct
from lockstep.envs.level_cache import LevelCache, kept

LEVELS, TURNS, STEPS = 40, 7, 100
"""Levels of each turn, turns, and steps whose time is given for comparison."""


def measure(env_id: str) -> dict[str, float]:
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
