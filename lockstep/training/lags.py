"""Measures the age of the data that a run learns from, and of the parameters that its gradients were computed with."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from lockstep.core.rollout import RolloutInfo
from lockstep.experiment import Experiment

_MOST = 16
"""Shares of samples are reported for versions that are at most this far behind."""
TRAJECTORY = 240
"""Environment steps per version in section 3 of the Cleanba paper (arXiv:2310.00036)."""


class Lags:
    """Measures the policy lag of each iteration (in versions, in gradient steps, and in versions per trajectory) and
    the asynchrony of its gradients, both defined as in the PyTorchRL paper (arXiv:2007.02622)."""

    def __init__(self, experiment: Experiment) -> None:
        self._steps = experiment.algorithm.rollout
        scheme = experiment.scheme
        self._free, self._bound = scheme.free_running, scheme.buffers - 1
        self._lagging = scheme.gradient_lag != 0
        self._preempts = scheme.preempt < 1
        self._gradient_bound = scheme.max_gradient_lag if scheme.gradient_lag == "async" else -1
        self._updates: dict[int, int] = {}
        """Gradient steps before each version."""
        rollouts = max(1, TRAJECTORY // self._steps)
        self._recent: dict[int, deque[tuple[tuple[int, int], ...]]] = {
            shard: deque(maxlen=rollouts) for shard in range(experiment.scheme.shards)
        }

    def record(self, iteration: int, before: int, acted: list[RolloutInfo], behind: list[int]) -> dict[str, float]:
        """Metrics of one iteration.

        Args:
            iteration: the iteration that learned. It began with the version of the same number.
            before: gradient steps before this iteration.
            acted: the rollouts that the iteration learned from.
            behind: for each of its gradients, the number of updates between the parameters that it was computed with
            and those that it changes.
        """
        return {**self._of_policy(iteration, before, acted), **self._of_gradients(behind), **self._kept(acted)}

    def _kept(self, acted: list[RolloutInfo]) -> dict[str, float]:
        if not self._preempts:
            return {}
        steps = [self._steps if info.preempted_after is None else info.preempted_after for info in acted]
        return {"kept": sum(steps) / (len(steps) * self._steps)}

    def _of_gradients(self, behind: list[int]) -> dict[str, float]:
        if not behind:
            return {}
        asynchrony = {"gradient_asynchrony": fmean(behind)}
        if self._lagging:
            asynchrony["gradient_asynchrony_max"] = float(max(behind))
        for lag in range(min(self._gradient_bound, _MOST) + 1):
            asynchrony[f"gradient_share_{lag}_behind"] = behind.count(lag) / len(behind)
        return asynchrony

    def _of_policy(self, iteration: int, before: int, acted: list[RolloutInfo]) -> dict[str, float]:
        by_version: dict[int, int] = {}
        for info in acted:
            ends = [t for t, _ in info.versions[1:]] + [self._steps]
            for (t, version), end in zip(info.versions, ends, strict=True):
                by_version[version] = by_version.get(version, 0) + end - t
        total = sum(by_version.values())
        self._updates[iteration] = before
        self._updates = {v: n for v, n in self._updates.items() if v >= iteration - self._bound}
        if not total:
            return {}
        lags = {"policy_versions": sum((iteration - v) * n for v, n in by_version.items()) / total}
        if not (self._bound or self._free):
            return lags
        lags["policy_versions_max"] = float(iteration - min(by_version))
        if all(v in self._updates for v in by_version):  # a resumed run does not know them for earlier versions
            lags["gradient_steps"] = sum((before - self._updates[v]) * n for v, n in by_version.items()) / total
            lags["gradient_steps_max"] = float(before - min(self._updates[v] for v in by_version))
        if not self._free:
            return lags
        for info in acted:
            self._recent[info.shard].append(info.versions)
        full = [recent for recent in self._recent.values() if len(recent) == recent.maxlen]
        for lag in range(min(self._bound, _MOST) + 1):
            lags[f"share_{lag}_behind"] = by_version.get(iteration - lag, 0) / total
        if full:
            lags["versions_per_trajectory"] = fmean(
                len({version for versions in recent for _, version in versions}) for recent in full
            )
        return lags
