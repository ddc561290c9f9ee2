from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from lockstep.config.layout import Layout
from lockstep.training import display
from lockstep.training.display import PARTS, duration, number, panel, plain_line, sparkline
from lockstep.training.status import Status, bottleneck, waste


def status(**changes: Any) -> Status:
    values: dict[str, Any] = {
        "iteration": 37,
        "iterations": 98,
        "samples": 37_888,
        "total_samples": 100_352,
        "frames": 151_552,
        "updates": 592,
        "samples_per_second": 1024.0,
        "frames_per_second": 4096.0,
        "seconds": 37.0,
        "iteration_seconds": 1.0,
        "score": 10.89,
        "best": 12.5,
        "length": 301.5,
        "episodes": 111,
        "history": [float(i) for i in range(40)],
        "shares": {"env": 0.5, "inference": 0.2, "learning": 0.25, "waiting": 0.03, "other": 0.02},
        "policy_lag": 1.0,
        "metrics": {"loss/policy": -0.00349, "loss/value": 0.2653, "hyper/clip": 0.1},
        "layout": Layout("processes", 2),
        "shards": 4,
    }
    return Status(**{**values, **changes})


def draw(shown: Status | None, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, record=True, color_system=None)
    console.print(panel(shown, "ppo · Breakout", "runs/breakout", 2, 1.0, width))
    return console.export_text()


def test_panel_shows_everything_a_person_wants_to_know() -> None:
    text = draw(status())
    for part in (
        "ppo · Breakout",
        "runs/breakout",
        "37.8%",
        "ETA 01:00",
        "37,888 / 100,352",
        "151,552",
        "1,024",
        "4,096",
        "37 / 98",
        "592",
        "1 version ",
        "10.89",
        "12.5",
        "111",
        "301.5",
        "▁▁▁▂▂▂",
        "███",
        "env 50%",
        "inference 20%",
        "learning 25%",
        "waiting 3%",
        "other 2%",
        "loss/policy -0.00349",
        "Stepping environments takes 50%",
    ):
        assert part in text.replace("\u00a0", " "), part
    assert "hyper/clip" not in text


def test_panel_says_who_waits_for_whom() -> None:
    text = draw(status(waits={"rollouts": 0.25, "parameters": 0.003}, layout=Layout.parse("cpu:a1-l1")))
    text = text.replace("\u00a0", " ")
    assert "rollouts 0.25 s" in text and "parameters 0.003 s" in text


def test_what_environments_report_stands_beside_the_score() -> None:
    shown = status(reported={"success": 0.25, "height_mean": 1234.0})
    assert "best 12.5) success 0.25 height_mean 1,234 |" in plain_line(shown)
    assert "success 0.25   height_mean 1,234" in draw(shown).replace("\u00a0", " ")


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_panel_fits_the_terminal(width: int) -> None:
    rows = draw(status(), width).splitlines()
    assert {len(row) for row in rows} == {min(width, 120)}
    assert rows[0].startswith("╭") and rows[-1].startswith("╰")


def test_panel_before_the_first_iteration() -> None:
    assert "collecting the first rollout" in draw(None)


def test_bar_of_shares_is_as_long_as_the_row_and_divided_by_share() -> None:
    shown = status(shares={"env": 0.5, "inference": 0.25, "learning": 0.25})
    console = Console(file=io.StringIO(), width=44)
    rows = console.render_lines(panel(shown, "", "", 2, 1.0, 44))
    bars = [[segment for segment in row if set(segment.text) == {"█"}] for row in rows]
    (bar,) = filter(None, bars)
    assert [len(segment.text) for segment in bar] == [20, 10, 10]
    assert [segment.style and segment.style.color and segment.style.color.name for segment in bar] == [
        *(PARTS[name] for name in shown.shares)
    ]


