"""Environments with one fault each, and whether it is named."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from sentences import says

from lockstep import recipes
from lockstep.cli.main import main
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig
from lockstep.envs.checking.check import WAYS, EnvCheck, check_env
from lockstep.launchers.launch import train
from lockstep.system.supervision import WorkerError
from lockstep.training.prepare import checked_agent


class Walk(gymnasium.Env[Any, Any]):
    """A random walk of at most 30 steps, as it should be written."""

    observation_space = spaces.Box(-9, 9, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def start(self) -> float:
        return 0.0

    def noise(self) -> float:
        return self.np_random.normal()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.x = 0, self.start() + self.np_random.normal()
        return self.observation(), {}

    def observation(self) -> Any:
        return np.array([self.x, self.t / 10, 1], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.x += (action - 1) / 10 + self.noise() / 100
        return self.observation(), -abs(self.x), self.np_random.random() < 0.02, self.t == 30, {}


class Coarse(Walk):
    """Tells the time in seconds since 1970, and wants actions of thousands."""

    observation_space = spaces.Dict(
        time=spaces.Box(-np.inf, np.inf, (1,), np.float64),
        camera=spaces.Box(0, 1, (9, 9, 3), np.float32),
        lamp=spaces.Box(0, 1, (36, 36, 1), np.uint8),
    )
    action_space = spaces.Box(-2000, 2000, (1,), np.float32)

    def observation(self) -> Any:
        return {
            "time": np.array([1.7e9 + self.t]),
            "camera": np.zeros((9, 9, 3), np.float32),
            "lamp": np.ones((36, 36, 1), np.uint8),
        }

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observation(), float(action[0]), False, self.t == 30, {}


class Unseeded(Walk):
    def noise(self) -> float:
        return np.random.normal()


class SeedsForAll(Walk):
    """Seeds a generator that all environments of a process share."""

    def start(self) -> float:
        np.random.seed(int(self.np_random.integers(2**31)))
        return 0.0

    def noise(self) -> float:
        return np.random.normal()


class OfProcess(Walk):
    """Stands for hash() of a string, which differs between two processes nearly always."""

    def noise(self) -> float:
        return float(multiprocessing.parent_process() is None)


class CountsEpisodes(Walk):
    episodes = 0

    def start(self) -> float:
        self.episodes += 1
        return self.episodes


class KeepsLast(Walk):
    """Forgets to reset what a reward is the difference to: only the first step of an episode shows it."""

    before = 0.0

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        reward, self.before = reward - self.before, reward
        return observation, reward, *rest


class NotANumber(Walk):
    def noise(self) -> float:
        return np.nan if self.t == 10 else 0.0


class InfiniteReward(Walk):
    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, np.inf if self.t == 10 else reward, *rest


class Masked(Walk):
    """Allows no action where it ends, as is allowed, and in its step 7 if it is stuck there."""

    observation_space = spaces.Dict(x=spaces.Box(-9, 9, (3,), np.float32), action_mask=spaces.MultiBinary(3))
    stuck = False

    def observation(self) -> Any:
        some = self.t < 30 and not (self.stuck and self.t == 7)
        return {"x": super().observation(), "action_mask": np.array([0, some, 0], np.int8)}

    def step(self, action: Any) -> Any:
        assert action == 1 or self.stuck
        return super().step(action)


class Stuck(Masked):
    stuck = True


class DiesElsewhere(Walk):
    def noise(self) -> float:
        if multiprocessing.parent_process() is not None and self.t > 5:
            os.abort()
        return 0.0


class RaisesElsewhere(Walk):
    def noise(self) -> float:
        if multiprocessing.parent_process() is not None and self.t > 5:
            raise KeyError("only here")
        return 0.0


def check(env: type[Walk], **settings: Any) -> EnvCheck:
    return check_env(EnvConfig(id=f"{__file__}:{env.__name__}", num_envs=3, **settings), steps=80)


def test_an_environment_that_keeps_everything() -> None:
    lines: list[str] = []
    found = check_env(EnvConfig(id=f"{__file__}:Walk", num_envs=3), steps=80, tell=lines.append)
    assert found.ok and found.failed is None and found.held == tuple(WAYS)
    assert says(found.message, "80 steps of 3 environments")
    assert [line.split()[0] for line in lines] == ["environment", *found.facts, *["holds"] * len(WAYS)]
    assert found.facts["action"] == "Discrete(3)" and found.facts["observation"].startswith("float32 [3], ")


def test_a_mask_must_allow_an_action_unless_the_episode_ends() -> None:
    assert check(Masked).ok
    with pytest.raises(
        SettingsError, match=r"action_mask of environment \d of .*Stuck allowed no action after step \d+,"
    ):
        check(Stuck)


@pytest.mark.parametrize(
    ("env", "way", "where"),
    [
        (NotANumber, "finite", r"Environment \d gives nan in its observation after step 1\d\."),
        (InfiniteReward, "finite", r"Environment \d gives inf in its reward after step 1\d\."),
        (Unseeded, "again", r"Environment 0 has another observation and reward after step 1\."),
        (SeedsForAll, "alone", r"Environment 0 has another observation and reward after step 1\."),
        (OfProcess, "elsewhere", r"Environment 0 has another observation and reward after step 1\."),
        (CountsEpisodes, "rebuilt", r"Environment \d has another observation after step \d\d\."),
        (KeepsLast, "rebuilt", r"Environment \d has another reward after step \d\d\."),
    ],
)
def test_each_fault_is_found_where_it_shows_first(env: type[Walk], way: str, where: str) -> None:
    found = check(env)
    assert not found.ok and found.failed == way
    assert found.held == tuple(WAYS)[: list(WAYS).index(way)]
    assert re.match(where, found.message), found.message


def test_an_environment_that_fails_in_another_process_alone() -> None:
    with pytest.raises(WorkerError, match="SIGABRT"):
        check(DiesElsewhere)
    with pytest.raises(WorkerError, match="KeyError: 'only here'"):
        check(RaisesElsewhere)


def test_episodes_are_told_apart_from_those_that_the_check_cuts() -> None:
    """Pendulum's episodes have 200 steps."""
    found = check_env(EnvConfig(id="Pendulum-v1", adapter="gymnasium", num_envs=2), steps=400)
    assert re.match(r"none .*\b8 cut .*\b99 steps", found.facts["episodes"])
    found = check_env(EnvConfig(id="Pendulum-v1", adapter="gymnasium", num_envs=2), steps=810)
    assert re.match(r"8 ended .*\b0 .*termination: 200 to 200 steps", found.facts["episodes"])


