"""Which library serves an id, and the errors for ids that none serves."""

from __future__ import annotations

import importlib.util

import gymnasium
import numpy as np
import pytest

from lockstep import envs
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, factory
from lockstep.envs.episodes import Seeds

OF_MINATAR = "gymnasium" if importlib.util.find_spec("minatar") else "compiled"


@pytest.mark.parametrize(
    ("env_id", "name", "adapter"),
    [
        ("Breakout", "Breakout", "ale"),
        ("ms_pacman", "MsPacman", "ale"),
        ("Pong-v5", "Pong", "ale"),
        pytest.param("CartPole-v1", "CartPole-v1", "envpool", marks=pytest.mark.envpool),
        pytest.param("HalfCheetah-v4", "HalfCheetah-v4", "envpool", marks=pytest.mark.envpool),
        ("lockstep/Memory-v0", "lockstep/Memory-v0", "gymnasium"),
        ("ALE/Breakout-v5", "ALE/Breakout-v5", "gymnasium"),
        ("MinAtar/Breakout-v1", "MinAtar/Breakout-v1", OF_MINATAR),
        ("lockstep.envs.tasks:Memory", "lockstep.envs.tasks:Memory", "gymnasium"),
    ],
)
def test_auto_takes_the_fastest_and_resolving_again_changes_nothing(env_id: str, name: str, adapter: str) -> None:
    resolved = envs.resolve(EnvConfig(id=env_id))
    assert (resolved.id, resolved.adapter) == (name, adapter)
    assert envs.resolve(resolved) == resolved


@pytest.mark.parametrize(
    ("env_id", "name", "given", "adapter"),
    [
        ("ms_pacman", "MsPacman", "auto", "ale"),
        ("MsPacman", "MsPacman", "ale", "ale"),
        ("CartPole-v1", "CartPole-v1", "gymnasium", "gymnasium"),
        ("lockstep/Memory-v0", "lockstep/Memory-v0", "gymnasium", "gymnasium"),
    ],
)
def test_what_envpool_has_no_say_in_does_not_load_it(
    env_id: str, name: str, given: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = envs.resolve(EnvConfig(id=env_id, adapter=given))
    load = factory.load_adapter
    monkeypatch.setattr(factory, "load_adapter", lambda name: pytest.fail() if name == "envpool" else load(name))
    assert (expected.id, expected.adapter) == (name, adapter)
    assert envs.resolve(EnvConfig(id=env_id, adapter=given)) == expected
    assert envs.resolve(expected) == expected


@pytest.mark.envpool
def test_what_is_not_installed_is_passed_over_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))

    without("envpool")
    assert envs.resolve(EnvConfig(id="CartPole-v1")).adapter == "gymnasium"
    with pytest.raises(SettingsError, match=r'pip install .*\[envpool\]"'):
        envs.resolve(EnvConfig(id="Breakout", adapter="envpool"))
    without("ale_py")
    assert envs.resolve(EnvConfig(id="Breakout")).adapter == "envpool"
    without("ale_py", "envpool")
    with pytest.raises(SettingsError, match=r'pip install .*\[atari\]"'):
        envs.resolve(EnvConfig(id="Breakout"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EnvConfig(id="Brekout"), "Did you mean Breakout"),
        (EnvConfig(id="HalfCheeta-v4"), "HalfCheetah-v4"),
        (EnvConfig(id="no_such_module:make"), "Cannot load"),
        (EnvConfig(id=":make"), "names no function or class"),
        (EnvConfig(id="no_such_file.py:make"), "no Python file"),
        (EnvConfig(id="CartPole-v1", protocol="machado"), "protocol none"),
        (EnvConfig(id="ALE/Pong-v5", protocol="machado"), "Use --env.id Pong."),
        (EnvConfig(id="SpaceInvadersNoFrameskip-v4", protocol="classic"), "Use --env.id SpaceInvaders."),
        pytest.param(EnvConfig(id="CartPole-v1", adapter="ale"), "envpool or gymnasium", marks=pytest.mark.envpool),
        (EnvConfig(id="lockstep.envs.tasks:Memory", adapter="envpool"), "adapter gymnasium"),
        pytest.param(EnvConfig(id="WalkerWalk-v1", decorrelate=5), "decorrelate 0", marks=pytest.mark.envpool),
    ],
)
def test_mistakes_are_explained(config: EnvConfig, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        envs.resolve(config)


def test_protocols_clip_rewards_and_decorrelation_avoids_envpool() -> None:
    assert envs.resolve(EnvConfig(id="Pong", protocol="classic")).reward_clip
    assert not envs.resolve(EnvConfig(id="Pong")).reward_clip
    assert envs.resolve(EnvConfig(id="CartPole-v1", decorrelate=10)).adapter == "gymnasium"


@pytest.mark.envpool
def test_spaces_and_the_list_of_environments() -> None:
    observation, action = envs.spaces(EnvConfig(id="Pong", protocol="machado"))
    assert observation.shape == (4, 84, 84) and action == gymnasium.spaces.Discrete(18)
    known = envs.list_envs()
    assert known["Breakout"] == ("ale", "envpool")
    assert known["CartPole-v1"] == ("envpool", "gymnasium", "compiled", "vector")
    assert known["lockstep/Memory-v0"] == ("gymnasium",)


def test_no_two_environments_or_purposes_share_a_seed() -> None:
    index = np.arange(64)
    seeds = [
        int(s)
        for purpose in ("train", "eval")
        for run in (1, 2)
        for count in (0, 1, 2)
        for s in Seeds(run, purpose, 0).derive(index, np.full(64, count))
    ]
    assert len(set(seeds)) == len(seeds) == 768
    assert min(seeds) >= 0 and max(seeds) < 2**31
    shifted = Seeds(1, "train", 60).derive(np.arange(4), np.zeros(4))
    assert np.array_equal(shifted, Seeds(1, "train", 0).derive(index, np.zeros(64))[60:])
