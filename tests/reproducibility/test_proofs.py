"""The runs of benchmarks/learning.py and benchmarks/proof.py, as far as they can be checked without being run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import proof
import pytest
from gymnasium import spaces
from made_runs import write_run

from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.evaluation.scores import Evaluation
from lockstep.sweep import Run
from lockstep.sweep.queue import Outcome, Queue

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DRAW = np.random.default_rng(1)
PROOFS = load_object(f"{BENCHMARKS / 'learning.py'}:PROOFS")


@pytest.mark.parametrize("name", PROOFS)
def test_the_flags_are_those_of_a_valid_experiment(name: str) -> None:
    PROOFS[name].experiment().validate()


@pytest.mark.parametrize("part", ["minatar", "mujoco", "portable", "standardized", "atari"])
def test_the_runs_of_many_seeds_are_valid(part: str) -> None:
    runs: list[Run] = load_object(f"{BENCHMARKS / 'proof.py'}:{part}")
    assert len({run.name for run in runs}) == len(runs)
    for run in runs[:15]:
        run.experiment.validate()


def test_every_row_is_a_queue_of_its_own() -> None:
    every = {run.name for run in load_object(f"{BENCHMARKS / 'proof.py'}:runs")()}
    rows: list[Run] = load_object(f"{BENCHMARKS / 'proof.py'}:hopper-sac")
    assert [run.experiment.seed for run in rows] == [1, 2, 3] and {run.name for run in rows} < every
    with pytest.raises(SettingsError, match=r"hopper-dqn; .*hopper-sac"):
        load_object(f"{BENCHMARKS / 'proof.py'}:hopper-dqn")


@pytest.mark.parametrize("part", ["minatar", "mujoco", "portable", "standardized", "atari"])
def test_the_page_has_what_the_reports_wrote(part: str) -> None:
    page = (BENCHMARKS / "seeds.md").read_text().splitlines()
    rows = (BENCHMARKS / "seeds" / f"{part}.md").read_text().splitlines()[2:]
    assert rows
    for row in rows:
        if "levels" not in row:  # those stand in a table of their own
            assert page.count(row) == 1, row


@pytest.mark.slow
def test_the_report_of_many_seeds_tells_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = load_object(f"{BENCHMARKS / 'proof_report.py'}:report")
    monkeypatch.setattr(module := sys.modules[report.__module__], "RESULTS", results := tmp_path / "seeds")
    asked = []

    def evaluate(run: Path, **how: Any) -> Evaluation:
        asked.append((run.name, how["levels"]))
        return Evaluation((1.0, 2.0), (5, 5), "made up")

    monkeypatch.setattr(module, "evaluate", evaluate)
    queue = Queue.make(tmp_path / "set")
    runs = {(run.label, run.experiment.seed): run for run in proof.minatar}
    ends = {("ppo", 1): 3.0, ("ppo", 2): None, ("a2c", 1): 2.0, ("dqn", 1): "failed"}
    for (label, seed), end in ends.items():
        run = runs[f"minatar-{label}", seed]
        queue.add([run])
        write_run(queue.run(run.name), seed=seed, iterations=60 if end else 2)
        failed = end == "failed"
        queue.end(run.name, Outcome("failed") if failed else Outcome("done", f"{label}{seed}", 9, end))
    assert report(queue.folder) == 3
    table = (results / "minatar.md").read_text()
    assert "| `minatar-ppo` | PPO | 1M | 2 of 10 | 3 | 1.5" in table and "`minatar-dqn`" not in table
    assert "not evaluated: minatar-dqn-s1" in capsys.readouterr().out
    assert {"minatar.png", "minatar-ppo.png", "minatar-a2c.png"} == {path.name for path in results.glob("*.png")}
    assert len(asked) == 3
    assert len(json.loads((results / "minatar-ppo.json").read_text())["runs"]) == 2
    report(queue.folder)
    assert len(asked) == 3, "what was evaluated is not evaluated again"

    other = Queue.make(tmp_path / "other machine")
    procgen = next(run for run in proof.atari if run.label == "starpilot-ppo")
    for run in (runs["minatar-ppo", 3], procgen):
        other.add([run])
        write_run(other.run(run.name), seed=run.experiment.seed, iterations=60)
        other.end(run.name, Outcome("done", "another", 9, 4.0))
    asked.clear()
    for run in (runs["minatar-a2c", 1], runs["minatar-a2c", 2]):  # one that is known, whose folder is gone since
        other.add([run])
        other.end(run.name, Outcome("done", "a2c1" if run is runs["minatar-a2c", 1] else "gone", 9, 2.0))
    shutil.copy(results / "minatar.png", before := tmp_path / "before.png")
    without_curve = json.loads((results / "minatar-ppo.json").read_text())
    del without_curve["runs"][0]["curve"]
    (results / "minatar-ppo.json").write_text(json.dumps(without_curve))
    assert report(other.folder) == 4, "that have ended here"
    assert (results / "minatar.png").read_bytes() == before.read_bytes(), "not drawn without an algorithm"
    table = (results / "minatar.md").read_text()
    assert "| `minatar-ppo` | PPO | 1M | 3 of 10 |" in table and "`minatar-a2c`" in table
    kept = json.loads((results / "minatar-ppo.json").read_text())["runs"]
    assert [each["seed"] for each in kept] == [1, 2, 3] and len(kept[2]["curve"]) == 58, "points with a score"
    assert [levels for run, levels in asked if run.startswith("starpilot")] == ["train", "test"]
    table = (results / "atari.md").read_text()
    assert "| PPO, train levels | 1M | 1 |" in table and "| PPO, test levels | 1M | 1 |" in table


def _board(rows: str) -> dict[str, np.ndarray]:
    """What PettingZoo shows of a board, one row a word: x are one's own, o the other's."""
    cells = np.array([list(row) for row in rows.split()])
    return {"observation": np.stack([cells == "x", cells == "o"], -1).astype(np.int8)}


@pytest.mark.parametrize(
    ("rows", "moves"),
    [
        ("xx. oo. ...", {2}),  # wins
        ("x.. oo. x..", {5}),  # prevents it
        ("o.. .x. ..o", {1, 3, 5, 7}),  # a corner would lose to a threat on two sides
        ("o.. ... ...", {4}),  # anything but the middle loses
        ("... ... ...", set(range(9))),  # all of them draw
    ],
)
def test_the_perfect_player_of_tic_tac_toe(rows: str, moves: set[int]) -> None:
    perfect = load_object(f"{BENCHMARKS / 'tic_tac_toe.py'}:perfect")
    assert {perfect(_board(rows), spaces.Discrete(9), DRAW) for _ in range(200)} == moves


@pytest.mark.parametrize(
    ("player", "rows", "moves"),
    [
        ("one_ply", "....... ....... ....... ....... ooo.... xxx....", {3}),
        ("one_ply", "....... ....... ....... x...... x...... x.oo...", {0}),
        ("one_ply", "....... ....... ....... ..xx... .xoo... xoxo...", {3}),  # a diagonal
        ("two_plies", "....... ....... ....... ....... xx..... ooo.x..", {3}),
        ("two_plies", "....... ....... ....... o...... o.x.... o.xx...", {0}),
        (
            "four_plies",
            "....... ....... ....... ....... ....... ..oo.x.",
            {0, 1, 4},
        ),  # or it has three, open at both ends
    ],
)
def test_players_of_connect_four_that_look_ahead(player: str, rows: str, moves: set[int]) -> None:
    play = load_object(f"{BENCHMARKS / 'connect_four.py'}:{player}")
    found = {play(_board(rows), spaces.Discrete(7), DRAW) for _ in range(60)}
    assert found == moves
