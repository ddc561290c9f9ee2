"""Equal samples or equal computing time for several tasks: numbers of environments, and what reports say of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playing import user_file

from lockstep import recipes, train
from lockstep.cli.main import main
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.envs.mixed import describe, shares
from lockstep.reports.report import report
from lockstep.speed.tasks import TaskCosts, balanced, task_costs

USER = """
import gymnasium
import numpy as np

class Quick(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    work = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        self.time += 1
        sum(range(self.work))
        return self.np_random.random(2, np.float32), 1.0, self.time == 5, False, {}

class Slow(Quick):
    work = 100_000

class Parts(Quick):
    action_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(2), b=gymnasium.spaces.Box(-1, 1, (2,)))

    def step(self, action):
        assert set(action) == {"a", "b"}
        return super().step(action)

class Same(Parts):
    pass

class Masked(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict(
        x=gymnasium.spaces.Box(0, 1, (2,)), action_mask=gymnasium.spaces.Box(0, 1, (2,), np.int8)
    )
    action_space = gymnasium.spaces.Discrete(2)

class AsMasked(Masked):
    pass
"""
BOTH = "mixed/costs.py:Quick+costs.py:Slow"


@pytest.fixture(scope="module", autouse=True)
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with user_file(tmp_path_factory, "costs.py", USER):
        yield


@pytest.mark.parametrize(
    ("costs", "most", "expected"),
    [
        ((1.0, 1.0), 8, (1, 1)),
        ((1.0, 2.0), 8, (2, 1)),
        ((3.0, 2.0), 8, (2, 3)),
        ((3.0, 2.0), 4, (1, 2)),  # no two numbers of sum 4 or less come closer: 3 and 4
        ((1.0, 10.0, 5.0), 16, (10, 1, 2)),
        ((1.0, 100.0), 8, (7, 1)),  # 100 and 1 do not fit
    ],
)
def test_numbers_that_balance_costs(costs: tuple[float, ...], most: int, expected: tuple[int, ...]) -> None:
    assert balanced(costs, most) == expected


def experiment(**changes: Any) -> Any:
    env = {"env.id": BOTH, "env.adapter": "auto", "env.num_envs": 32, "scheme.shards": 2}
    return recipes.ppo_cartpole().replace(**{**env, **changes})


def test_a_slow_task_gets_fewer_environments() -> None:
    found = task_costs(experiment(), rounds=2, seconds=0.05)
    assert [len(rounds) for rounds in found.costs] == [2, 2] and found.copies[0] > found.copies[1]
    told = found.to_json()
    assert sum(row["share_of_time"] for row in told["tasks"]) == pytest.approx(1)
    assert found.num_envs % (2 * sum(found.copies)) == 0
    assert [row["environments"] for row in told["tasks"]] == list(found.copies)
    assert shares(told["env_id"]) == {row["task"]: row["share_of_samples"] for row in told["tasks"]}


def test_the_table_by_hand() -> None:
    quick = task_costs(experiment(), rounds=1, seconds=0.001)
    found = TaskCosts(quick.tasks, ((1e-6, 3e-6, 2e-6), (8e-6,) * 3), (4, 1), 30)
    lines = found.table().splitlines()
    assert lines[1].split() == ["costs.py-Quick", "2.0", "(1.0", "to", "3.0)", "4", "80.0%", "50.0%"]
    id_ = "mixed/costs.py:Quick@gymnasium*4+costs.py:Slow@gymnasium"
    assert lines[-1] == f"equal computing time: --env.id '{id_}' --env.num-envs 30"


def test_only_several_tasks_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match=r"env\.id=CartPole-v1"):
        task_costs(recipes.ppo_cartpole())
    with pytest.raises(SettingsError, match="A shard has 1 environments"):
        task_costs(experiment(**{"env.num_envs": 2}))
    flags = ["--env.id", BOTH, "--env.adapter", "auto", "--env.num-envs", "16", "--rounds", "1", "--seconds", "0.01"]
    assert main(["bench", "ppo-cartpole", *flags, "--tasks", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tasks"]) == 2


def test_actions_may_have_parts_but_no_mask() -> None:
    found = task_costs(experiment(**{"env.id": "mixed/costs.py:Parts+costs.py:Same"}), rounds=1, seconds=0.001)
    assert len(found.costs) == 2
    with pytest.raises(SettingsError, match=r"bench --tasks.* action_mask"):
        task_costs(experiment(**{"env.id": "mixed/costs.py:Masked+costs.py:AsMasked"}))


def test_reports_state_the_tasks_shares_of_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unequal = {"costs.py-Quick": 0.75, "costs.py-Slow": 0.25}
    words = "samples costs.py-Quick 75.0%, costs.py-Slow 25.0%"
    assert describe(shares(BOTH)) == "equal samples of 2 tasks" and describe(unequal) == words
    assert shares("CartPole-v1") == {} and describe({}) == ""
    whole = experiment(**{"env.id": BOTH.replace("Quick", "Quick*3"), "env.num_envs": 8, "total_steps": 256})
    options = RunOptions(run=str(tmp_path / "run"), display="none", tensorboard=False, check_env=False)
    run = train(whole, "inline", options).run
    assert json.loads((run / "run.json").read_text())["shares_of_samples"] == unequal
    assert main(["eval", str(run), "--episodes", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["shares_of_samples"] == unequal and f"({words})" in told["protocol"]
    page = report([run], tmp_path / "report.html").path.read_text()
    assert words in page
