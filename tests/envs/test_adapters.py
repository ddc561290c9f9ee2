"""The door for adapters: a user's own, in a file, on every layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import tiny

from lockstep import envs, recipes, resume, train
from lockstep.cli.main import main
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.envs import Adapter, EnvConfig, adapters, register_adapter
from lockstep.envs.base import load_adapter
from lockstep.launchers.launch import Layout

LINES = """
import gymnasium
import numpy as np

from lockstep.envs import Adapter, ShardEnv, StepResult


class Lines(Adapter):
    '''Walks on a line, all of a shard in one batch.'''

    threads = True

    def ids(self):
        return ["line"]

    def make(self, config, *, seeds, num_envs, threads=1, render=False):
        return Walks(seeds, num_envs)


class Walks(ShardEnv):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    frames_per_step = 1

    def __init__(self, seeds, num_envs):
        self.num_envs, self.seeds = num_envs, seeds
        self.place, self.episode, self.step = np.zeros(num_envs), np.zeros(num_envs, np.int64), 0
        self.ended = np.zeros(num_envs, np.bool_)

    def begin(self, rows):
        self.place[rows] = self.seeds.derive(np.flatnonzero(rows), self.episode[rows]) % 5 - 2

    def reset(self, out):
        self.episode[:], self.ended[:], self.step = 0, False, 0
        self.begin(np.ones(self.num_envs, np.bool_))
        out[:, 0] = self.place

    def send(self, action):
        self.action = action

    def recv(self, out):
        first, self.step = self.ended, self.step + 1
        self.place += np.where(first, 0, 2 * self.action - 1)
        self.episode += first
        self.begin(first)
        out[:, 0] = self.place
        reward = np.where(first, 0, -abs(self.place)).astype(np.float32)
        self.ended = ~first & (abs(self.place) > 3)
        no = np.zeros(self.num_envs, np.bool_)
        return StepResult(reward, self.ended, no, first, no)

    def state_dict(self):
        return {"place": self.place.copy(), "episode": self.episode.copy(), "ended": self.ended.copy()}

    def load_state_dict(self, state, out, heartbeat=lambda: None):
        self.place, self.episode, self.ended = (state[name].copy() for name in ("place", "episode", "ended"))
        out[:, 0] = self.place
        return 0

    def close(self):
        pass


class NoAdapter:
    pass
"""


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reference of a user's adapter, and nothing registered when the test is over."""
    monkeypatch.setattr(adapters, "ADAPTERS", dict(adapters.ADAPTERS))
    monkeypatch.setattr("lockstep.envs.factory.ADAPTERS", adapters.ADAPTERS)
    (tmp_path / "lines.py").write_text(LINES)
    return f"{tmp_path}/lines.py:Lines"


@pytest.mark.slow
def test_a_users_adapter_trains_to_the_same_bits_on_every_layout_and_resumed(lines: str, tmp_path: Path) -> None:
    register_adapter("lines", lines)
    experiment = tiny.cut(recipes.ppo_cartpole, env={"id": "line", "adapter": "lines"})

    def options(name: str) -> RunOptions:
        return RunOptions(run=str(tmp_path / name), display="none", tensorboard=False, checkpoint_every=1)

    expected = train(experiment, "inline", options("inline")).digest
    assert train(experiment, "processes:2", options("processes")).digest == expected
    kept = json.loads((tmp_path / "inline" / "experiment.json").read_text())
    assert kept["env"]["adapter"] == lines, "so that other processes need no registration"
    named = experiment.replace(env=dataclasses.replace(experiment.env, adapter=lines))
    train(named, "inline,env_threads=2", options("resumed"), stop_after=1)
    assert resume(tmp_path / "resumed").digest == expected


def test_what_an_adapter_does_not_declare_is_refused(lines: str) -> None:
    config = EnvConfig("line", adapter=lines)
    assert envs.resolve(config).adapter == lines
    for change in ({"decorrelate": 5}, {"num_levels": 5}, {"protocol": "machado"}):
        with pytest.raises(SettingsError, match=next(iter(change))):
            envs.resolve(dataclasses.replace(config, **change))
    experiment = tiny.cut(recipes.ppo_cartpole, env={"id": "line", "adapter": lines})
    with pytest.raises(SettingsError, match="env_processes"):
        train(experiment, Layout.parse("inline,env_processes=2"))


def test_registered_adapters_are_listed_and_asked_last(lines: str) -> None:
    register_adapter("lines", lines)
    register_adapter("lines", lines)
    assert envs.list_envs()["line"] == ("lines",)
    assert envs.resolve(EnvConfig("line")).adapter == lines
    assert envs.resolve(EnvConfig("lockstep/Memory-v0")).adapter == "gymnasium"


def test_mistakes_are_explained(lines: str) -> None:
    for name, reference in (("ale", lines), ("auto", lines), ("a b", lines), ("lines", "lines.py")):
        with pytest.raises(SettingsError, match="register_adapter"):
            register_adapter(name, reference)
    for adapter, message in (
        ("gymnasum", r"env\.adapter=gymnasum .*auto, ale, envpool, gymnasium"),
        (lines.replace("Lines", "NoAdapter"), "subclass of lockstep.envs.Adapter"),
        (lines.replace("Lines", "Linse"), "Linse"),
        ("missing.py:Lines", "missing.py"),
    ):
        with pytest.raises(SettingsError, match=message):
            envs.resolve(EnvConfig("line", adapter=adapter))
    with pytest.raises(SettingsError, match=r"'lien'.* line\?"):
        envs.resolve(EnvConfig("lien", adapter=lines))


@pytest.mark.parametrize("name", adapters.ADAPTERS)
def test_the_table_names_adapters_and_help_lists_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if adapters.ADAPTERS[name].installed:
        assert isinstance(load_adapter(name), Adapter)
    assert main(["train", "ppo-cartpole", "--help", "env.adapter"]) == 0
    listed = name in capsys.readouterr().out
    assert listed != bool(adapters.ADAPTERS[name].prefix), "ids choose such an adapter by themselves"