def test_plain_line_is_one_line_with_the_same_facts() -> None:
    line = plain_line(status())
    assert "\n" not in line
    for part in ("37/98", "37,888", "37.8%", "score 10.89 (best 12.5)", "1,024 samples/s", "4,096 frames/s", "env 50%"):
        assert part in line
    assert "lag 1" in line and "loss/value 0.2653" in line and "left 01:01" in line
    assert "score – (best –)" in plain_line(status(score=None, best=None, length=None))


@pytest.mark.parametrize(
    ("changes", "cores", "text"),
    [
        ({"layout": Layout()}, 2, r"50% of it stepping environments: --layout processes:2 .* gives the same result"),
        ({"layout": Layout()}, 16, r"--layout processes:4 uses 4 of this machine's 16 cores"),
        ({"layout": Layout()}, 1, r"faster adapter"),
        ({}, 8, r"--layout processes:4 spreads it over more cores, with the same result"),
        (
            {"shares": {"learning": 0.9, "env": 0.1}},
            2,
            r"Gradient steps take 90%: fewer --algorithm.epochs.*change the result",
        ),
        ({"shares": {"inference": 0.9}}, 2, r"acting-batch.*changes the result"),
        ({"shares": {"waiting": 0.9}, "layout": Layout("processes", 4)}, 2, r"4 processes share 2 cores"),
        ({"shares": {"waiting": 0.9}, "layout": Layout("processes", 3)}, 4, r"divides --scheme.shards"),
        ({"shares": {"other": 0.9}}, 2, r"Bookkeeping takes 90%"),
        ({"shares": {"env": 0.0}}, 2, r"No time measured"),
        (
            {"waits": {"rollouts": 0.4, "parameters": 0.0}, "layout": Layout.parse("cpu:a1-l1")},
            2,
            r"Learners wait 40% of the time for rollouts: more collectors \(1 now\).*gives the same result",
        ),
        (
            {
                "waits": {"rollouts": 0.0, "parameters": 0.3},
                "layout": Layout.parse("cpu:a2-l1"),
                "timing_decides": True,
            },
            2,
            r"Collectors wait 30%.*more learners \(1 now\).*may change the result",
        ),
        # Means over recent iterations, of which one may have waited for longer than another took.
        ({"waits": {"rollouts": 1.3, "parameters": 0.0}, "layout": Layout.parse("cpu:a1-l1")}, 2, "wait 100% of"),
        (
            {"waits": {"rollouts": 0.3, "parameters": 0.0}, "layout": Layout.parse("cpu:a4-l1")},
            8,
            r"each shard has one already",
        ),
        ({"waits": {"rollouts": 0.0, "parameters": 0.05}, "layout": Layout.parse("cpu:a2-l1")}, 2, r"keep each other"),
    ],
)
def test_bottleneck_names_the_largest_share_and_says_what_changes_the_result(
    changes: dict[str, Any], cores: int, text: str
) -> None:
    sentence = bottleneck(status(**changes), cores)
    assert re.search(text, sentence), sentence
    assert "\n" not in sentence and sentence.endswith(".")


def test_sparkline() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([3.0], 10) == "▁"
    assert sparkline([math.nan, 0.0, math.inf, 7.0], 10) == "▁█"
    assert sparkline([math.nan], 10) == ""
    assert sparkline([0.0, 7.0], 10) == "▁█"
    assert sparkline([float(i) for i in range(8)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([float(i) for i in range(80)], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([float(i % 7) for i in range(1000)], 33)) == 33


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "00:00"), (61.4, "01:01"), (3723, "1:02:03"), (2 * 86400 + 3600, "2d 1:00:00"), (float("nan"), "--:--")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (1234.5, "1,234"), (0.012341, "0.01234"), (2.5e-5, "2.50e-05"), (-3.0, "-3")],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_auto_is_plain_where_output_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    shown = display.make_display("auto", "title", "folder")
    shown.update(status())
    shown.update(status(iteration=38))
    shown.update(status(iteration=98))
    shown.message("checkpoint")
    shown.close()
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["title", "run: folder"]
    assert [line.split()[1] for line in printed[2:4]] == ["37/98", "98/98"], "the line in between came too soon"
    assert printed[4:] == ["checkpoint"]


