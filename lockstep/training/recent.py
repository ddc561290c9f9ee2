"""Means over recent episodes and sums over recent iterations, which are cheap to update in every iteration."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lockstep.core.rollout import Episode


def mean(values: Iterable[float]) -> float:
    """The mean; NaN if the sum is not a number or too large, where statistics.fmean raises errors."""
    try:
        return statistics.fmean(values)
    except (ValueError, OverflowError):  # of an infinity and its opposite; of huge numbers
        return math.nan


class RecentEpisodes:
    """The last episodes. Their means are computed when episodes are added, since no episode ends in most iterations.

    Args:
        size: how many episodes count.
        metrics: names of the metrics that environments report, in the order of Episode.metrics.
    """

    def __init__(self, size: int, metrics: Sequence[str]) -> None:
        self._episodes: deque[Episode] = deque(maxlen=size)
        self._scores: deque[float] = deque(maxlen=size)
        self._lengths: deque[int] = deque(maxlen=size)
        self._metrics = metrics
        self.score: float | None = None
        """The mean raw score; None before the first episode ends."""
        self.length: float | None = None
        """The mean length in steps, likewise."""
        self.reported: dict[str, float] = {}
        """The mean of each metric over those episodes that reported it."""

    def __len__(self) -> int:
        return len(self._episodes)

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._episodes)

    def add(self, episodes: Sequence[Episode]) -> None:
        """Add episodes in the order of their ends."""
        if not episodes:
            return
        self._episodes.extend(episodes)
        self._scores.extend([episode.score for episode in episodes])
        self._lengths.extend([episode.length for episode in episodes])
        self.score, self.length = mean(self._scores), mean(self._lengths)
        self.reported = {}
        if not self._metrics:
            return
        for name, *values in zip(self._metrics, *(episode.metrics for episode in self._episodes), strict=True):
            known = [value for value in values if not math.isnan(value)]
            if known:
                self.reported[name] = mean(known) if all(map(math.isfinite, known)) else math.nan


class RecentNumbers:
    """Sums of named numbers over the last iterations.

    Args:
        size: how many iterations count.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: dict[str, deque[float]] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many iterations the sums cover."""
        return self._count

    def add(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Add an iteration's numbers. Returns the sum of each over the last iterations."""
        self._count = min(self._count + 1, self._size)
        for name, number in numbers.items():
            self._numbers.setdefault(name, deque(maxlen=self._size)).append(number)
        return {name: sum(kept) for name, kept in self._numbers.items()}
