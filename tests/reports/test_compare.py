from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import SAMPLES, write_run
from sentences import says

from lockstep.config.settings import SettingsError
from lockstep.reports.compare import compare


def runs_of(folder: Path, name: str, finals: list[float], task: str = "CartPole-v1", **settings: Any) -> list[Path]:
    """Runs whose score rises linearly to these values."""
    return [
        write_run(folder / f"{name}-{task}-{i}", seed=i, task=task, score=lambda done, f=final: f * done, **settings)
        for i, final in enumerate(finals)
    ]


def test_one_task_by_hand(tmp_path: Path) -> None:
    a, b = runs_of(tmp_path, "a", [10, 20, 30, 40, 50]), runs_of(tmp_path, "b", [15, 15, 20, 25, 60], lag=1)
    found = compare(a, b)
    (task,) = found.tasks
    assert (task.task, task.budget, found.overall) == ("CartPole-v1", 60 * SAMPLES, None)
    assert task.scores_a == (10, 20, 30, 40, 50) and task.scores_b == (15, 15, 20, 25, 60)
    assert task.a and task.b and task.difference
    assert task.a.value == 30 and task.b.value == 20 and task.difference.value == 10
    # Of 25 pairs, 10 wins none, 20 two and a tie, 30 and 40 and 50 four each.
    assert task.improvement.value == pytest.approx((0 + 2.5 + 4 + 4 + 4) / 25)
    assert task.difference.interval and task.difference.interval[0] < 0 < task.difference.interval[1]
    assert found.notes == ()
    assert says(found.protocol, "mean", "100 training episodes", "exploration")
    assert found.protocol in str(found).splitlines()
    back = compare(b, a).tasks[0]
    assert back.improvement.value == pytest.approx(1 - task.improvement.value)


def test_runs_are_compared_at_an_equal_budget(tmp_path: Path) -> None:
    # The same learning at the same speed, but those of b went on for twice as long.
    a = [write_run(tmp_path / f"a{i}", seed=i, iterations=30, score=lambda done: 100 * done) for i in range(3)]
    b = [write_run(tmp_path / f"b{i}", seed=i, iterations=60, score=lambda done: 200 * done) for i in range(3)]
    (task,) = compare(a, b).tasks
    assert task.budget == 30 * SAMPLES
    assert task.scores_a == pytest.approx((100,) * 3) and task.scores_b == pytest.approx((100,) * 3)
    assert task.improvement.value == 0.5
    assert compare(a, b, x="time").tasks[0].budget == 30 * 200.0


def test_a_run_whose_scores_begin_too_late_has_none_at_an_equal_budget(tmp_path: Path) -> None:
    long, short = write_run(tmp_path / "long", iterations=60), write_run(tmp_path / "short", iterations=10)
    lines = (long / "metrics.jsonl").read_text().splitlines()
    (long / "metrics.jsonl").write_text("\n".join(lines[40:]) + "\n")
    with pytest.raises(SettingsError, match=r"long .*score/mean .*671,744 samples.*163,840"):
        compare([long], [short])
    with pytest.raises(SettingsError, match=r"score/mean at 8,200 seconds, .* only 2,000 seconds"):
        compare([long], [short], x="time")


def test_several_tasks(tmp_path: Path) -> None:
    a = runs_of(tmp_path, "a", [1, 2, 3, 4, 5]) + runs_of(tmp_path, "a", [7] * 5, "Acrobot-v1")
    b = runs_of(tmp_path, "b", [0] * 5) + runs_of(tmp_path, "b", [9] * 5, "Acrobot-v1")
    found = compare(a, b)
    assert [task.improvement.value for task in found.tasks] == [1.0, 0.0]
    assert found.overall and found.overall.improvement.value == 0.5 and found.overall.a is None
    assert "2 tasks" in str(found) and "P(A > B)  0.5" in str(found)


def test_games_are_compared_by_human_normalized_scores(tmp_path: Path) -> None:
    a = runs_of(tmp_path, "a", [14.6] * 5, "Pong") + runs_of(tmp_path, "a", [30.5] * 5, "Breakout")
    b = runs_of(tmp_path, "b", [-20.7] * 5, "Pong") + runs_of(tmp_path, "b", [1.7] * 5, "Breakout")
    overall = compare(a, b).overall
    assert overall and overall.a and overall.b and overall.difference
    assert (overall.a.value, overall.b.value, overall.difference.value) == pytest.approx((1, 0, 1))
    assert overall.improvement.value == 1