def test_live_display_keeps_messages_above_the_panel() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    live = display.LiveDisplay("title", "folder", console)
    live.update(status())
    live.message("checkpoint [taken]")
    live.close()
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "checkpoint [taken]" in output and output.index("checkpoint [taken]") < output.rindex("╰")
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor is shown again"


def test_none_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    shown = display.make_display("none", "title", "folder")
    shown.update(status())
    shown.message("text")
    shown.close()
    assert capsys.readouterr().out == ""


def shares(waiting: float) -> dict[str, float]:
    return {"env": 0.9 - waiting, "inference": 0.05, "learning": 0.05, "waiting": waiting, "other": 0.0}


INLINE, FOUR, SPLIT = (Layout.parse(text) for text in ("inline", "processes:4", "cpu:a2-l1"))
WAITS = {"rollouts": 0.3, "parameters": 0.2}
SHORT = {"iteration_seconds": 0.03, "iteration": 100, "updates": 4000}
"""40 gradient steps in 30 ms: less than an exchange takes."""


@pytest.mark.parametrize(
    ("changes", "cores", "busy", "parts"),
    [
        ({"layout": INLINE}, 8, 0.5, ["one of 7 idle cores", "--layout processes:4 ", "gives the same result"]),
        ({"layout": INLINE}, 2, 0.0, ["--layout processes:2 "]),
        ({"layout": FOUR, "shares": shares(0.75)}, 8, 0.0, ["do the work of 1.0", "--layout inline "]),
        ({"layout": FOUR, "shares": shares(0.55)}, 8, 0.0, ["do the work of 1.8", "lockstep tune"]),
        ({"layout": FOUR}, 2, 0.0, ["4 processes compete for 2 cores"]),
        ({"layout": FOUR, "torch_threads": 4}, 8, 0.0, ["4 processes with 4 torch threads each compete for 8 cores"]),
        ({"layout": SPLIT, "policy_lag": 0.0}, 8, 0.0, ["take turns", "--layout processes:3 "]),
        ({"layout": SPLIT, "waits": {"rollouts": 0.7, "parameters": 0.0}}, 8, 0.0, ["learners wait 70% of the time"]),
        ({"layout": SPLIT, "waits": {"rollouts": 0.0, "parameters": 0.6}}, 8, 0.0, ["collectors wait 60% of the time"]),
    ],
)
def test_a_layout_that_wastes_the_machine_is_told_what_is_better(
    changes: dict[str, Any], cores: int, busy: float, parts: list[str]
) -> None:
    text = waste(status(**changes), cores, busy)
    assert text is not None and "lockstep tune" in text and all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("changes", "cores", "busy"),
    [
        ({"layout": INLINE}, 1, 0.0),
        ({"layout": INLINE}, 4, 3.0),  # the other cores are in use
        ({"layout": INLINE, "shards": 1}, 8, 0.0),
        ({"layout": INLINE, **SHORT}, 8, 0.0),
        ({"layout": FOUR, "shares": shares(0.2)}, 4, 0.0),
        ({"layout": FOUR, "shares": shares(0.75)}, 8, 4.0),  # others make them wait
        ({"layout": SPLIT, "waits": WAITS}, 4, 0.0),
        (
            {"layout": SPLIT, "policy_lag": 0.0, "timing_decides": True, "waits": {"rollouts": 0.3, "parameters": 0.2}},
            4,
            0.0,
        ),
        ({"layout": Layout("inline", device="0")}, 8, 0.0),
    ],
)
def test_a_layout_that_suits_is_left_in_peace(changes: dict[str, Any], cores: int, busy: float) -> None:
    assert waste(status(**changes), cores, busy) is None
