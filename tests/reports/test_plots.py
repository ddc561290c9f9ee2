from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import write_run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from sentences import says

from lockstep.config.settings import SettingsError
from lockstep.reports.plots import plot
from lockstep.reports.runs import Run


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def test_curve_leaves_out_iterations_without_a_value(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    x, y = Run.read(run).curve("samples", "score/mean")
    assert len(x) == len(y) == 58 and x[0] == 3 * 16_384
    assert Run.read(run).curve("time", "loss/value")[0].tolist()[:2] == [400.0, 600.0]


def test_curve_of_a_run_that_is_writing_its_last_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", iterations=10)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 11, "samp')
    assert len(Run.read(run).curve("samples", "score/mean")[0]) == 8


def test_seeds_form_one_line_and_other_settings_set_lines_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{lag}-{seed}", seed=seed, lag=lag) for lag in (0, 1) for seed in (1, 2, 3)]
    written = texts(plot(runs, tmp_path / "curve.svg"))
    assert "Breakout · PPO" in written
    assert "lag=0 (3 seeds), mean" in written and "lag=1 (3 seeds), mean" in written
    assert "Agent samples (actions)" in written and "Episode return, raw (score/mean)" in written


def test_another_algorithm_is_named_without_its_settings(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, algorithm=name) for name in ("PPO", "Impala")]
    written = texts(plot(runs, tmp_path / "curve.svg", x="frames"))
    assert "Breakout" in written and "PPO (1 seed)" in written and "Impala (1 seed)" in written
    assert "Environment frames" in written


@pytest.mark.parametrize(("iterations", "unit"), [(60, "hours"), (2, "minutes")])
def test_time_has_a_readable_unit(tmp_path: Path, iterations: int, unit: str) -> None:
    run = write_run(tmp_path / "a", iterations=iterations)
    written = texts(plot([run], tmp_path / "c.svg", x="time", metric="loss/value"))
    assert f"Training time [{unit}]" in written and "loss/value" in written


def test_png_shows_something_and_equal_runs_give_equal_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    first, second = plot([run], tmp_path / "new" / "1.png"), plot([str(run)], str(tmp_path / "2.png"))
    assert first.read_bytes() == second.read_bytes()
    picture = np.asarray(imread(first))
    assert picture.shape[:2] == (720, 1275) and picture.std() > 0.02
    assert plot([run], tmp_path / "1.svg").read_bytes() == plot([run], tmp_path / "2.svg").read_bytes()


def test_runs_that_share_no_range_are_drawn_without_a_mean(tmp_path: Path) -> None:
    long = write_run(tmp_path / "a", seed=1)
    late = write_run(tmp_path / "b", seed=2)
    lines = (late / "metrics.jsonl").read_text().splitlines(keepends=True)
    (late / "metrics.jsonl").write_text("".join(lines[50:]))
    (long / "metrics.jsonl").write_text("".join(lines[:20]))
    assert "2 seeds, which share no range" in plot([long, late], tmp_path / "c.svg").read_text()


def test_a_run_is_drawn_once_however_its_folder_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    Path("link").symlink_to(runs[0])
    assert "2 seeds, mean" in plot([*runs, "1", "link"], tmp_path / "c.svg").read_text()


def test_a_single_point_among_many_lines_is_seen(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(lag), lag=lag) for lag in range(7)]
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    marks = []
    for kept in (3, 4):  # the first two have no score yet
        (runs[0] / "metrics.jsonl").write_text("".join(lines[:kept]))
        marks.append(plot(runs, tmp_path / "c.svg").read_text().count("<use "))
    assert marks[0] == marks[1] + 2, "in the picture and its legend"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": "frame"}, ["'frame'", "frames, samples, updates, time"]),
        ({"out": "c.jpeg2"}, ["c.jpeg2", ".png, .svg"]),
        ({"metric": "score/meen"}, ["score/meen", "Similar names: score/mean"]),
        ({"runs": []}, ["No run was given"]),
        ({"runs": ["nowhere"]}, ["nowhere does not exist"]),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    arguments: dict[str, Any] = {"runs": [write_run(tmp_path / "a")], "out": tmp_path / "c.png", **changes}
    with pytest.raises(SettingsError) as error:
        plot(**arguments)
    for word in words:
        assert word in str(error.value)