def test_games_of_procgen_have_a_scale_and_those_of_two_benchmarks_none(tmp_path: Path) -> None:
    a = runs_of(tmp_path, "a", [64] * 5, "StarpilotEasy-v0") + runs_of(tmp_path, "a", [10] * 5, "MazeEasy-v0")
    b = runs_of(tmp_path, "b", [2.5] * 5, "StarpilotEasy-v0") + runs_of(tmp_path, "b", [5] * 5, "MazeEasy-v0")
    found = compare(a, b)
    overall = found.overall
    assert overall and overall.a and overall.b and (overall.a.value, overall.b.value) == pytest.approx((1, 0))
    assert "2 games, Procgen-normalized" in str(found)
    a[5:], b[5:] = runs_of(tmp_path, "a", [14.6] * 5, "Pong"), runs_of(tmp_path, "b", [-20.7] * 5, "Pong")
    overall = compare(a, b).overall
    assert overall and overall.a is None and overall.improvement.value == 1


def test_what_weakens_a_comparison_is_noted(tmp_path: Path) -> None:
    a = [
        *runs_of(tmp_path, "a", [1, 2]),
        *runs_of(tmp_path, "c", [3], lag=2),
        *runs_of(tmp_path, "d", [3], "Acrobot-v1"),
    ]
    b = runs_of(tmp_path, "b", [1, 2, 3])
    notes = compare(a, [*b, b[0]]).notes
    assert says(notes, "of A", "scheme.lag")
    assert says(notes, "A ", "Acrobot-v1")
    assert says(notes, "1 ", "of B", "twice")
    young = write_run(tmp_path / "young", iterations=2)
    assert says(compare(b, [*b, young]).notes, "of B", "score/mean", "young")
    assert says(notes, "fewer than 5 runs") and not says(notes, "with one run")
    alone = compare([*b, *runs_of(tmp_path, "e", [3], "Acrobot-v1")], a).notes
    assert says(alone, "with one run") and says(alone, "fewer than 5 runs"), "of another task"
    assert says(notes, "A ", "several", "seed 0") and not says(notes, "B ", "several")


def test_one_short_run_is_named_as_what_moves_the_budget(tmp_path: Path) -> None:
    a, b = runs_of(tmp_path, "a", [1] * 3), runs_of(tmp_path, "b", [2] * 2)
    short = write_run(tmp_path / "short", seed=9, task="CartPole-v1", iterations=20)
    found = compare(a, [*b, short], out=tmp_path / "c.html")
    assert found.tasks[0].budget == 20 * SAMPLES
    (note,) = (note for note in found.notes if says(note, "short", "score/mean", "327,680 samples"))
    assert "983,040" in note and note in (tmp_path / "c.html").read_text()
    longer = [write_run(tmp_path / f"c{i}", seed=i, task="CartPole-v1", iterations=120) for i in range(3)]
    assert "leave out" not in " ".join(compare(a, longer).notes), "a set of shorter runs is what was asked for"


def test_the_run_that_limits_the_time_is_named_with_its_seconds(tmp_path: Path) -> None:
    lengths = [7, 20, 20, 20]
    runs = [write_run(tmp_path / str(seed), seed=seed, iterations=each) for seed, each in enumerate(lengths)]
    for run in runs:
        change = [json.dumps({**json.loads(line), "seconds": 0.11 * n}) for n, line in enumerate(open_lines(run), 1)]
        (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in change))
    told = " ".join(compare(runs[:2], runs[2:], x="time").notes)
    assert "at 0.77 seconds" in told and "most reached 2.2." in told


