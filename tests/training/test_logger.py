from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.algorithms.rnd import with_curiosity
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.core.rollout import Episode
from lockstep.evaluation.scores import Evaluation
from lockstep.experiment import Experiment
from lockstep.recipes import RECIPES, ppo_cartpole
from lockstep.run.folder import RunFolder
from lockstep.run.rows import keep_rows
from lockstep.training.logger import IterationReport, MetricsLogger
from lockstep.training.status import Status

EXPERIMENT: Experiment = ppo_cartpole()
STEP = EXPERIMENT.samples_per_iteration
QUIET = RunOptions(run="r", display="none", tensorboard=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return RunFolder.create(EXPERIMENT, Layout(), QUIET)


def report(iteration: int, scores: list[float] | None = None, **changes: Any) -> IterationReport:
    values: dict[str, Any] = {
        "iteration": iteration,
        "samples": iteration * STEP,
        "frames": 4 * iteration * STEP,
        "updates": 20 * iteration,
        "metrics": {"loss/policy": -0.5, "loss/value": 2.0},
        "episodes": [Episode(score, int(10 * score)) for score in scores or []],
        "times": {"learning": 0.3, "env": 0.1, "inference": 0.05, "other": 0.0, "waiting": 0.05},
        "seconds": 0.5,
        "lags": {"policy_versions": 1.0},
    }
    return IterationReport(**{**values, **changes})


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def test_line_holds_counts_speeds_shares_and_metrics(folder: RunFolder) -> None:
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET)
    logger.record(report(1))
    logger.record(report(2, [1.0, 3.0], seconds=1.5))
    logger.close()
    first, second = lines(folder)
    assert "score/mean" not in first and first["episodes"] == 0
    assert (second["iteration"], second["samples"], second["frames"], second["updates"]) == (2, 2 * STEP, 8 * STEP, 40)
    assert second["seconds"] == 2.0
    assert second["speed/samples_per_second"] == pytest.approx(2 * STEP / 2.0)
    assert second["speed/frames_per_second"] == pytest.approx(8 * STEP / 2.0)
    assert second["score/mean"] == 2.0 and second["score/length"] == 20.0
    assert second["score/iteration_mean"] == 2.0 and second["score/iteration_max"] == 3.0
    assert "score/best" not in second, "two episodes say too little to be called the best"
    shares = {name: second[f"time/{name}"] for name in ("env", "inference", "learning", "waiting", "other")}
    assert shares == pytest.approx({"env": 0.2, "inference": 0.1, "learning": 0.6, "waiting": 0.1, "other": 0.0})
    assert second["lag/policy_versions"] == 1.0
    assert second["loss/policy"] == -0.5


def test_score_is_the_mean_of_the_last_hundred_episodes(folder: RunFolder) -> None:
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET)
    scores = [float(i) for i in range(150)]
    for i in range(15):
        logger.record(report(i + 1, scores[10 * i : 10 * i + 10]))
    assert logger.score() == pytest.approx(sum(range(50, 150)) / 100)
    assert logger.state()["best"] == logger.score()
    logger.record(report(16, [-1000.0]))
    score = logger.score()
    assert score is not None and score < 99.5
    assert logger.state()["best"] == pytest.approx(99.5)
    logger.close()


def test_state_resumes_exactly(folder: RunFolder) -> None:
    """A logger restored at iteration 5 writes what one that never stopped writes."""
    whole = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET)
    state: dict[str, Any] = {}
    for i in range(1, 11):
        whole.record(report(i, [float(i), 2.0 * i]))
        if i == 5:
            state = json.loads(json.dumps(whole.state()))
    whole.close()
    expected = lines(folder)
    keep_rows(folder.metrics, 5)
    resumed = MetricsLogger(
        folder, EXPERIMENT, Layout(), QUIET, {**state, "restored": {"iteration": 5, "seconds": 1, "replayed_steps": 2}}
    )
    for i in range(6, 11):
        resumed.record(report(i, [float(i), 2.0 * i]))
    assert resumed.state() == whole.state()
    resumed.close()
    actual = lines(folder)
    for line in expected + actual:
        for speed in ("speed/samples_per_second", "speed/frames_per_second"):
            line[speed] = round(line[speed], 6)
    assert actual == expected


def test_best_checkpoint_is_remembered_across_a_resume(folder: RunFolder) -> None:
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET)
    assert not logger.mark_best(), "no episode has ended"
    logger.record(report(1, [50.0]))
    assert logger.mark_best() and logger.mark_best(), "few episodes may be luck: the newest stands"
    logger.record(report(1, [1.0] * 9))
    assert logger.mark_best(), "whatever few episodes have scored"
    assert not logger.mark_best()
    logger.record(dataclasses.replace(report(1), episodes=[Episode(math.nan, 1)]))
    assert not logger.mark_best(), "nor is a score the best that is no number"
    for _ in range(100):
        logger.record(report(1, [7.0]))
    assert logger.mark_best()
    state = json.loads(json.dumps(logger.state()))
    logger.close()
    resumed = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET, state)
    resumed.record(report(2, [4.0]))
    assert not resumed.mark_best()
    resumed.record(report(3, [50.0]))
    assert resumed.mark_best()
    resumed.close()


