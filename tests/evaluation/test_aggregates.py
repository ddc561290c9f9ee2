from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.evaluation import statistics
from lockstep.evaluation.statistics import (
    Scores,
    bootstrap,
    efficiency_curve,
    estimate,
    iqm,
    means_around,
    outline,
    readable,
    thinned,
)

DATA = Path(__file__).parent / "data"
AGGREGATES: dict[str, Callable[[Scores], np.ndarray]] = {
    "mean": statistics.mean,
    "median": statistics.median,
    "iqm": iqm,
    "optimality_gap": statistics.optimality_gap,
}
RLIABLE: dict[str, Any] = json.loads((DATA / "rliable.json").read_text())


def rliable_table(runs: int, gain: float) -> list[np.ndarray]:
    """The table that rliable was given, as one array [R] a task."""
    spec = importlib.util.spec_from_file_location("rliable_numbers", DATA / "rliable_numbers.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.table(runs, gain).T)


TABLES = {"a": rliable_table(5, 1.0), "b": rliable_table(4, 1.15)}

# ---------------------------------------------------------------------------------------------------- by hand

TASKS = [np.array([0.0, 1.0, 2.0, 3.0]), np.array([10.0, 4.0, 8.0, 6.0]), np.array([-1.0, 1.0, 1.0, 3.0])]


def test_aggregates_by_hand() -> None:
    # Means of the tasks are 1.5, 7 and 1. Of the twelve runs -1 0 1 | 1 1 2 3 3 4 | 6 8 10 the middle six count.
    assert statistics.mean(TASKS) == pytest.approx(9.5 / 3)
    assert statistics.median(TASKS) == 1.5
    assert iqm(TASKS) == pytest.approx(14 / 6)
    # With a target of 5 the runs count 0 1 2 3, 5 4 5 5 and -1 1 1 3.
    assert statistics.optimality_gap(TASKS, target=5.0) == pytest.approx(5 - (1.5 + 4.75 + 1) / 3)


def test_iqm_of_few_runs_leaves_out_whole_runs_only() -> None:
    assert iqm([np.array([1.0, 2.0, 9.0])]) == 4.0
    assert iqm([np.array([1.0, 2.0, 4.0, 9.0])]) == 3.0
    assert iqm([np.array([1.0, 2.0, 4.0, 5.0, 9.0])]) == pytest.approx(11 / 3)


def test_probability_of_improvement_by_hand() -> None:
    # 1 ties with 1 and loses to 3; 2 beats 1 and loses to 3: 1.5 of 4. On the second task 5 beats 4.
    a, b = [np.array([1.0, 2.0]), np.array([5.0])], [np.array([1.0, 3.0]), np.array([4.0])]
    assert statistics.probability_of_improvement(a, b) == pytest.approx((1.5 / 4 + 1) / 2)
    assert statistics.probability_of_improvement(b, a) == pytest.approx((2.5 / 4 + 0) / 2)
    assert statistics.probability_of_improvement(a, a) == 0.5


def test_profiles_by_hand() -> None:
    thresholds = np.array([-2.0, 1.0, 3.0, 10.0])
    assert statistics.run_profile(TASKS, thresholds).tolist() == [1.0, 7 / 12, 4 / 12, 0.0]
    assert statistics.task_profile(TASKS, thresholds).tolist() == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])


def test_tasks_count_alike_however_many_runs_they_have() -> None:
    """Twelve runs of one task that is solved, and two of each of three that are not."""
    scores = [np.ones(12), np.zeros(2), np.zeros(2), np.array([0.0, 0.5])]
    # A quarter of the weight is the first task's, and is cut off; of the rest, 0.5 has an eighth, and so the last one.
    assert iqm(scores) == pytest.approx(0.5 * 0.125 / 0.5)
    assert statistics.run_profile(scores, np.array([0.2])) == pytest.approx([(1 + 0 + 0 + 0.5) / 4])
    several = [np.stack([task, task[::-1]]) for task in scores]
    assert iqm(several).tolist() == pytest.approx([0.125, 0.125]), "for each of several samples"


def test_outlines_keep_what_sticks_out_and_both_ends() -> None:
    y = np.sin(np.arange(3000.0) / 200)
    peaks, dips = np.arange(150, 3000, 300), np.arange(275, 3000, 300)
    y[peaks], y[dips] = 100, -100
    kept = outline(y, 160)
    drawn = y[kept]
    assert len(kept) <= 160 and (np.diff(kept) > 0).all() and (kept[0], kept[-1]) == (0, 2999)
    assert (drawn == 100).sum() == len(peaks) and (drawn == -100).sum() == len(dips)
    assert len(outline(y[:160], 160)) == 160