def open_lines(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


def test_a_task_that_cannot_be_compared_is_left_out(tmp_path: Path) -> None:
    late = write_run(tmp_path / "late", iterations=60, task="Pong")
    lines = (late / "metrics.jsonl").read_text().splitlines()
    (late / "metrics.jsonl").write_text("\n".join(lines[40:]) + "\n")
    a, b = runs_of(tmp_path, "a", [1, 2]), runs_of(tmp_path, "b", [3, 4])
    short = write_run(tmp_path / "short", iterations=10, task="Pong")
    found = compare([*a, late], [*b, short])
    assert [each.task for each in found.tasks] == ["CartPole-v1"] and found.overall is None
    assert says(found.notes, "Pong", "late", "score/mean")


def test_other_rules_and_machines_are_noted(tmp_path: Path) -> None:
    a, b = runs_of(tmp_path, "a", [1, 2]), runs_of(tmp_path, "b", [3, 4])
    for run in b:
        settings, facts = (json.loads((run / name).read_text()) for name in ("experiment.json", "run.json"))
        settings["env"]["protocol"] = "classic"
        (run / "experiment.json").write_text(json.dumps(settings))
        (run / "run.json").write_text(json.dumps({**facts, "cores": 64}))
    notes = compare(a, b).notes
    assert says(notes, "A and B", "CartPole-v1", "env.protocol")
    assert not any("machines" in note for note in notes)
    assert any("different layouts or machines" in note for note in compare(a, b, x="time").notes)


def test_a_run_is_the_same_however_its_folder_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = runs_of(tmp_path, "a", [10, 20]), runs_of(tmp_path, "b", [5, 6])
    Path("link").symlink_to(a[0])
    found = compare([*a, a[0].relative_to(tmp_path), "link"], b)
    assert found.tasks[0].scores_a == (10, 20)
    assert says(found.notes, "2 ", "of A", "twice")
    found = compare(a, [*b, "link"])
    assert found.tasks[0].scores_b == (5, 6, 10)
    assert says(found.notes, "not independent", a[0].name)


def test_the_page_of_unequal_runs_does_not_contradict_its_verdict(tmp_path: Path) -> None:
    """Those of A learn more slowly, and went on for four times as long."""
    a = [write_run(tmp_path / f"a{i}", seed=i, iterations=60, score=lambda done: 100 * done) for i in range(3)]
    b = [write_run(tmp_path / f"b{i}", seed=i, iterations=15, lag=1, score=lambda done: 50 * done) for i in range(3)]
    found = compare(a, b, out=tmp_path / "c.html")
    assert found.tasks[0].improvement.value == 0
    text = (tmp_path / "c.html").read_text()
    aggregates = text[text.index('id="aggregates"') :]
    assert "<td>0 (0 to 0)</td>" in aggregates
    assert f"{15 * SAMPLES:,} on Breakout" in aggregates


def test_the_page_begins_with_the_verdict_and_shows_both(tmp_path: Path) -> None:
    a, b = runs_of(tmp_path, "a", [10, 20, 30]), runs_of(tmp_path, "b", [5, 6, 7], lag=1)
    text = (compare(a, b, out=tmp_path / "c.html"), (tmp_path / "c.html").read_text())[1]
    assert text.index('id="verdict"') < text.index('id="scores"') < text.index('id="curves"')
    assert "A: lag=0 (3 seeds)" in text and "B: lag=1 (3 seeds)" in text
    assert "<td>20 (10 to 30)</td><td>6 (5 to 7)</td>" in text


def test_it_is_json(tmp_path: Path) -> None:
    found = compare(runs_of(tmp_path, "a", [1, 2]), runs_of(tmp_path, "b", [3])).to_json()
    task = json.loads(json.dumps(found))["tasks"][0]
    assert task["a"] == {"value": 1.5, "interval": [1.0, 2.0]} and task["b"] == {"value": 3.0, "interval": None}
    assert task["improvement"] == {"value": 0.0, "interval": None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"b": []}, ["two sets", "--"]),
        ({"x": "steps"}, ["--x 'steps'", "samples"]),
        ({"metric": "score/meen"}, ["Similar names: score/mean"]),
        ({"out": "c.txt"}, ["--out c.txt", ".html"]),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    arguments: dict[str, Any] = {"a": runs_of(tmp_path, "a", [1]), "b": runs_of(tmp_path, "b", [1])}
    with pytest.raises(SettingsError) as error:
        compare(**{**arguments, **changes})
    for word in words:
        assert word in str(error.value)


def test_sets_without_a_common_task(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"CartPole-v1 .*Acrobot-v1"):
        compare(runs_of(tmp_path, "a", [1]), runs_of(tmp_path, "b", [1], "Acrobot-v1"))


def test_runs_that_were_to_go_on_are_named(tmp_path: Path) -> None:
    a, b = runs_of(tmp_path, "a", [1, 2]), runs_of(tmp_path, "b", [3])
    young = write_run(tmp_path / "young", seed=9, task="CartPole-v1", iterations=58, planned=60)
    assert says(compare(a, [*b, young]).notes, "iterations", "young")
    assert not says(compare(a, b).notes, "iterations")


def test_everything_is_compared_along_the_axis_that_is_asked_for(tmp_path: Path) -> None:
    a, b = runs_of(tmp_path, "a", [1] * 3), runs_of(tmp_path, "b", [2] * 2)
    short = write_run(tmp_path / "short", seed=9, task="CartPole-v1", iterations=20)
    found = compare(a, [*b, short], x="time", out=tmp_path / "c.html")
    assert says(found.notes, "short", "score/mean", "4,000 seconds")
    text = (tmp_path / "c.html").read_text()
    assert "seconds" in text and "4,000 on CartPole-v1" in text
