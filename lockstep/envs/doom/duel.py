"""`vizdoom/Duel`: two players against each other, each with an engine (extra `vizdoom`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from pettingzoo import ParallelEnv

from lockstep.envs.doom import network
from lockstep.envs.doom.engine import Engine
from lockstep.envs.doom.player import Player, Rules
from lockstep.envs.doom.shaping import SELF_PLAY

_RESPAWN = 2
"""Seconds until a dead player returns, as in Sample Factory."""


class Duel(ParallelEnv[str, Any, np.ndarray]):
    """A match of two, as in the Sample Factory paper (Petrenko et al. 2020, arXiv:2006.11751).

    The reward is 1 for the player with more frags at the end of the match, -1 for the other, and 0 for both at a draw;
    or with shaping=True the shaped reward of every step. The match is over after `minutes`. The info of a step has each
    player's numbers `frags`, `deaths` and `damage` so far, and that of the last step `won`: 1 for a win, 0 for a loss
    and 0.5 for a draw. Each match has new engines that start from its seed, so seed and actions determine the match.
    Actions take effect one tic late.

    Args:
        options: fields of lockstep.envs.doom.player.Rules and lockstep.envs.doom.shaping.Weights.

    Raises:
        SettingsError: an option is out of range.
    """

    metadata = {"name": "doom_duel", "render_modes": ["rgb_array"], "render_fps": 17}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self.render_mode = render_mode
        self.possible_agents = ["player_0", "player_1"]
        self.agents: list[str] = []
        self._rules = Rules.of(options, map="map01", weights=SELF_PLAY)
        self.tics_per_action = self._rules.frame_skip
        self._players = [Player(self._rules, ("ANGLE",)) for _ in self.possible_agents]
        self._engines: list[Engine] = []
        self._draw, _ = seeding.np_random(0)
        self._held: list[float] | None = None
        """The buttons that the first player pressed last. They take effect one tic late, too."""
        self._steps = 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._players[self.possible_agents.index(agent)].observation_space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._players[self.possible_agents.index(agent)].action_space

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        self.close()
        if seed is not None:
            self._draw, _ = seeding.np_random(seed)
        rules, start, variables = self._rules, int(self._draw.integers(2**31)), self._players[0].variables

        def make(number: int) -> Engine:
            return Engine(self.possible_agents[number], rules.path, rules.map, start, rules.buttons, variables)

        self._engines = network.connected(make, rules.buttons, variables.index("ANGLE"), _RESPAWN)
        self.agents = list(self.possible_agents)
        self._held, self._steps = None, 0
        for player, engine in zip(self._players, self._engines, strict=True):
            player.begin(*engine.look())
        return self._observations(), {name: {} for name in self.agents}

    def step(
        self, actions: dict[str, np.ndarray]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        first, second = (p.pressed(actions[name]) for name, p in zip(self.agents, self._players, strict=True))
        for last in range(self._rules.frame_skip - 1, -1, -1):
            network.tic(self._engines, [self._held, second], look=not last)
            self._held = first
        shaped = [player.see(*engine.look()) for player, engine in zip(self._players, self._engines, strict=True)]
        self._steps += 1
        over = self._steps >= self._rules.steps
        names, observations = self.agents, self._observations()
        infos = {name: player.numbers() for name, player in zip(names, self._players, strict=True)}
        result = [0.0, 0.0]
        if over:
            result, self.agents = self._result(), []
            for name, reward in zip(names, result, strict=True):
                infos[name]["won"] = (1 + reward) / 2
        rewards = shaped if self._rules.shaping else result
        ends = dict.fromkeys(names, over)
        return observations, dict(zip(names, rewards, strict=True)), ends, dict.fromkeys(names, False), infos

    def _observations(self) -> dict[str, Any]:
        return {name: p.observation() for name, p in zip(self.possible_agents, self._players, strict=True)}

    def _result(self) -> list[float]:
        mine, other = (player.now["FRAGCOUNT"] for player in self._players)
        return [float(np.sign(mine - other)), float(np.sign(other - mine))]

    def render(self) -> np.ndarray:
        """uint8 [120, 320, 3]: what both players see."""
        return np.concatenate([player.picture.transpose(1, 2, 0) for player in self._players], 1)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        self._engines = []