def test_a_run_before_its_first_episode_ends_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", iterations=2)
    with pytest.raises(SettingsError, match=r"'score/mean' .*episodes"):
        plot([run], tmp_path / "c.png")


def test_runs_without_a_number_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    lines = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    nulls = [json.dumps({**line, "loss/value": None}) + "\n" for line in lines]
    (runs[1] / "metrics.jsonl").write_text("".join(nulls))
    kept = [json.dumps({**line, "loss/value": 1.0}) + "\n" for line in lines]
    (runs[0] / "metrics.jsonl").write_text("".join(kept))
    assert plot(runs, tmp_path / "c.svg", metric="loss/value").is_file()
    assert says(capsys.readouterr().err, "Left out", "loss/value", runs[1].name)
    with pytest.raises(SettingsError, match=r"'loss/value': .*null"):
        plot(runs[1], tmp_path / "c.svg", metric="loss/value")


def test_runs_with_the_same_label_form_one_line(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{lag}-{seed}", seed=seed, lag=lag) for lag in (0, 1) for seed in (1, 2)]
    written = texts(plot(runs, tmp_path / "curve.svg", labels=["now", "now", "later", "later"]))
    assert "now (2 seeds), mean" in written and "later (2 seeds), mean" in written


def test_lines_of_one_algorithm_among_others_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{name}-{lag}", algorithm=name, lag=lag) for name in ("PPO", "DQN") for lag in (0, 1)]
    written = texts(plot([*runs[1:], write_run(tmp_path / "a", algorithm="A2C")], tmp_path / "curve.svg"))
    assert {"DQN, lag=0 (1 seed)", "DQN, lag=1 (1 seed)"} <= {text for text in written if text.startswith("DQN")}


def test_many_lines_are_drawn_without_single_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{lag}-{seed}", seed=seed, lag=lag) for lag in range(6) for seed in (1, 2)]
    few, many = (plot(chosen, tmp_path / f"{len(chosen)}.svg").read_text() for chosen in (runs[:10], runs))
    assert few.count("stroke-opacity: 0.3") == 10 and many.count("stroke-opacity: 0.3") == 0


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of all pictures to come."""
    found: list[Axes] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: found.extend(self.axes))
    return found


def measured(path: Path, values: Sequence[float]) -> Path:
    """A run whose only scores are these, one a sample from 0 on."""
    write_run(path, iterations=1)
    rows = (
        {"iteration": i, "samples": i, "frames": i, "seconds": float(i), "score/mean": value}
        for i, value in enumerate(values)
    )
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_line_is_the_mean_and_its_band_one_sample_deviation(tmp_path: Path, drawn: list[Axes]) -> None:
    ends = [(0.0, 2.0), (2.0, 10.0), (1.0, 6.0), (1.0, 6.0), (1.0, 6.0)]
    runs = [measured(tmp_path / f"{i}", pair) for i, pair in enumerate(ends)]
    for count in (4, 5):
        plot(runs[:count], tmp_path / "c.svg", labels=["same"] * count)
    few, axes = drawn
    assert not few.collections, "four runs are drawn themselves, without a band"
    mean: Any = axes.lines[-1].get_ydata()
    (band,) = axes.collections
    corners = [tuple(point) for point in np.asarray(band.get_paths()[0].vertices).round(6)]
    assert (mean[0], mean[-1]) == (1, 6)
    for at, middle, deviation in ((0, 1, 0.5**0.5), (1, 6, 8**0.5)):
        assert {(at, round(middle - deviation, 6)), (at, round(middle + deviation, 6))} <= set(corners)


def test_thick_lines_are_smoothed_over_a_thirtieth_of_their_points(tmp_path: Path, drawn: list[Axes]) -> None:
    y = np.zeros(91)
    y[45] = 3.0
    plot([measured(tmp_path / "a", y.tolist())], tmp_path / "c.svg")
    thin, thick = (np.asarray(line.get_ydata()) for line in drawn[0].lines)
    assert np.array_equal(thin, y) and thick[43:48].tolist() == [0, 1, 1, 1, 0]


def test_time_is_drawn_in_the_unit_that_the_axis_names(tmp_path: Path, drawn: list[Axes]) -> None:
    plot([write_run(tmp_path / "a")], tmp_path / "c.svg", x="time")
    assert all(np.asarray(line.get_xdata())[-1] == pytest.approx(60 * 200 / 3600) for line in drawn[0].lines)
    assert len(drawn[0].lines) == 2
