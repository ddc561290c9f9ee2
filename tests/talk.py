"""A match of three agents with different spaces and rewards, for tests of several policies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pettingzoo
from gymnasium import spaces

SIZES = {"guide": 3, "walker_0": 5, "walker_1": 5}
CHOICES = {"guide": 4, "walker_0": 2, "walker_1": 2}


class Talk(pettingzoo.ParallelEnv):
    """A guide sees a goal and says one of four words, and two walkers hear the last word. All earn something for
    choosing the goal's number, walkers 30 times as much. Walkers terminate after four steps, the guide after six."""

    metadata = {"name": "talk"}  # noqa: RUF012 - as in every environment of PettingZoo
    state_space = spaces.Box(-9, 9, (2,), np.float32)

    def __init__(self) -> None:
        self.possible_agents = list(SIZES)

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(-9, 9, (SIZES[agent],), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(CHOICES[agent])

    def state(self) -> np.ndarray:
        return np.array([self.goal, self.time], np.float32)

    def look(self) -> dict[str, np.ndarray]:
        word = np.eye(4)[self.word]
        own = {"guide": [self.goal, self.time, 1], "walker_0": [*word, 0], "walker_1": [*word, 1]}
        return {name: np.array(x, np.float32) for name, x in own.items() if name in self.agents}

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self.goal, self.word, self.time = int(np.random.default_rng(seed).integers(2)), 0, 0
        self.agents = list(self.possible_agents)
        return self.look(), {name: {} for name in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        assert all(actions[name] < CHOICES[name] for name in actions), f"an agent cannot do that: {actions}"
        earned = {name: 1.0 if name == "guide" else 30.0 for name in actions}
        rewards = {name: earned[name] * (actions[name] == self.goal) for name in actions}
        self.word, self.time = int(actions.get("guide", 0)), self.time + 1
        seen = self.look()
        ends = {name: self.time == (6 if name == "guide" else 4) for name in self.agents}
        self.agents = [name for name in self.agents if not ends[name]]
        return seen, rewards, ends, dict.fromkeys(ends, False), {}


class Walk(Talk):
    """The walkers alone, who have the same spaces."""

    def __init__(self) -> None:
        self.possible_agents = ["walker_0", "walker_1"]


def roles(agent: str) -> str:
    """The policy of an agent: guide or walker."""
    return agent.partition("_")[0]


def one(agent: str) -> str:
    """The same policy for all."""
    return "one"


def nameless(agent: str) -> str:
    """Not a name."""
    return f"the {agent}"
