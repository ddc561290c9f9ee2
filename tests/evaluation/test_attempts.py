"""Attempts at fixed levels, and the evaluations of all checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import talk
from gymnasium import spaces

from lockstep import SettingsError, evaluate, train
from lockstep.algorithms import PPOConfig
from lockstep.cli.main import main
from lockstep.config.options import EvaluationSettings, RunOptions
from lockstep.envs import EnvConfig
from lockstep.evaluation import attempts
from lockstep.evaluation.attempts import Attempts, evaluate_attempts, evaluate_checkpoints, evaluate_either
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.scheme import Scheme


class Tower(gymnasium.Env[Any, Any]):
    """Three steps. Level n earns 10 n in the first one, and every action 1 earns 1."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def look(self) -> np.ndarray:
        return np.array([self.level / 1000, self.time], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        assert seed is not None
        self.level, self.time = seed, 0
        return self.look(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        earned = 10.0 * self.level * (self.time == 0) + int(action)
        self.time += 1
        return self.look(), earned, self.time == 3, False, {}


def small(**changes: Any) -> Experiment:
    return Experiment(
        env=EnvConfig(id=f"{__file__}:Tower", num_envs=4, num_levels=5),
        model=StandardModelConfig(hidden_sizes=(4,)),
        algorithm=PPOConfig(rollout=6, epochs=1, minibatches=1),
        scheme=Scheme(shards=2),
        total_steps=4 * 6 * 4,
        precision="fp32",
    ).replace(**changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tower"
    options = RunOptions(
        run=str(folder), display="none", checkpoint_every=2, keep_checkpoints=9, check_env=False, tensorboard=False
    )
    train(small(), options=options)
    return folder


def test_the_best_attempt_is_a_maximum_beside_the_mean_and_its_interval() -> None:
    found = Attempts(((1.0, 4.0), (3.0, 5.0), (2.0, 9.0)), ((3.0, 3.0),) * 3, range(7, 9), "so")
    assert found.means == (2.5, 4.0, 5.5) and found.best == 5.5 and found.mean == 4.0
    assert found.interval is not None and found.interval == pytest.approx(slow_interval(found.scores), abs=0.08)
    assert str(found).startswith("best attempt 5.5, mean of all 4, 95% CI ")
    assert "attempts: 2.5, 4, 5.5 (so)" in str(found)
    kept = found.to_json()
    assert (kept["best"], kept["mean"], kept["attempts"], kept["levels"]) == (5.5, 4.0, [2.5, 4.0, 5.5], [7, 8])
    once = Attempts(((1.0, 4.0),), ((3.0, 3.0),), range(7, 9), "so")
    assert once.interval is None and once.best == once.mean == 2.5 and str(once) == "score 2.5 (so)"


def slow_interval(scores: Any) -> tuple[float, float]:
    """All 27² equally likely ways to draw three attempts at each of two levels."""
    levels = list(zip(*scores))
    sums = [[level[i] + level[j] + level[k] for i, j, k in np.ndindex(3, 3, 3)] for level in levels]
    means = sorted((a + b) / 6 for a in sums[0] for b in sums[1])
    return means[int(0.025 * len(means))], means[int(0.975 * len(means))]


@pytest.mark.parametrize("num_envs", [None, 2])
def test_every_attempt_plays_each_level_once(num_envs: int | None, trained: Path) -> None:
    found = evaluate_attempts(trained, levels="1001..1003", attempts=4, num_envs=num_envs)
    scores = np.array(found.scores)
    assert scores.shape == (4, 3) and np.array(found.lengths).tolist() == [[3.0] * 3] * 4
    extra = scores - [10_010, 10_020, 10_030]
    assert ((extra >= 0) & (extra <= 3)).all()
    assert len({tuple(row) for row in extra.tolist()}) > 1, "attempts differ by their sampled actions"
    assert len({tuple(column) for column in extra.T.tolist()}) > 1, "levels have separate action noise"
    assert found == evaluate_attempts(trained, levels="1001..1003", attempts=4, num_envs=num_envs)
    assert found.means == tuple(scores.mean(1)) and found.best == scores.mean(1).max()
    assert "4 attempts at each of 3 levels of " in found.protocol and "levels 1001 to 1003" in found.protocol


def test_greedy_attempts_are_equal_where_the_environment_is_deterministic(trained: Path) -> None:
    found = evaluate_attempts(trained, levels="0..1", attempts=2, greedy=True)
    assert found.scores[0] == found.scores[1] and found.acting == "greedy"
    assert found.interval == pytest.approx((found.mean, found.mean))


def test_an_attempt_at_a_match_is_the_mean_over_its_agents(tmp_path: Path) -> None:
    """Both agents of Walk earn 30 in each of four steps in which they choose the goal."""
    env = EnvConfig(id=f"pettingzoo/{talk.__file__}:Walk", num_envs=4)
    options = RunOptions(run=str(tmp_path / "walk"), display="none", check_env=False, tensorboard=False)
    train(small(env=env, total_steps=48), options=options)
    found = evaluate_attempts(tmp_path / "walk", levels="5..7", attempts=3)
    scores = np.array(found.scores)
    assert scores.shape == (3, 3) and (scores % 15 == 0).all() and (scores <= 120).all()


def test_all_checkpoints_are_a_table_json_and_a_picture(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = evaluate_checkpoints(trained, EvaluationSettings(levels="1001..1002", attempts=3))
    assert [point.iteration for point in points] == [2, 4] and [point.samples for point in points] == [48, 96]
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [point.training for point in points] == [rows[1]["score/mean"], rows[3]["score/mean"]]
    assert points[1].result == evaluate_attempts(trained, levels="1001..1002", attempts=3, checkpoint=4)

    picture = tmp_path / "curve.svg"
    flags = ["--checkpoint", "all", "--levels", "1001..1002", "--attempts", "3"]
    assert main(["eval", str(trained), *flags, "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["best"] for each in found] == [point.result.to_json()["best"] for point in points]
    assert [each["training_score"] for each in found] == [point.training for point in points]
    assert "evaluation, best attempt" in picture.read_text()

    assert main(["eval", str(trained), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["iteration", "samples", "training", "best", "attempt", "mean", "95%", "CI"]
    assert [line.split()[:2] for line in lines[1:3]] == [["2", "48"], ["4", "96"]]

    assert main(["eval", str(trained), "--checkpoint", "all", "--episodes", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["iteration", "samples", "training", "mean", "95%", "CI"]
    expected = evaluate(trained, episodes=4, checkpoint=2).mean
    assert float(lines[1].split()[3].replace(",", "")) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("removed", [(2,), (2, 4)])
def test_checkpoints_that_a_run_removes_meanwhile_are_left_out(
    removed: tuple[int, ...],
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")

    def evaluated(folder: Path, settings: EvaluationSettings, iteration: int) -> Any:
        if iteration in removed:
            shutil.rmtree(run / "checkpoints" / f"{iteration:08d}")
        return evaluate_either(folder, settings, iteration)

    monkeypatch.setattr(attempts, "evaluate_either", evaluated)
    if removed == (2,):
        assert [point.iteration for point in evaluate_checkpoints(run, EvaluationSettings(episodes=2))] == [4]
        assert "iteration 2: left out" in capsys.readouterr().err
    else:
        with pytest.raises(SettingsError, match=r"still training.*--keep-checkpoints"):
            evaluate_checkpoints(run, EvaluationSettings(episodes=2))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--levels", "some"], "must be train, test, or the first and the last level"),
        (["--levels", "9..3"], r"9\.\.3 must be train"),
        (["--levels", "5..3000000000"], "their sum below"),
        (["--attempts", "5"], "--attempts 5 repeats the same levels"),
        (["--levels", "1..3", "--attempts", "0"], "--attempts 0 is out of range"),
        (["--levels", "1..3", "--episodes", "30"], "--episodes 30 with --levels"),
        (["--levels", "1..3", "--metrics", "a", "b"], r"--metrics a b with --levels 1\.\.3"),
        (["--plot", "a.png"], "add --checkpoint all"),
        (["--checkpoint", "all", "--plot", "a.gif"], "Cannot write an image to a.gif"),
    ],
)
def test_mistakes_are_named(flags: list[str], expected: str, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained), *flags]) != 0
    assert re.search(expected, " ".join(capsys.readouterr().err.split()))


def test_python_names_levels() -> None:
    with pytest.raises(SettingsError, match=r"levels='test' .*1001\.\.1005"):
        evaluate_attempts("nowhere", levels="test")
    with pytest.raises(SettingsError, match="evaluate_attempts plays single levels"):
        evaluate("nowhere", levels="1001..1005")  # type: ignore[arg-type]
