"""Suites: their tables, the aggregates that follow from these, and runs beside them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from made_runs import write_run
from sentences import says

from lockstep.cli.main import main
from lockstep.config.settings import SettingsError
from lockstep.evaluation import statistics
from lockstep.reports import atari
from lockstep.reports.report import report
from lockstep.reports.runs import Run
from lockstep.reports.suites import SUITES, key, published, sources, suite_of

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", SUITES)
def test_every_task_has_published_scores(name: str) -> None:
    tasks = {key(task) for task in suite_of(name).tasks}
    missing = {(method, task) for method, scores in published(name).items() for task in tasks ^ set(scores)}
    # CleanRL has no run of Ant.
    assert {(method.partition(" ")[0], task) for method, task in missing} <= {("CleanRL", "Ant")}
    assert "arXiv" in sources(name) or "documentation" in sources(name)


def normalized(name: str, method: str) -> list[np.ndarray]:
    """The method's score on each task, [1]."""
    found = []
    for task, score in published(name)[method].items():
        low, high = atari.RANDOM_AND_HUMAN[task]
        found.append(np.array([(score - low) / (high - low)]))
    return found


@pytest.mark.parametrize(
    ("name", "method", "median", "mean"),
    [
        # Table 1 of SPR's paper (arXiv:2007.05929), whose scores these are.
        ("atari100k", "DER", 0.161, 0.285),
        ("atari100k", "OTRainbow", 0.204, 0.264),
        ("atari100k", "CURL", 0.175, 0.381),
        ("atari100k", "DrQ", 0.268, 0.357),
        ("atari100k", "SPR", 0.415, 0.704),
        # Cleanba's paper.
        ("atari57", "Cleanba IMPALA", 1.658, None),
        ("atari57", "CleanRL PPO", 1.726, None),
    ],
)
def test_aggregates_are_those_published(name: str, method: str, median: float, mean: float | None) -> None:
    scores = normalized(name, method)
    assert float(statistics.median(scores)) == pytest.approx(median, abs=6e-4)
    if mean is not None:
        assert float(statistics.mean(scores)) == pytest.approx(mean, abs=1e-3)


@pytest.mark.parametrize(("method", "title"), [("drq_eps", "DrQ(ε)"), ("spr", "SPR")])
def test_runs_with_the_published_means_and_deviations_reach_the_published_aggregates(method: str, title: str) -> None:
    """rliable's means and deviations over 100 runs, from which its authors drew ten runs for their intervals."""
    generator, scores = np.random.default_rng(0), []
    with (DATA / "atari100k_rliable.csv").open() as lines:
        for row in csv.DictReader(line for line in lines if not line.startswith("#")):
            low, high = atari.RANDOM_AND_HUMAN[row["game"]]
            runs = generator.normal(float(row[method]), float(row[f"{method}_sd"]), 1_000)
            scores.append((runs - low) / (high - low))
            assert published("atari100k")[f"{title} (rliable)"][row["game"]] == float(row[method])
    median, iqm, *_ = SUITES["atari100k"].aggregates[f"{title} (rliable, 10 runs)"]
    assert median.interval and iqm.interval
    assert median.interval[0] < float(statistics.median(scores)) < median.interval[1]
    assert iqm.interval[0] < float(statistics.iqm(scores)) < iqm.interval[1]


def write_runs(folder: Path, scores: dict[str, tuple[float, ...]], algorithm: str = "PPO") -> list[Path]:
    """Runs of 100k steps with these final evaluations, by game."""
    found = []
    for game, each in scores.items():
        for seed, score in enumerate(each, 1):
            path = folder / f"{game}-{seed}"
            write_run(path, task=game, seed=seed, algorithm=algorithm, metrics={"eval/score": score})
            settings = json.loads((path / "experiment.json").read_text())
            settings["env"]["protocol"], settings["total_steps"] = "classic", 100_000
            (path / "experiment.json").write_text(json.dumps(settings))
            found.append(path)
    return found


# Human-normalized: Pong 0.4 and 0.6, Boxing 0.5 and 1.5, Freeway 0 and 0.2.
SCORES = {"Pong": (-6.58, 0.48), "Boxing": (6.1, 18.1), "ALE/Freeway-v5": (0.0, 5.92)}


def test_runs_beside_published_scores_by_hand(tmp_path: Path) -> None:
    standing = report(write_runs(tmp_path, SCORES), tmp_path / "page.html", suite="atari100k").standing
    assert standing is not None and standing.shared == ("Boxing", "Freeway", "Pong")
    (ours,) = standing.rows[0].scores
    assert [row.scores[ours].value for row in standing.rows] == pytest.approx([12.1, 2.96, -3.05])
    assert [row.normalized[ours] for row in standing.rows] == pytest.approx([1.0, 0.1, 0.5])
    found = standing.aggregates[ours]
    assert found["median"].value == pytest.approx(0.5)
    assert found["mean"].value == pytest.approx(1.6 / 3)
    assert found["interquartile mean"].value == pytest.approx((0.2 + 0.4 + 0.5 + 0.6) / 4)  # of six, one at each end
    assert found["optimality gap"].value == pytest.approx(1 - (0.75 + 0.1 + 0.5) / 3)
    interval = found["mean"].interval
    assert interval is not None and interval[0] < 1.6 / 3 < interval[1]
    # DER's means of the same games: Boxing 0.2, Freeway 27.9, Pong -19.3.
    theirs = sorted([0.1 / 12, 27.9 / 29.6, 1.4 / 35.3])
    assert standing.aggregates["DER"]["median"].value == pytest.approx(theirs[1])
    assert standing.aggregates["DER"]["mean"].value == pytest.approx(sum(theirs) / 3)
    assert "SPR (rliable, 10 runs)" not in standing.aggregates, "they are over all 26 games"
    assert any("has no run of 23 tasks" in note for note in standing.notes)
    text = (tmp_path / "page.html").read_text()
    assert "<h2>Atari 100k</h2>" in text and "<td>27.9</td>" in text and "arXiv:1906.05243" in text


