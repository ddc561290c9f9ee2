"""MinAtar's games (Young and Tian 2019, https://arxiv.org/abs/1903.03176; extra `minatar`) as gymnasium environments.

Shape legend: C kinds of objects, 4 to 10 by the game.
"""

from __future__ import annotations

import colorsys
import importlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
_PIXELS = 16
"""Width of a cell in rendered images."""


class MinAtar(gymnasium.Env[np.ndarray, np.int64]):
    """A game on 10 x 10 cells.

    Observation: uint8 [C, 10, 10], 255 where a cell has an object of that kind. Action: one of the actions that have an
    effect in the game, or of all six. Reward: the game's.

    In the library's environment, a sticky first action repeats the last action of the previous episode. Here it repeats
    "do nothing", so an episode is a function of its seed and actions.

    Args:
        game: one of GAMES.
        minimal_actions: whether actions without effect in the game are left out.
        sticky_action_prob: probability that the last action is repeated instead of the given action.
        difficulty_ramping: whether games become harder over time.
        render_mode: "rgb_array", or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 - gymnasium declares it so

    def __init__(
        self,
        game: str,
        minimal_actions: bool = True,
        sticky_action_prob: float = 0.1,
        difficulty_ramping: bool = True,
        render_mode: str | None = None,
    ) -> None:
        library: Any = importlib.import_module("minatar")
        self._game = library.Environment(game, sticky_action_prob, difficulty_ramping)
        self._actions = self._game.minimal_action_set() if minimal_actions else list(range(self._game.num_actions()))
        height, width, kinds = self._game.state_shape()
        self.observation_space = spaces.Box(0, 255, (kinds, height, width), np.uint8)
        self.action_space = spaces.Discrete(len(self._actions))
        self.render_mode = render_mode
        colors = [(0.0, 0.0, 0.0), *(colorsys.hsv_to_rgb(kind / kinds, 0.7, 1.0) for kind in range(kinds))]
        self._colors = np.round(255 * np.array(colors)).astype(np.uint8)

    def _observe(self) -> np.ndarray:
        return np.where(self._game.state().transpose(2, 0, 1), np.uint8(255), np.uint8(0))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._game.seed(seed)
        self._game.reset()
        self._game.last_action = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, ended = self._game.act(self._actions[action])
        return self._observe(), float(reward), bool(ended), False, {}

    def render(self) -> np.ndarray:
        """uint8 [160, 160, 3]: a color for each kind of object, the last kind on top."""
        present = self._observe()[::-1] > 0
        kind = np.where(present.any(0), len(present) - present.argmax(0), 0)
        return self._colors[kind].repeat(_PIXELS, 0).repeat(_PIXELS, 1)


for _game in GAMES:
    for _version, _minimal in (("v0", False), ("v1", True)):
        gymnasium.register(
            f"MinAtar/{_game.title().replace('_', '')}-{_version}",
            entry_point="lockstep.envs.minatar:MinAtar",
            kwargs={"game": _game, "minimal_actions": _minimal},
        )