def test_numbers_that_are_not_finite_are_null_and_warned_of_once(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    options = RunOptions(run="r", display="plain", tensorboard=False)
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), options)
    for i in (1, 2):
        logger.record(report(i, metrics={"loss/policy": math.nan, "loss/value": math.inf, "hyper/clip": math.inf}))
    logger.close()
    assert [line["loss/policy"] for line in lines(folder)] == [None, None]
    printed = capsys.readouterr().out
    assert printed.count("Learning has diverged") == 1 and "1: loss/policy, loss/value is not" in printed


def test_scores_without_a_mean_do_not_end_a_run(folder: RunFolder) -> None:
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET)
    for i, scores in enumerate([[math.inf, -math.inf], [1e308, 1e308]], 1):
        logger.record(report(i, episodes=[Episode(score, 1) for score in scores]))
    logger.close()
    assert [(line["score/mean"], line["score/iteration_mean"]) for line in lines(folder)] == [(None, None)] * 2


def test_evaluation_is_a_line_of_its_own(folder: RunFolder) -> None:
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET)
    logger.record(report(1))
    logger.evaluation(1, 20, Evaluation((1.0, 2.0, 6.0), (10, 20, 60), "protocol"))
    logger.record(report(2))
    logger.close()
    line = lines(folder)[1]
    assert (line["iteration"], line["samples"], line["frames"]) == (1, STEP, 4 * STEP)
    assert (line["updates"], line["seconds"]) == (20, 0.5)
    assert line["eval/score"] == 3.0 and line["eval/length"] == 30.0
    assert 1.0 <= line["eval/score_low"] < 3.0 < line["eval/score_high"] <= 6.0
    keep_rows(folder.metrics, 1)
    assert len(lines(folder)) == 2
    resumed = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET, logger.state())
    resumed.evaluation(2, 8, Evaluation((1.0,), (10,), "protocol"))
    resumed.close()
    assert lines(folder)[-1]["frames"] == 8 * STEP


def test_every_line_is_on_disk_at_once(folder: RunFolder) -> None:
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET)
    logger.record(report(1))
    assert len(lines(folder)) == 1
    logger.close()


def test_tensorboard_receives_every_metric(folder: RunFolder) -> None:
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), RunOptions(run="r", display="none"))
    logger.record(report(1, [1.0]))
    logger.record(report(2, [3.0]))
    logger.close()
    events = EventAccumulator(str(folder.tensorboard)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("score/mean")] == [(STEP, 1.0), (2 * STEP, 2.0)]
    names = {name if "/" in name else f"progress/{name}" for name in lines(folder)[-1] if name != "samples"}
    assert set(events.Tags()["scalars"]) == names


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_trackers_are_started_fed_and_finished(
    folder: RunFolder, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    module = ModuleType(tracker)
    module.__dict__.update(
        init=lambda **settings: calls.append(("init", settings)),
        define_metric=lambda name, **axis: calls.append(("axis", {name: axis})),
        log=lambda values, **step: calls.append(("log", {**values, **step})),
        finish=lambda: calls.append(("finish", None)),
    )
    monkeypatch.setitem(sys.modules, tracker, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    options = dataclasses.replace(QUIET, **{tracker: "project"})
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), options)
    logger.record(report(1))
    logger.close()
    axis = ("axis", {"*": {"step_metric": "samples"}})
    assert calls.pop(1) == axis if tracker == "wandb" else calls[1][1]["step"] == STEP
    assert [name for name, _ in calls] == ["init", "log", "finish"]
    assert calls[0][1]["project"] == "project" and calls[0][1]["config"]["seed"] == 1
    assert calls[1][1]["samples"] == STEP and calls[1][1]["loss/value"] == 2.0


def test_every_metric_is_documented(folder: RunFolder) -> None:
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET)
    logger.record(report(1, [1.0] * 20))
    logger.evaluation(1, 4, Evaluation((1.0,), (10,), "protocol"))
    logger.close()
    names = {name for line in lines(folder) for name in line} | {"gradient_norm"}
    for recipe in RECIPES.values():
        algorithm = with_curiosity(recipe().algorithm.build())
        names |= set(algorithm.summarize(dict.fromkeys(algorithm.metric_names, 1.0)))
        names |= {f"hyper/{name}" for name in algorithm.hyperparameters(0.0)}
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert not {name for name in names if f"`{name}`" not in page}


