"""Normalized scores of Procgen's games: 0 is a blind policy, 1 the highest possible or known score.

Both raw scores are from Cobbe et al., Leveraging Procedural Generation to Benchmark Reinforcement Learning, 2020
(arXiv:1912.01588), appendix C. They cover the easy and the hard games, but not the memory, exploration and extreme
ones.
"""

from __future__ import annotations

import re

EASY: dict[str, tuple[float, float]] = {
    "Bigfish": (1.0, 40.0),
    "Bossfight": (0.5, 13.0),
    "Caveflyer": (3.5, 12.0),
    "Chaser": (0.5, 13.0),
    "Climber": (2.0, 12.6),
    "Coinrun": (5.0, 10.0),
    "Dodgeball": (1.5, 19.0),
    "Fruitbot": (-1.5, 32.4),
    "Heist": (3.5, 10.0),
    "Jumper": (3.0, 10.0),
    "Leaper": (3.0, 10.0),
    "Maze": (5.0, 10.0),
    "Miner": (1.5, 13.0),
    "Ninja": (3.5, 10.0),
    "Plunder": (4.5, 30.0),
    "Starpilot": (2.5, 64.0),
}
HARD: dict[str, tuple[float, float]] = {
    "Bigfish": (0.0, 40.0),
    "Bossfight": (0.5, 13.0),
    "Caveflyer": (2.0, 13.4),
    "Chaser": (0.5, 14.2),
    "Climber": (1.0, 12.6),
    "Coinrun": (5.0, 10.0),
    "Dodgeball": (1.5, 19.0),
    "Fruitbot": (-0.5, 27.2),
    "Heist": (2.0, 10.0),
    "Jumper": (1.0, 10.0),
    "Leaper": (1.5, 10.0),
    "Maze": (4.0, 10.0),
    "Miner": (1.5, 20.0),
    "Ninja": (2.0, 10.0),
    "Plunder": (3.0, 30.0),
    "Starpilot": (1.5, 35.0),
}


def bounds(env_id: str) -> tuple[float, float] | None:
    """The raw scores that map to 0 and 1 in a game of EnvPool's (StarpilotEasy-v0); None for other games."""
    found = re.fullmatch(r"([A-Z][a-z]+)(Easy|Hard)-v0", env_id)
    return None if found is None else {"Easy": EASY, "Hard": HARD}[found[2]].get(found[1])
