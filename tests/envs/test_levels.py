from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep import envs, recipes
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError
from lockstep.envs.settings import MAX_LEVELS, EnvConfig
from lockstep.evaluation.scores import evaluate, evaluate_policy

SHOWS_ITS_SEED = """
import gymnasium
import numpy as np

class ShowsItsSeed(gymnasium.Env):
    '''One step; the reward is the seed.'''
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(self.seed), True, False, {}
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "shows.py").write_text(SHOWS_ITS_SEED)
    return f"{tmp_path}/shows.py:ShowsItsSeed"


def experiment(task: str, **env: Any) -> lockstep.Experiment:
    base = recipes.ppo_cartpole()
    return base.replace(
        env=dataclasses.replace(base.env, id=task, adapter="gymnasium", num_envs=4, **env),
        algorithm=dataclasses.replace(base.algorithm, rollout=8, epochs=1, minibatches=1),
        total_steps=32,
    )


@pytest.mark.slow
def test_episodes_are_drawn_from_the_levels(task: str, tmp_path: Path) -> None:
    settings = experiment(task, num_levels=3, start_level=5)
    options = RunOptions(run=str(tmp_path / "run"), display="none", tensorboard=False, checkpoint_every=1)
    lockstep.train(settings, Layout.parse("inline,env_processes=2"), options)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 5 < line["score/iteration_mean"] < 7 and line["score/iteration_max"] == 7
    trained, tested = (evaluate(tmp_path / "run", episodes=30, levels=levels) for levels in ("train", "test"))
    assert set(trained.scores) == {5, 6, 7} and "levels 5 to 7" in trained.protocol
    assert min(tested.scores) >= 8 and len(set(tested.scores)) == 30 and "levels 8 to 2147483646" in tested.protocol


def test_evaluations_during_training_play_the_test_levels(task: str) -> None:
    settings = experiment(task, num_levels=3)
    model = settings.model.build(*envs.spaces(settings.env), precision="fp32", normalize_observations=False, seed=1)
    play = RunOptions(eval_episodes=8).evaluation
    assert min(evaluate_policy(model, settings, play).scores) >= 3
    unlimited = dataclasses.replace(settings.env, num_levels=0)
    assert "levels" not in evaluate_policy(model, settings.replace(env=unlimited), play).protocol


def test_no_limit_leaves_nothing_to_test_on(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = RunOptions(run=str(tmp_path / "run"), display="none", tensorboard=False)
    lockstep.train(experiment(task), Layout.parse("inline"), options)
    assert main(["eval", str(tmp_path / "run"), "--levels", "test"]) == 2
    assert "env.num_levels=0" in capsys.readouterr().err


def test_experiments_without_levels_are_what_they_were() -> None:
    assert not {"num_levels", "start_level"} & set(to_json(EnvConfig()))
    limited = to_json(EnvConfig(num_levels=200))
    assert limited["num_levels"] == 200 and "start_level" not in limited


@pytest.mark.parametrize("given", [{"num_levels": -1}, {"start_level": 5}, {"num_levels": MAX_LEVELS}])
def test_impossible_levels_are_explained(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(SettingsError, match=rf"env\.{name}={value}\b"):
        EnvConfig(**given).validate()


def test_adapters_that_cannot_choose_levels_are_left_out() -> None:
    assert envs.resolve(EnvConfig("CartPole-v1", num_levels=3)).adapter == "gymnasium"
    with pytest.raises(SettingsError, match=r"--env.adapter gymnasium"):
        envs.resolve(EnvConfig("CartPole-v1", num_levels=3, adapter="envpool"))
    with pytest.raises(SettingsError, match=r"--env.num-levels 0"):
        envs.resolve(EnvConfig("Breakout", num_levels=3))


@pytest.mark.envpool
def test_procgen_is_the_same_on_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("PyQt5", reason="PyQt5-Qt5 has packages for x86-64 alone")
    experiment = recipes.ppo_procgen("CoinrunEasy-v0").replace(
        **{"env.num_envs": 4, "scheme.shards": 2, "scheme.acting_batch": 2, "model.encoder": "minatar"},
        **{"algorithm.rollout": 8, "algorithm.minibatches": 1, "algorithm.epochs": 1, "total_steps": 96},
    )
    digests = {
        lockstep.train(experiment, layout, RunOptions(str(tmp_path / layout.replace(":", "-")))).digest
        for layout in ("inline", "processes:2")
    }
    assert len(digests) == 1


@pytest.mark.envpool
def test_procgen_draws_its_own_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PyQt5", reason="PyQt5-Qt5 has packages for x86-64 alone")
    pools: list[Any] = []
    make_pool = pytest.importorskip("envpool").make_gymnasium
    monkeypatch.setattr("envpool.make_gymnasium", lambda *args, **kw: pools.append(make_pool(*args, **kw)) or pools[-1])
    config = EnvConfig("MazeEasy-v0", num_envs=2, num_levels=3, start_level=50)
    for asked, expected in ((config, {50, 51, 52}), (config.held_out(), None)):
        env: Any = envs.make(asked, seed=3, first_index=0, num_envs=16)
        env.reset(np.zeros((16, 3, 64, 64), np.uint8))
        seen = set(pools[-1].reset()[1]["level_seed"].tolist())
        env.close()
        if expected:
            assert seen == expected
        else:
            assert len(seen) > 8 and min(seen) >= 53