def test_tensorboard_drops_what_an_interrupted_run_wrote_after_its_checkpoint(folder: RunFolder) -> None:
    options = RunOptions(run="r", display="none")
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), options)
    state: dict[str, Any] = {}
    for i in range(1, 6):
        logger.record(report(i, metrics={"loss/value": float(i)}))
        if i == 3:
            state = logger.state()
    logger.close()
    resumed = MetricsLogger(folder, EXPERIMENT, Layout(), options, state)
    resumed.record(report(4, metrics={"loss/value": 40.0}))
    resumed.close()
    events = EventAccumulator(str(folder.tensorboard)).Reload().Scalars("loss/value")
    assert [(event.step, event.value) for event in events] == [(STEP, 1), (2 * STEP, 2), (3 * STEP, 3), (4 * STEP, 40)]


def test_a_wasteful_layout_is_named_once_and_not_before_it_has_settled(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.training.logger.cores_of_the_run", lambda: 4)
    monkeypatch.setattr("lockstep.training.logger.os.getloadavg", lambda: (0.0, 0.0, 0.0))
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), dataclasses.replace(QUIET, display="plain"))
    for iteration in range(1, 5):
        logger.record(report(iteration, seconds=3.3))
        assert ("lockstep tune" in capsys.readouterr().out) == (iteration == 4)
    logger.record(report(5, seconds=3.3))
    logger.close()
    assert "lockstep tune" not in capsys.readouterr().out


def test_the_display_is_told_of_the_recent_iterations(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Status] = []
    display = SimpleNamespace(update=shown.append, close=lambda: None)
    monkeypatch.setattr("lockstep.training.logger.make_display", lambda *_: display)
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET)
    first, second = {"env": 3.0, "learning": 1.0}, {"env": 0.0, "learning": 4.0}
    logger.record(report(1, [1.0], times=first, waits={"rollouts": 1.0}, lags={"policy_versions": 2.0}))
    logger.record(report(2, [2.0, 6.0], times=second, waits={"rollouts": 4.0}, lags={}, seconds=1.5))
    logger.close()
    status = shown[-1]
    assert (status.iteration_seconds, status.seconds) == (1.0, 2.0)
    assert status.total_samples == EXPERIMENT.iterations * STEP
    assert status.waits == {"rollouts": 2.5} and status.policy_lag == 2.0, "of the newest data"
    assert status.shares == {"env": 3 / 8, "learning": 5 / 8}
    assert (status.episodes, status.score, status.length, status.history) == (3, 3.0, 30.0, [1.0, 3.0])
    assert lines(folder)[-1]["episodes"] == 3


def test_the_history_of_scores_is_thinned_when_it_is_full(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.logger._HISTORY", 4)
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), QUIET)
    for i in range(1, 7):
        logger.record(report(i, [float(i)]))
    logger.close()
    assert logger.state()["history"] == [1.0, 2.0, 3.0, 3.5], "of 1, 1.5, 2, 2.5, 3, and then 3.5"


def test_a_resumed_run_is_judged_by_its_own_seconds(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.training.logger.cores_of_the_run", lambda: 4)
    monkeypatch.setattr("lockstep.training.logger.os.getloadavg", lambda: (0.0, 0.0, 0.0))
    logger = MetricsLogger(folder, EXPERIMENT, Layout(), dataclasses.replace(QUIET, display="plain"), {"seconds": 99.0})
    for iteration in range(1, 7):
        logger.record(report(iteration, seconds=2.0))
        assert ("lockstep tune" in capsys.readouterr().out) == (iteration == 5)
    logger.close()


@pytest.mark.parametrize(("state", "resume"), [(None, "never"), ({"samples": STEP}, "allow")])
def test_trackio_takes_up_a_run_that_is_resumed_alone(
    folder: RunFolder, state: dict[str, Any] | None, resume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []
    module = ModuleType("trackio")
    module.__dict__.update(init=lambda **settings: begun.append(settings), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    MetricsLogger(folder, EXPERIMENT, Layout(), dataclasses.replace(QUIET, trackio="project"), state).close()
    assert [settings["resume"] for settings in begun] == [resume]


def test_wandb_takes_a_run_up_by_an_id_that_no_other_run_has(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []
    module = ModuleType("wandb")
    module.__dict__.update(
        init=lambda **settings: begun.append(settings), define_metric=lambda *_, **__: None, finish=lambda: None
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    MetricsLogger(folder, EXPERIMENT, Layout(), dataclasses.replace(QUIET, wandb="project")).close()
    assert [(settings["id"], settings["resume"]) for settings in begun] == [(folder.facts()["id"], "allow")]
