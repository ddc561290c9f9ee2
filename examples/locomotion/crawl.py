"""Four-legged bodies that crawl at a wanted speed over ground of unknown friction: a batch of them in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from lockstep.envs.batch import uniform

LEGS, STEPS, DT = 4, 100, 0.05


class Crawl:
    """Each action turns the four legs. A leg that touches the ground while it turns pushes the body forward, if the
    ground is not too smooth. A body with no leg on the ground for five steps has fallen.

    Observation: "legs" [4, 3], sine and cosine of each leg's angle and its speed; "body" [2], present and wanted speed;
    "ground" [1], the friction, which only a simulator knows.
    """

    observation_space = spaces.Dict(
        {
            "legs": spaces.Box(-np.inf, np.inf, (LEGS, 3), np.float32),
            "body": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "ground": spaces.Box(0.0, 1.0, (1,), np.float32),
        }
    )
    action_space = spaces.Box(-1.0, 1.0, (LEGS,), np.float32)

    def __init__(self, num_envs: int, speed: float = 1.0) -> None:
        self.num_envs, self._asked = num_envs, speed
        shapes = {"angle": (LEGS,), "turn": (LEGS,)} | dict.fromkeys(("v", "x", "wanted", "friction", "air", "t"), ())
        self._s = {name: np.zeros((num_envs, *shape)) for name, shape in shapes.items()}

    def set_options(self, options: dict[str, Any]) -> None:
        self._asked = options["speed"]

    def get_state(self) -> dict[str, np.ndarray]:
        return self._s

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        self._s = state

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> dict[str, np.ndarray]:
        for x in self._s.values():
            x[rows] = 0.0
        drawn = uniform(seeds, LEGS + 1)
        self._s["angle"][rows], self._s["friction"][rows] = 2 * np.pi * drawn[:, :LEGS], 0.4 + 0.6 * drawn[:, LEGS]
        self._s["wanted"][rows] = self._asked
        return {name: x[rows] for name, x in self._observe().items()}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        s = self._s
        s["turn"] = 0.7 * s["turn"] + 3.0 * np.clip(actions, -1.0, 1.0)
        s["angle"] = s["angle"] + DT * s["turn"]
        touching = np.sin(s["angle"]) < 0
        push = (touching * s["turn"]).sum(1) / LEGS * s["friction"][:]
        s["v"] = s["v"] + DT * (push - 2.0 * s["v"])
        s["x"], s["t"] = s["x"] + DT * s["v"], s["t"] + 1
        s["air"] = np.where(touching.any(1), 0, s["air"] + 1)
        fallen, over = s["air"] >= 5, s["t"] >= STEPS
        reward = 1.0 - np.abs(s["v"] - s["wanted"]) / np.maximum(s["wanted"], 0.1) - 5.0 * fallen
        success = s["x"] > 0.8 * s["wanted"] * STEPS * DT
        return self._observe(), reward, fallen, over & ~fallen, None, {"success": success * 1.0, "distance": s["x"]}

    def _observe(self) -> dict[str, np.ndarray]:
        s = self._s
        legs = np.stack([np.sin(s["angle"]), np.cos(s["angle"]), s["turn"] / 10], -1)
        body = np.stack([s["v"], s["wanted"]], -1)
        found = {"legs": legs, "body": body, "ground": s["friction"][:, None]}
        return {name: x.astype(np.float32) for name, x in found.items()}