def test_all_games_stand_beside_published_aggregates(tmp_path: Path) -> None:
    scores = {game: (human,) for game, (_, human) in atari.RANDOM_AND_HUMAN.items() if SUITES["atari100k"].has(game)}
    standing = report(write_runs(tmp_path, scores), tmp_path / "page.html", suite="atari100k").standing
    assert standing is not None and len(standing.rows) == 26 and not standing.notes
    assert str(standing.aggregates["DrQ(ε) (rliable, 10 runs)"]["interquartile mean"]) == "0.302 (0.275 to 0.33)"
    (ours,) = standing.rows[0].scores
    assert {kind: each.value for kind, each in standing.aggregates[ours].items()} == {
        "median": 1.0,
        "interquartile mean": 1.0,
        "mean": 1.0,
        "optimality gap": 0.0,
    }


def test_a_method_that_lacks_tasks_does_not_shrink_the_aggregates_of_one_that_has_all(tmp_path: Path) -> None:
    scores = {game: (human,) for game, (_, human) in atari.RANDOM_AND_HUMAN.items() if SUITES["atari100k"].has(game)}
    runs = write_runs(tmp_path / "all", scores)
    runs += write_runs(tmp_path / "some", {"Pong": (-20.7,), "Boxing": (0.1,)}, algorithm="A2C")
    standing = report(runs, tmp_path / "page.html", suite="atari100k").standing
    assert standing is not None and len(standing.shared) == 26
    assert sorted(len(row.scores) for row in standing.rows) == [1] * 24 + [2] * 2
    (whole,) = standing.rows[0].scores
    some = next(label for row in standing.rows for label in row.scores if label != whole)
    assert standing.aggregates[whole]["mean"].value == 1.0 and some not in standing.aggregates
    assert any(says(note, some, "24 tasks", "Aggregates leave it out") for note in standing.notes)


def test_other_rules_and_tasks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_runs(tmp_path, {"Pong": (1.0,)})
    for name, task in (("x", "Boxing"), ("y", "Hopper-v4")):
        runs.append(write_run(tmp_path / name, task=task, metrics={"eval/score": 1.0}))
    assert main(["report", *map(str, runs), "--suite", "atari100k", "--out", str(tmp_path / "page.html")]) == 0
    told = capsys.readouterr().out
    assert "The suite has env.protocol=classic, but not these runs: x." in told
    assert "These runs are on other tasks: y." in told
    with pytest.raises(SettingsError, match="atari100k, atari57, mujoco"):
        report(runs, tmp_path / "page.html", suite="atari")
    with pytest.raises(SettingsError, match=r"mujoco, .*HalfCheetah-v4"):
        report(runs[:1], tmp_path / "page.html", suite="mujoco", metric="eval/score")


def test_runs_that_have_not_finished_are_named(tmp_path: Path) -> None:
    whole, going = (
        write_run(tmp_path / name, task=f"{name}-v4", planned=planned, score=lambda done: 3000 * done)
        for name, planned in (("Hopper", None), ("Ant", 100))
    )
    standing = report([whole, going], tmp_path / "page.html", suite="mujoco").standing
    assert standing is not None
    (note,) = [note for note in standing.notes if "not finished" in note]
    assert "Ant" in note and "Hopper" not in note


def test_a_suite_without_a_scale_has_a_table_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "hopper", task="Hopper-v4", score=lambda done: 3000 * done)
    standing = report(run, tmp_path / "page.html", suite="mujoco").standing
    assert standing is not None and not standing.aggregates and standing.rows[0].published["CleanRL SAC"] == 2310


def test_a_task_that_a_source_omits_has_no_score_of_it() -> None:
    scores = published("mujoco")
    assert "Ant" not in scores["CleanRL PPO"] and scores["Tianshou PPO"]["Ant"] == 3258


def test_a_very_long_run_keeps_its_evaluations_and_its_end(tmp_path: Path) -> None:
    path = write_runs(tmp_path, {"Pong": (0.0,)})[0]
    lines = [{"iteration": n, "samples": n, "score/mean": float(n)} for n in range(1, 50_001)]
    evaluated = {"iteration": 12_344, "samples": 12_344, "eval/score": 3.0}
    rows = [*lines[:12_344], evaluated, *lines[12_344:]]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Run.read(path)
    assert len(run.records) < 20_000 and run.last("samples") == 50_000
    assert run.curve("samples", "eval/score")[1].tolist() == [3.0]


def test_a_sweep_takes_a_suites_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "set")
    words = ["sweep", folder, "sac-mujoco", "--suite", "mujoco", "--dry-run", "--json"]
    assert main(words) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {run["name"].split("-")[2] for run in runs} == {task.partition("-")[0] for task in SUITES["mujoco"].tasks}
    assert main([*words, "--env.id", "Hopper-v4"]) == 2 and "Leave one of them out" in capsys.readouterr().err
    assert main(["sweep", folder, "--suite", "atari100k"]) == 2 and "is for recipes" in capsys.readouterr().err
