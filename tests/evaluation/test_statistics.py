from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.evaluation.statistics import align, bootstrap_interval, smooth


def exact_interval(values: list[float], confidence: float) -> tuple[float, float]:
    """Every one of the n^n equally likely resamples, instead of a random choice of them."""
    means = sorted(sum(resample) / len(values) for resample in itertools.product(values, repeat=len(values)))
    tail = (1 - confidence) / 2

    def quantile(share: float) -> float:
        place = share * (len(means) - 1)
        low = int(place)
        high = min(low + 1, len(means) - 1)
        return means[low] + (place - low) * (means[high] - means[low])

    return quantile(tail), quantile(1 - tail)


def test_bootstrap_of_two_values_by_hand() -> None:
    # Resample means are 1, 1.5, 2 with probabilities 1/4, 1/2, 1/4.
    assert bootstrap_interval([1.0, 2.0]) == (1.0, 2.0)
    assert bootstrap_interval([1.0, 2.0], confidence=0.4) == (1.5, 1.5)


def test_bootstrap_of_rare_success_by_hand() -> None:
    # Four times the mean is Binomial(4, 1/4): P(0) = 0.316, P(<= 2) = 0.949, P(<= 3) = 0.996.
    assert bootstrap_interval([0.0, 0.0, 0.0, 1.0]) == (0.0, 0.75)
    assert bootstrap_interval([0.0, 0.0, 0.0, 1.0], confidence=0.8) == (0.0, 0.5)


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_bootstrap_agrees_with_full_enumeration(confidence: float) -> None:
    values = [3.1, -2.0, 7.7, 0.4, 5.2]
    low, high = exact_interval(values, confidence)
    got = bootstrap_interval(values, confidence=confidence, resamples=40_000)
    assert got == pytest.approx((low, high), abs=0.15)


def test_bootstrap_agrees_with_another_library() -> None:
    # scipy 1.17.1: stats.bootstrap((values,), np.mean, n_resamples=10_000, method="percentile", rng=seed)
    values = [12.0, 30.5, 7.25, 55.0, 18.0, 21.5, 90.0]
    assert bootstrap_interval(values) == pytest.approx((16.107142857142858, 55.07142857142857))
    other = bootstrap_interval(values, confidence=0.9, seed=1)
    assert other == pytest.approx((17.892857142857142, 51.57142857142857))


def test_bootstrap_draws_whole_groups() -> None:
    values, copies = [3.1, -2.0, 7.7], [3.1, 3.1, -2.0, -2.0, 7.7, 7.7]
    assert bootstrap_interval(copies, [0, 0, 1, 1, 2, 2]) == pytest.approx(bootstrap_interval(values))
    assert bootstrap_interval(values, [4, 2, 9]) == bootstrap_interval(values), "each value is a group"
    assert bootstrap_interval(copies, [1] * 6) is None, "a single group has no spread"
    assert bootstrap_interval([], []) is None and bootstrap_interval([1.0, np.inf, 2.0], [0, 0, 1]) is None
    # Two groups: resamples are the first twice, both, and the second twice, with probabilities 1/4, 1/2, 1/4.
    assert bootstrap_interval([1.0, 3.0, 5.0], [0, 0, 1]) == (2.0, 5.0)
    assert bootstrap_interval([1.0, 3.0, 5.0], [0, 0, 1], confidence=0.4) == (3.0, 3.0)


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    intervals = [bootstrap_interval(generator.normal(5, 2, 40), resamples=400, seed=i) for i in range(400)]
    covered = sum(interval is not None and interval[0] <= 5 <= interval[1] for interval in intervals)
    # With 40 values the percentile bootstrap covers about 93 to 94%; 400 trials deviate by about 1.2%.
    assert 0.89 <= covered / 400 <= 0.98


def test_bootstrap_is_seeded_and_says_nothing_of_one_value() -> None:
    values = np.random.default_rng(0).normal(size=12)
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)
    assert bootstrap_interval([4.0]) is None
    assert bootstrap_interval([4.0, 4.0, 4.0]) == (4.0, 4.0)


def test_bootstrap_of_many_values_in_pieces() -> None:
    values = np.random.default_rng(0).normal(10, 1, 30_000)
    interval = bootstrap_interval(values, resamples=200)
    assert interval is not None
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.3 * half)


def test_smooth_by_hand() -> None:
    assert smooth(np.array([1.0, 2.0, 6.0, 4.0]), 3).tolist() == [1.0, 3.0, 4.0, 4.0]
    assert smooth(np.array([1.0, np.nan, 3.0, 5.0]), 3).tolist() == [1.0, 2.0, 4.0, 5.0]
    assert smooth(np.array([1.0, 5.0]), 1).tolist() == [1.0, 5.0]
    assert np.isnan(smooth(np.array([np.nan, np.nan]), 2)).all()


@settings(max_examples=50)
@given(
    st.lists(st.one_of(st.floats(-100, 100), st.just(float("nan"))), min_size=1, max_size=40),
    st.integers(1, 60),
)
def test_smooth_agrees_with_a_loop(values: list[float], window: int) -> None:
    expected = []
    for i in range(len(values)):
        reach = min(min(window, len(values)) // 2, i, len(values) - 1 - i)
        near = [v for v in values[i - reach : i + reach + 1] if not np.isnan(v)]
        expected.append(sum(near) / len(near) if near else np.nan)
    np.testing.assert_allclose(smooth(np.array(values), window), expected, atol=1e-9)


def test_align_by_hand() -> None:
    x, y = align([(np.array([0.0, 4.0]), np.array([0.0, 8.0])), (np.array([1.0, 3.0]), np.array([5.0, 7.0]))], 3)
    assert x.tolist() == [1.0, 2.0, 3.0]
    assert y.tolist() == [[2.0, 4.0, 6.0], [5.0, 6.0, 7.0]]


def test_align_of_disjoint_curves_is_empty() -> None:
    x, y = align([(np.array([0.0, 1.0]), np.zeros(2)), (np.array([2.0, 3.0]), np.zeros(2))])
    assert x.shape == (0,) and y.shape == (2, 0)
