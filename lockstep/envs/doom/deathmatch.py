"""`vizdoom/Deathmatch`: one player against the game's bots (extra `vizdoom`)."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.envs.doom.engine import Engine
from lockstep.envs.doom.player import Player, Rules
from lockstep.envs.doom.shaping import Weights

_FRAGS = tuple(f"PLAYER{n}_FRAGCOUNT" for n in range(1, 17))
_MOST = 15
"""The most bots, since Doom has at most 16 players."""


class Deathmatch(gymnasium.Env[Any, np.ndarray]):
    """A match against bots, as in the Sample Factory paper (Petrenko et al. 2020, arXiv:2006.11751).

    The reward is the change of the player's frags, or with shaping=True the shaped reward. The match is truncated after
    `minutes`. The info of a step has the numbers `frags`, `deaths`, `damage` and `place` (1 for the most frags) so far.
    Each episode has a new engine that starts from the episode's seed, so seed and actions determine the episode.

    Args:
        bots: the number of bots, 0 to 15.
        options: fields of lockstep.envs.doom.player.Rules and lockstep.envs.doom.shaping.Weights.

    Raises:
        SettingsError: an option is out of range.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 17}  # noqa: RUF012 - as in every environment of gymnasium

    def __init__(self, bots: int = 7, render_mode: str | None = None, **options: Any) -> None:
        if not isinstance(bots, int) or not 0 <= bots <= _MOST:
            raise SettingsError(f"env.options.bots={bots!r} must be a whole number from 0 to {_MOST}.")
        self.render_mode = render_mode
        self._bots = bots
        self._rules = Rules.of(options, map="map02", weights=Weights())
        self._player = Player(self._rules, ("PLAYER_NUMBER", *_FRAGS))
        self.observation_space, self.action_space = self._player.observation_space, self._player.action_space
        self.tics_per_action = self._rules.frame_skip
        self._engine: Engine | None = None
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.close()
        rules, player = self._rules, self._player
        start = int(self.np_random.integers(2**31))
        self._engine = engine = Engine("agent", rules.path, rules.map, start, rules.buttons, player.variables)
        engine.host(1)
        engine.ready()
        for _ in range(self._bots):
            engine.command("addbot")
        engine.act(None)
        self._steps = 0
        player.begin(*engine.look())
        return player.observation(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._engine is not None, "reset the environment first"
        player, before = self._player, self._player.now["FRAGCOUNT"]
        self._engine.act(player.pressed(action), self._rules.frame_skip)
        shaped = player.see(*self._engine.look())
        self._steps += 1
        now = player.now
        reward = shaped if self._rules.shaping else now["FRAGCOUNT"] - before
        return player.observation(), reward, False, self._steps >= self._rules.steps, self._numbers()

    def _numbers(self) -> dict[str, float]:
        now = self._player.now
        frags = [now[name] for name in _FRAGS[: int(now["PLAYER_COUNT"])]]
        place = 1 + sum(other > now["FRAGCOUNT"] for other in frags)
        return {**self._player.numbers(), "place": float(place)}

    def render(self) -> np.ndarray:
        """uint8 [120, 160, 3]: what the player sees."""
        return self._player.picture.transpose(1, 2, 0)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