@pytest.mark.parametrize(
    "config",
    [
        EnvConfig(id="Breakout", protocol="machado", num_envs=2),
        EnvConfig(id="lockstep/TupleBandit-v0", options={"mask": True}, num_envs=2),
        EnvConfig(id=f"{__file__}:Walk", num_levels=3, decorrelate=5, num_envs=2),
    ],
    ids=["ale", "masks and tuples", "levels"],
)
def test_our_own_adapters_and_tasks_keep_everything(config: EnvConfig) -> None:
    assert check_env(config, steps=120).ok


def test_mistakes_are_explained() -> None:
    for steps in (7, 10**12):
        with pytest.raises(SettingsError, match=f"--steps {steps} .*8 to 1,000,000"):
            check_env(EnvConfig(), steps=steps)
    with pytest.raises(SettingsError, match=r"--env\.num-envs 1 .*at least 2"):
        check_env(EnvConfig(num_envs=1))
    with pytest.raises(SettingsError, match=r"no environment 'CartPoll-v1'.*CartPole-v1"):
        check_env(EnvConfig(id="CartPoll-v1"))


def test_what_makes_learning_hard_is_told_by_the_check_and_at_the_start_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = check_env(EnvConfig(id=f"{__file__}:Coarse", num_envs=2), steps=16)
    assert found.ok
    assert "lamp: pixels, divided by 1;" in found.facts["scaling"]
    assert re.search("camera: .*flattened", found.facts["scaling"])
    hard = (
        r"observation 'time' has numbers as large as 1\.7e\+09.*less than 128",
        r"2,000 times as wide.*--model\.squash",
    )
    for told in hard:
        assert re.search(told, found.facts["note"])
    base = recipes.ppo_cartpole()
    experiment = base.replace(
        env=replace(base.env, id=f"{__file__}:Coarse"),
        model=replace(base.model, encoder="auto"),
        total_steps=base.samples_per_iteration,
    )
    train(experiment, options=RunOptions(run=str(tmp_path / "run"), display="none", tensorboard=False))
    warned = capsys.readouterr().err
    for told in (*hard, r"'camera' is shaped like an image, \[9, 9, 3\], but is not uint8"):
        assert len(re.findall(told, warned)) == 1
    assert "'lamp'" not in warned
    remarks = checked_agent(experiment.replace(model=replace(base.model, encoder="mlp"))).warnings()
    assert [("'camera'" in told, "'lamp'" in told) for told in remarks][:2] == [(False, True), (True, False)]
    assert "the encoder is mlp" in remarks[0] and "--model.encoder auto" in remarks[0]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = f"{__file__}:Unseeded"
    assert main(["check-env", env, "--steps", "20", "--env.num-envs", "2"]) == 1
    out = capsys.readouterr().out
    assert "\nholds       observations and rewards are finite numbers\nfails       new instances" in out
    assert out.splitlines()[-1].startswith("Environment 0 has another observation")
    assert main(["check-env", "--env.id", env, "--steps", "20", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["failed"], found["num_envs"]) == (False, "again", 4)
    for arguments in ([], [env, "--env.id", env]):
        assert main(["check-env", *arguments]) == 2
        assert "Name one environment" in capsys.readouterr().err
