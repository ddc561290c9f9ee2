"""Statistics of scores and of learning curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """Confidence interval of the mean by the percentile bootstrap; equal arguments give equal numbers.

    The interval holds the central `confidence` of the means of samples drawn with replacement from the values
    (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3).

    Args:
        values: [n], one score per episode (or per run), in the score's own unit.

    Returns:
        Lower and upper end, or None for fewer than two values, which say nothing about their spread.
    """
    sample = np.asarray(values, dtype=np.float64)
    assert sample.ndim == 1 and 0 < confidence < 1
    if len(sample) < 2:
        return None
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    rows = max(1, 1_000_000 // len(sample))  # bounds memory for thousands of episodes
    for begin in range(0, resamples, rows):
        index = generator.integers(0, len(sample), (min(rows, resamples - begin), len(sample)))
        means[begin : begin + rows] = sample[index].mean(axis=1)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centered moving average of [n] values; NaN entries are left out, and near the ends the window shrinks
    symmetrically, so that a rising curve is not pulled inwards."""
    half = max(0, min(window, len(values)) // 2)
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    place = np.arange(len(values))
    reach = np.minimum(half, np.minimum(place, len(values) - 1 - place))
    low, high = place - reach, place + reach + 1
    number = count[high] - count[low]
    return np.where(number > 0, (total[high] - total[low]) / np.maximum(number, 1), np.nan)


def align(curves: Sequence[tuple[np.ndarray, np.ndarray]], points: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate curves (x [n_i], y [n_i]) linearly onto the range of x that all of them share.

    Returns:
        x [P] and y [number of curves, P]; P is 0 if the curves share no range.
    """
    low = max(x[0] for x, _ in curves)
    high = min(x[-1] for x, _ in curves)
    if low > high:
        return np.empty(0), np.empty((len(curves), 0))
    grid = np.linspace(low, high, points)
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])
