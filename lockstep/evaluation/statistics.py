"""Statistics of scores and of learning curves.

The aggregates are those of Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice
(NeurIPS 2021, arXiv:2108.13264), and match its library rliable. docs/statistics.md says which to read.

Shape legend: R runs of a task, T tasks, P points of a curve, K thresholds, N resamples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ENOUGH = 5
"""With at least this many runs, an interval is more informative than single runs; docs/statistics.md has figures."""
Interval = tuple[float, float]
Curve = tuple[np.ndarray, np.ndarray]
"""x [n] and y [n], x ascending."""
Scores = Sequence[np.ndarray]
"""The scores of one method: for each task an array [..., R], with the runs on its last axis. R may differ between
tasks, the other axes may not."""
Statistic = Callable[..., np.ndarray]
"""Maps the Scores of one or more methods to an array [...]."""

# ------------------------------------------------------------------------------------------------- aggregates


def mean(scores: Scores) -> np.ndarray:
    """Mean over tasks of the mean over runs, [...]. A few tasks with enormous scores may dominate it."""
    return _task_means(scores).mean(axis=-1)


def median(scores: Scores) -> np.ndarray:
    """Median over tasks of the mean over runs, [...]. It can miss that nearly half of the tasks score zero."""
    return np.median(_task_means(scores), axis=-1)


def iqm(scores: Scores) -> np.ndarray:
    """Interquartile mean, [...]: the mean of all runs of all tasks without the lowest and the highest quarter
    (rounded down: nothing is left out of fewer than four). Section 4.3 of the paper recommends it.

    If tasks have unequal numbers of runs, which the paper does not cover, runs are weighted so that all tasks count
    equally, and exactly a quarter of the weight is left out at either end.
    """
    pooled = np.concatenate(scores, axis=-1)
    counts = [task.shape[-1] for task in scores]
    if len(set(counts)) == 1:
        pooled = np.sort(pooled, axis=-1)
        cut = pooled.shape[-1] // 4
        return pooled[..., cut : pooled.shape[-1] - cut].mean(axis=-1)
    order = np.argsort(pooled, axis=-1)
    weight = np.repeat(1.0 / np.array(counts), counts)[order] / len(counts)
    until = np.cumsum(weight, axis=-1)
    kept = np.maximum(np.minimum(until, 0.75) - np.maximum(until - weight, 0.25), 0.0)
    return (np.take_along_axis(pooled, order, axis=-1) * kept).sum(axis=-1) / kept.sum(axis=-1)


def optimality_gap(scores: Scores, target: float = 1.0) -> np.ndarray:
    """The mean shortfall from the target, [...]; scores above the target count as the target. Lower is better."""
    return target - _task_means([np.minimum(task, target) for task in scores]).mean(axis=-1)


def probability_of_improvement(a: Scores, b: Scores) -> np.ndarray:
    """Probability that a run of a beats a run of b on a task drawn at random, [...]; a tie counts half.

    The Mann-Whitney statistic over the number of pairs, averaged over tasks (section 4.3). It does not measure the size
    of the improvement. a and b hold the same tasks in the same order.
    """
    assert len(a) == len(b), "the methods were not run on the same tasks"
    wins = []
    for task_a, task_b in zip(a, b):
        left, right = task_a[..., :, None], task_b[..., None, :]
        wins.append((left > right).mean(axis=(-2, -1)) + 0.5 * (left == right).mean(axis=(-2, -1)))
    return np.mean(wins, axis=0)


def run_profile(scores: Scores, thresholds: np.ndarray) -> np.ndarray:
    """Share of runs, mean over tasks, that score above each of K thresholds: [K, ...] (score distributions, section
    4.1)."""
    return np.stack([np.mean([(task > k).mean(axis=-1) for task in scores], axis=0) for k in thresholds])


def task_profile(scores: Scores, thresholds: np.ndarray) -> np.ndarray:
    """Share of tasks whose mean over runs is above each of K thresholds: [K, ...] (average-score distributions)."""
    means = _task_means(scores)
    return np.stack([(means > threshold).mean(axis=-1) for threshold in thresholds])


def _task_means(scores: Scores) -> np.ndarray:
    """[..., T]."""
    return np.stack([task.mean(axis=-1) for task in scores], axis=-1)


# -------------------------------------------------------------------------------------------------- intervals


@dataclass(frozen=True)
class Estimate:
    """A statistic of some runs, and its uncertainty."""

    value: float
    interval: Interval | None
    """Confidence interval, 95% by default; None if a method has only one run of a task, or a score is not finite."""

    def __str__(self) -> str:
        if self.interval is None:
            return readable(self.value)
        return f"{readable(self.value)} ({readable(self.interval[0])} to {readable(self.interval[1])})"


def estimate(
    statistic: Statistic, *samples: Scores, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """A statistic of the scores of one or more methods, [R] for each task, with its interval (see bootstrap)."""
    value, low, high = bootstrap(statistic, *samples, confidence=confidence, resamples=resamples, seed=seed)
    return Estimate(float(value), None if np.isnan(low) else (float(low), float(high)))


def bootstrap(
    statistic: Statistic, *samples: Scores, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A statistic, and its confidence interval by the stratified percentile bootstrap (section 4.2 of the paper).

    Runs are drawn with replacement within each task and method; the interval holds the central `confidence` of the
    statistic over N such resamples. Equal arguments give equal numbers. Intervals of fewer than about ten runs in total
    are too narrow.

    Args:
        statistic: takes the Scores of each method, of shape [..., R] or [..., N, R].
        samples: the scores of each method.

    Returns:
        The statistic of the given scores, and the ends of the interval, all [...]. The ends are NaN if a method has
        only one run of a task, since resampling it would pretend that there is no spread, or if a score is not finite.
    """
    assert samples and 0 < confidence < 1
    with np.errstate(invalid="ignore"):  # infinite scores
        value = np.asarray(statistic(*samples), np.float64)
    if any(task.shape[-1] < 2 or not np.isfinite(task).all() for sample in samples for task in sample):
        unknown = np.full_like(value, np.nan)
        return value, unknown, unknown
    generator = np.random.default_rng(seed)
    cells = sum(task.size for sample in samples for task in sample)
    rows = max(1, 1_000_000 // cells)  # limits the memory for thousands of scores
    draws = []
    for begin in range(0, resamples, rows):
        count = min(rows, resamples - begin)
        draws.append(statistic(*([_resample(task, count, generator) for task in sample] for sample in samples)))
    tail = 50 * (1 - confidence)
    low, high = np.percentile(np.concatenate(draws, axis=-1), [tail, 100 - tail], axis=-1)
    return value, low, high


def _resample(task: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """[..., R] to [..., N, R]."""
    runs = task.shape[-1]
    return task[..., generator.integers(0, runs, (count, runs))]


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    groups: Sequence[int] | np.ndarray | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval | None:
    """Confidence interval of the mean by the percentile bootstrap; equal arguments give equal numbers.

    The interval holds the central `confidence` of the means of samples drawn with replacement from the values
    (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3).

    Args:
        values: [n], one score per episode (or per run), in the score's own unit.
        groups: [n], each value's group, for values that depend on each other. Whole groups are drawn (the cluster
        bootstrap: Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8, strategy 1). None:
        each value is a group.

    Returns:
        Lower and upper end, or None for fewer than two groups, which have no spread, or if a value is not finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    assert sample.ndim == 1
    statistic = mean
    if groups is not None:
        place = np.unique(groups, return_inverse=True)[1]
        if (sizes := np.bincount(place)).max(initial=1) > 1:
            sample, statistic = np.stack([np.bincount(place, sample), sizes]), _mean_of_groups
    if sample.shape[-1] < 2:
        return None
    return estimate(statistic, [sample], confidence=confidence, resamples=resamples, seed=seed).interval


def _mean_of_groups(scores: Scores) -> np.ndarray:
    """The mean over all values of G groups, whose sums and sizes are [2, ..., G]."""
    sums, sizes = scores[0]
    return sums.sum(axis=-1) / sizes.sum(axis=-1)


# ----------------------------------------------------------------------------------------------------- curves


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centered moving average of [n] values. NaN entries are left out, and near the ends the window shrinks
    symmetrically, so that a rising curve is not flattened."""
    half = max(0, min(window, len(values)) // 2)
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    place = np.arange(len(values))
    reach = np.minimum(half, np.minimum(place, len(values) - 1 - place))
    low, high = place - reach, place + reach + 1
    number = count[high] - count[low]
    return np.where(number > 0, (total[high] - total[low]) / np.maximum(number, 1), np.nan)


def thinned(curve: Curve, points: int) -> Curve:
    """At most this many of a curve's points, equally spaced, with the first and the last."""
    x, y = curve
    kept = np.linspace(0, len(x) - 1, min(points, len(x))).round().astype(int)
    return x[kept], y[kept]


def outline(y: np.ndarray, points: int) -> np.ndarray:
    """The indices of at most this many of [n] values: the minimum and maximum of equal stretches, so that peaks stay,
    with the first and the last."""
    if len(y) <= points:
        return np.arange(len(y))
    edges = np.linspace(0, len(y), (points - 2) // 2 + 1).astype(int)
    kept = {0, len(y) - 1}
    for begin, end in itertools.pairwise(edges.tolist()):
        kept |= {begin + int(np.argmin(y[begin:end])), begin + int(np.argmax(y[begin:end]))}
    return np.array(sorted(kept))


def means_around(y: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The means of [n] values around some of them, each from halfway to the previous place to halfway to the next."""
    edges = np.concatenate([[0], (places[:-1] + places[1:] + 1) // 2, [len(y)]])
    total = np.concatenate([[0.0], np.cumsum(y)])
    return np.diff(total[edges]) / np.diff(edges)


def align(curves: Sequence[Curve], points: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate curves (x [n_i], y [n_i]) linearly onto the range of x that all of them cover.

    Returns:
        x [P] and y [number of curves, P]; P is 0 if the curves share no range.
    """
    low = max(x[0] for x, _ in curves)
    high = min(x[-1] for x, _ in curves)
    if low > high:
        return np.empty(0), np.empty((len(curves), 0))
    grid = np.linspace(low, high, points)
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])


def efficiency_curve(
    tasks: Sequence[Sequence[Curve]], statistic: Statistic = iqm, *, points: int = 150, resamples: int = 1_000
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A statistic of all runs at each point of training: sample efficiency if x counts samples, wall-clock
    efficiency if it counts seconds.

    Args:
        tasks: for each task the curve of each run; for several tasks, y must be normalized.

    Returns:
        x, the statistic and the ends of its pointwise 95% interval (see bootstrap), all [P], over the range of x that
        all runs cover.
    """
    grid, values = align([curve for runs in tasks for curve in runs], points)
    scores, begin = [], 0
    for runs in tasks:
        scores.append(values[begin : begin + len(runs)].T)
        begin += len(runs)
    if not len(grid):
        return grid, grid, grid, grid
    return grid, *bootstrap(statistic, *[scores], resamples=resamples)


def readable(value: float) -> str:
    """A short number with three or four significant digits: 0.000123, 0.123, 12.3, 1,234, 1.23e+09."""
    if not np.isfinite(value):
        return "not finite"
    size = abs(value)
    if 0 < size < 0.1 or size >= 1e9:
        return f"{value:.3g}"
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    text = f"{value:,.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
