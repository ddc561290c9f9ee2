"""MinAtar's games, where the library is installed, and what takes their place where it is not."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig
from lockstep.envs.minatar import GAMES, MinAtar

installed = pytest.mark.skipif(importlib.util.find_spec("minatar") is None, reason="needs MinAtar")
every_game = pytest.mark.parametrize("game", GAMES)


def play(env: MinAtar, seed: int, steps: int = 400) -> list[tuple[np.ndarray, float, bool]]:
    """An episode, or its beginning, with random actions that depend on the seed alone."""
    actions = np.random.default_rng(seed).integers(env.action_space.n, size=steps)  # type: ignore[attr-defined]
    obs, _ = env.reset(seed=seed)
    seen = [(obs, 0.0, False)]
    for action in actions:
        obs, reward, ended, truncated, _ = env.step(action)
        assert not truncated
        seen.append((obs, reward, ended))
        if ended:
            break
    return seen


@installed
@every_game
def test_the_gymnasium_interface_is_kept(game: str) -> None:
    env = gymnasium.make(f"MinAtar/{game.title().replace('_', '')}-v1", render_mode="rgb_array")
    check_env(env.unwrapped)
    env.reset(seed=1)
    picture: Any = env.render()
    assert picture.shape == (160, 160, 3) and picture.dtype == np.uint8


@installed
@every_game
def test_observations_and_rewards_are_the_librarys(game: str) -> None:
    theirs = importlib.import_module("minatar").Environment(game)
    theirs.seed(7)
    theirs.reset()
    ours = MinAtar(game, minimal_actions=False)
    obs, _ = ours.reset(seed=7)
    for action in np.random.default_rng(0).integers(6, size=300):
        assert np.array_equal(obs == 255, np.moveaxis(theirs.state(), -1, 0))
        assert ((obs == 0) | (obs == 255)).all()
        expected = theirs.act(int(action))
        obs, reward, ended, _, _ = ours.step(action)
        assert (reward, ended) == expected
        if ended:
            break


@installed
@every_game
def test_an_episode_depends_on_its_seed_and_actions_alone(game: str) -> None:
    used = MinAtar(game)
    for seed in range(6):
        before, fresh = play(used, seed), play(MinAtar(game), seed)
        assert len(before) == len(fresh)
        for (obs, reward, ended), (other, *rest) in zip(before, fresh, strict=True):
            assert np.array_equal(obs, other) and [reward, ended] == rest


@installed
def test_minimal_actions_leave_out_what_does_nothing() -> None:
    assert MinAtar("breakout").action_space == gymnasium.spaces.Discrete(3)
    assert MinAtar("breakout", minimal_actions=False).action_space == gymnasium.spaces.Discrete(6)


def test_without_the_library_the_compiled_games_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minatar", None)
    assert envs.resolve(EnvConfig(id="MinAtar/Breakout-v1")).adapter == "compiled"
    with pytest.raises(SettingsError, match=r"--env\.adapter compiled"):
        envs.resolve(EnvConfig(id="MinAtar/Breakout-v1", adapter="gymnasium"))
