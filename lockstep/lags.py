"""How old the data is that a run learns from."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from lockstep.collect import Delivery
from lockstep.experiment import Experiment

_MOST = 16
"""Versions behind, up to which shares of samples are reported."""
TRAJECTORY = 240
"""Environment steps that versions are counted in, as in section 3 of the Cleanba paper (arXiv:2310.00036)."""


class Lags:
    """Measures the policy lag of each iteration: in versions, in gradient steps, and as versions per trajectory."""

    def __init__(self, experiment: Experiment) -> None:
        self._steps = experiment.algorithm.rollout
        self._free, self._bound = experiment.scheme.free_running, experiment.scheme.max_lag
        self._updates: dict[int, int] = {}
        """By version: gradient steps before it."""
        rollouts = max(1, TRAJECTORY // self._steps)
        self._recent: dict[int, deque[tuple[tuple[int, int], ...]]] = {
            shard: deque(maxlen=rollouts) for shard in range(experiment.scheme.shards)
        }

    def record(self, iteration: int, before: int, acted: list[Delivery]) -> dict[str, float]:
        """Metrics of one iteration; none if it took no rollouts.

        Args:
            iteration: the one that learned, from the version of the same number.
            before: gradient steps before this iteration.
            acted: the rollouts that it learned from.
        """
        by_version: dict[int, int] = {}
        for delivery in acted:
            ends = [t for t, _ in delivery.versions[1:]] + [self._steps]
            for (t, version), end in zip(delivery.versions, ends, strict=True):
                by_version[version] = by_version.get(version, 0) + end - t
        total = sum(by_version.values())
        self._updates[iteration] = before
        self._updates = {v: n for v, n in self._updates.items() if v >= iteration - self._bound}
        if not total:
            return {}
        lags = {"policy_versions": sum((iteration - v) * n for v, n in by_version.items()) / total}
        if not self._free:
            return lags
        known = {v: self._updates.get(v, before) for v in by_version}
        for delivery in acted:
            self._recent[delivery.shard].append(delivery.versions)
        full = [recent for recent in self._recent.values() if len(recent) == recent.maxlen]
        lags |= {
            "policy_versions_max": float(iteration - min(by_version)),
            "gradient_steps": sum((before - known[v]) * n for v, n in by_version.items()) / total,
            "gradient_steps_max": float(before - min(known.values())),
        }
        for lag in range(min(self._bound, _MOST) + 1):
            lags[f"share_{lag}_behind"] = by_version.get(iteration - lag, 0) / total
        if full:
            lags["versions_per_trajectory"] = fmean(
                len({version for versions in recent for _, version in versions}) for recent in full
            )
        return lags
