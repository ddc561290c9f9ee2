"""What learner 0 makes of the parts of all learners, by hand."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config.layout import Layout
from lockstep.training.writer import ProcessReport, _waits, report_of


def part(waited: float, *times: dict[str, float]) -> ProcessReport:
    return ProcessReport({}, {}, {}, list(times), waited)


def test_learners_wait_as_long_as_one_of_them_and_collectors_on_average() -> None:
    learner = {"learning": 1.0, "waiting": 9.0}
    parts = [
        part(0.5, learner, {"waiting": 2.0}, {"waiting": 3.0}),
        part(3.0, learner, {"waiting": 7.0}),
        part(1.0, learner),
    ]
    assert _waits(parts, Layout.parse("cpu:a3-l3"), 4) == {"rollouts": 3.0, "parameters": 4.0}
    for layout in ("cpu:a4-l3", "ray:a1+-l3"):  # nothing of the fourth collector, or shard, was learned from
        assert _waits(parts, Layout.parse(layout), 4) == {"rollouts": 3.0, "parameters": 3.0}
    assert _waits(parts[2:], Layout.parse("cpu:a1-l1"), 4) == {"rollouts": 1.0, "parameters": 0.0}
    assert _waits(parts, Layout.parse("processes:3"), 4) == {}


def test_the_time_of_an_iteration_that_nobody_accounts_for_is_other() -> None:
    collector = {"env": 4.0}
    own_times = {"env": 1.0, "inference": 2.0}
    rollouts = SimpleNamespace(own_times=lambda: own_times, waited=1.5, collector_times=lambda: [collector])
    process: Any = SimpleNamespace(rollouts=rollouts, group=SimpleNamespace(waited=0.5))
    learned: Any = SimpleNamespace(gradient_digests={0: "a"}, applied={}, seconds=3.0)
    found = report_of(process, {}, learned, time.perf_counter() - 10)
    own = {"env": 1.0, "inference": 2.0, "learning": 3.0, "waiting": 2.0}
    assert found.times == [{**own, "other": pytest.approx(2.0, abs=0.5)}, collector]
    assert found.waited == 1.5 and found.gradient_digests == {0: "a"}
    assert report_of(process, {}, learned, time.perf_counter()).times[0]["other"] == 0