def test_means_around_places_are_of_all_that_lies_nearest_to_them() -> None:
    y = np.array([1.0, 3.0, 5.0, 100.0, 7.0, 9.0])
    assert means_around(y, np.array([0, 3, 5])).tolist() == [2.0, 52.5, 8.0]
    assert np.array_equal(means_around(y, np.arange(6)), y)


@pytest.mark.parametrize(("length", "points"), [(1, 5), (4, 5), (5, 5), (1000, 5), (7, 2)])
def test_thinned_curves_keep_both_ends(length: int, points: int) -> None:
    x = np.arange(length)
    kept, y = thinned((x, 2 * x), points)
    assert len(kept) == min(length, points) and (kept[0], kept[-1]) == (0, length - 1)
    assert np.array_equal(y, 2 * kept) and np.ptp(np.diff(kept)) <= 1 if length > 1 else True


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (-0.0001, "-0.0001"),
        (0.00042123, "0.000421"),
        (1.234e-7, "1.23e-07"),
        (0.1234, "0.123"),
        (-20.7, "-20.7"),
        (99.96, "99.96"),
        (500.0, "500"),
        (123456.7, "123,457"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert readable(value) == text


# ------------------------------------------------------------------------------------- an independent slow version


def slow_iqm(scores: Sequence[np.ndarray]) -> float:
    pooled = sorted(float(score) for task in scores for score in task)
    if len(set(map(len, scores))) > 1:  # every run so often that all tasks have equally many, in four quarters
        often = 4 * math.lcm(*map(len, scores))
        pooled = sorted(float(score) for task in scores for score in task for _ in range(often // len(task)))
    cut = math.floor(len(pooled) / 4)
    middle = pooled[cut:-cut] if cut else pooled
    return sum(middle) / len(middle)


def slow_improvement(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    shares = []
    for left, right in zip(a, b, strict=True):
        points = [1.0 if x > y else 0.5 if x == y else 0.0 for x in left.tolist() for y in right.tolist()]
        shares.append(sum(points) / len(points))
    return sum(shares) / len(shares)


tables = st.integers(1, 5).flatmap(
    lambda count: st.tuples(
        *[
            st.lists(
                st.lists(st.integers(-3, 6), min_size=1, max_size=6).map(lambda runs: np.array(runs, np.float64)),
                min_size=count,
                max_size=count,
            )
            for _ in range(2)
        ]
    )
)


@settings(max_examples=60)
@given(tables)
def test_aggregates_agree_with_loops(both: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
    a, b = both
    means = sorted(sum(task.tolist()) / len(task) for task in a)
    assert statistics.mean(a) == pytest.approx(sum(means) / len(means))
    middle = means[len(means) // 2 - 1 + len(means) % 2 : len(means) // 2 + 1]
    assert statistics.median(a) == pytest.approx(sum(middle) / len(middle))
    assert iqm(a) == pytest.approx(slow_iqm(a))
    gap = sum(sum(1 - min(x, 1.0) for x in task.tolist()) / len(task) for task in a) / len(a)
    assert statistics.optimality_gap(a) == pytest.approx(gap)
    assert statistics.probability_of_improvement(a, b) == pytest.approx(slow_improvement(a, b))
    above = [sum(sum(x > 1 for x in task.tolist()) / len(task) for task in a) / len(a)]
    assert statistics.run_profile(a, np.array([1.0])) == pytest.approx(above)


@pytest.mark.parametrize("statistic", AGGREGATES.values(), ids=AGGREGATES)
def test_interval_agrees_with_full_enumeration(statistic: Callable[[Scores], np.ndarray]) -> None:
    scores = [np.array([0.1, 0.9, 0.4]), np.array([2.0, 0.7])]
    resamples = [
        float(statistic([np.array(first), np.array(second)]))
        for first in itertools.product(scores[0], repeat=3)
        for second in itertools.product(scores[1], repeat=2)
    ]
    found = estimate(statistic, scores, confidence=0.8, resamples=40_000)
    assert found.value == pytest.approx(float(statistic(scores)))
    # Each of the 108 equally likely resamples weighs 0.9%, so the ends may be off by a neighbor.
    ranked = np.sort(resamples)
    assert found.interval is not None
    for end, share in zip(found.interval, (0.1, 0.9), strict=True):
        low, high = np.quantile(ranked, [share - 0.015, share + 0.015])
        assert low - 1e-9 <= end <= high + 1e-9


def test_runs_are_drawn_within_their_task() -> None:
    # Tasks differ greatly and runs not at all: nothing varies.
    assert estimate(statistics.mean, [np.full(3, 0.0), np.full(5, 100.0)]).interval == (50.0, 50.0)


def test_methods_are_drawn_independently() -> None:
    same = [np.array([0.0, 1.0, 2.0, 3.0])]
    found = estimate(lambda a, b: iqm(a) - iqm(b), same, same)
    assert found.value == 0 and found.interval is not None
    assert found.interval[0] == pytest.approx(-found.interval[1], abs=0.3) and found.interval[1] > 0.5


def test_one_run_of_a_task_has_no_interval() -> None:
    single, several = [np.array([1.0]), np.array([2.0])], [np.array([1.0, 2.0]), np.array([2.0])]
    assert estimate(iqm, single).interval is None and str(estimate(iqm, single)) == "1.5"
    assert estimate(iqm, several).interval is None, "its spread is unknown, and not 0"
    assert estimate(iqm, several[:1]).interval is not None
    assert estimate(statistics.probability_of_improvement, single, several).interval is None


def test_intervals_repeat_and_do_not_depend_on_how_they_are_split() -> None:
    large = [np.random.default_rng(task).normal(size=3_000) for task in range(2)]  # drawn 166 resamples at a time
    found = estimate(statistics.mean, large, resamples=400)
    assert found == estimate(statistics.mean, large, resamples=400)
    error = np.sqrt(sum(task.var() / len(task) for task in large)) / 2
    assert found.interval is not None
    assert found.interval[1] - found.interval[0] == pytest.approx(2 * 1.96 * error, rel=0.2)


# ------------------------------------------------------------------------------------------------- against rliable


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("kind", AGGREGATES)
def test_aggregates_are_those_of_rliable(name: str, kind: str) -> None:
    expected = RLIABLE[name][kind]
    found = estimate(AGGREGATES[kind], TABLES[name], resamples=4_000)
    assert found.value == pytest.approx(expected["value"], rel=1e-12)
    # Both intervals come from random resamples: equal but for a few percent of their width.
    width = expected["interval"][1] - expected["interval"][0]
    assert found.interval == pytest.approx(expected["interval"], abs=0.06 * width)


def test_probability_of_improvement_is_that_of_rliable() -> None:
    expected = RLIABLE["probability_of_improvement"]
    found = estimate(statistics.probability_of_improvement, TABLES["b"], TABLES["a"], resamples=2_000)
    assert found.value == pytest.approx(expected["value"], rel=1e-12)
    width = expected["interval"][1] - expected["interval"][0]
    assert found.interval == pytest.approx(expected["interval"], abs=0.1 * width)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("profile", ["run_profile", "task_profile"])
def test_profiles_are_those_of_rliable(name: str, profile: str) -> None:
    expected, thresholds = RLIABLE[name][profile], np.array(RLIABLE["thresholds"])
    kind = getattr(statistics, profile)
    value, low, high = bootstrap(lambda scores: kind(scores, thresholds), TABLES[name], resamples=2_000)
    assert value == pytest.approx(np.array(expected["value"]), rel=1e-12)
    # One run of 285 more or less is 0.0035; one task of 57 is 0.018.
    assert np.array([low, high]) == pytest.approx(
        np.array(expected["interval"]), abs=0.011 if profile == "run_profile" else 0.02
    )


# ----------------------------------------------------------------------------------------------------------- curves


def test_efficiency_curve_by_hand() -> None:
    # Resampled means of two runs are the lower one, the mean and the higher one, with 1/4, 1/2 and 1/4.
    runs = [(np.array([0.0, 4.0]), np.array([0.0, 4.0])), (np.array([2.0, 6.0]), np.array([4.0, 12.0]))]
    x, value, low, high = efficiency_curve([runs], points=3)
    assert x.tolist() == [2.0, 3.0, 4.0]
    assert value.tolist() == [3.0, 4.5, 6.0]
    assert low.tolist() == [2.0, 3.0, 4.0] and high.tolist() == [4.0, 6.0, 8.0]


def test_efficiency_curve_of_several_tasks_is_the_aggregate_at_each_point() -> None:
    generator = np.random.default_rng(0)
    x = np.arange(5.0)
    tasks = [[(x, generator.normal(task, 1, 5)) for _ in range(runs)] for task, runs in enumerate([3, 4, 2])]
    _, value, low, high = efficiency_curve(tasks, points=5, resamples=200)
    for point in range(5):
        assert value[point] == pytest.approx(slow_iqm([np.array([y[point] for _, y in runs]) for runs in tasks]))
    assert (low < value).all() and (value < high).all()


def test_efficiency_curve_of_runs_without_a_common_range_is_empty() -> None:
    runs = [(np.array([0.0, 1.0]), np.zeros(2)), (np.array([2.0, 3.0]), np.zeros(2))]
    assert all(len(part) == 0 for part in efficiency_curve([runs]))


def test_large_numbers_are_short_too() -> None:
    assert [readable(x) for x in (1.5e9, 999_999_999.0, math.inf)] == ["1.5e+09", "999,999,999", "not finite"]
