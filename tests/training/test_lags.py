"""Lag metrics against numbers computed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from lockstep.collectors.collectors import RolloutInfo
from lockstep.core.schedule import Acting
from lockstep.experiment import Experiment
from lockstep.recipes import ppo_cartpole
from lockstep.scheme import Scheme
from lockstep.training.lags import Lags

ASYNC = {"gradient_lag": "async", "max_gradient_lag": 3}


def experiment(rollout: int = 10, **scheme: Any) -> Experiment:
    """Two shards."""
    full = ppo_cartpole()
    return full.replace(
        algorithm=dataclasses.replace(full.algorithm, rollout=rollout), scheme=Scheme(shards=2, **scheme)
    )


def acted(*rollouts: tuple[int, Acting]) -> list[RolloutInfo]:
    return [RolloutInfo(shard, 0, 0, versions, np.zeros(0), {}, []) for shard, versions in rollouts]


def test_a_lag_of_the_clock_is_counted_in_versions() -> None:
    lags = Lags(experiment(lag=2))

    def record(iteration: int, before: int, version: int) -> list[float]:
        found = lags.record(iteration, before, acted((0, ((0, version),)), (1, ((0, version),))), [])
        return [found[name] for name in ("policy_versions", "policy_versions_max", "gradient_steps")]

    assert record(0, 0, 0) == [0.0, 0.0, 0.0]
    assert record(1, 40, 0) == [1.0, 1.0, 40.0]
    assert record(2, 60, 0) == [2.0, 2.0, 60.0]
    assert record(3, 90, 1) == [2.0, 2.0, 50.0]


def test_without_a_lag_there_is_one_number() -> None:
    lags = Lags(experiment())
    assert lags.record(0, 0, acted((0, ((0, 0),)), (1, ((0, 0),))), []) == {"policy_versions": 0.0}


def test_a_resumed_run_does_not_know_gradient_steps_before() -> None:
    lags = Lags(experiment(lag=1))
    assert lags.record(7, 70, acted((0, ((0, 6),)), (1, ((0, 6),))), []) == {
        "policy_versions": 1.0,
        "policy_versions_max": 1.0,
    }
    assert lags.record(8, 85, acted((0, ((0, 7),)), (1, ((0, 7),))), [])["gradient_steps"] == 15.0


def test_how_stale_gradients_are() -> None:
    plain, delayed, free = (Lags(experiment(**s)) for s in ({}, {"gradient_lag": 2}, ASYNC))
    assert plain.record(0, 0, [], [0, 0]) == {"gradient_asynchrony": 0.0}
    assert delayed.record(0, 0, [], [0, 1, 2, 2]) == {"gradient_asynchrony": 1.25, "gradient_asynchrony_max": 2.0}
    assert delayed.record(0, 0, [], []) == {}
    assert free.record(0, 0, [], [0, 2, 2, 0]) == {
        "gradient_asynchrony": 1.0,
        "gradient_asynchrony_max": 2.0,
        "gradient_share_0_behind": 0.5,
        "gradient_share_1_behind": 0.0,
        "gradient_share_2_behind": 0.5,
        "gradient_share_3_behind": 0.0,
    }


def test_each_step_counts_with_the_version_that_acted_in_it() -> None:
    """10 steps a rollout, and 40, 30 and 50 gradient steps in the first three iterations."""
    lags = Lags(experiment(lag="async", max_lag=3))
    first = lags.record(0, 0, acted((0, ((0, 0),)), (1, ((0, 0),))), [])
    assert first == {
        "policy_versions": 0.0,
        "policy_versions_max": 0.0,
        "gradient_steps": 0.0,
        "gradient_steps_max": 0.0,
        "share_0_behind": 1.0,
        **{f"share_{lag}_behind": 0.0 for lag in (1, 2, 3)},
    }
    # 10 steps of version 0, then 4 of version 0 and 6 of version 1.
    second = lags.record(1, 40, acted((0, ((0, 0),)), (1, ((0, 0), (4, 1)))), [])
    assert second["policy_versions"] == pytest.approx(14 / 20)
    assert second["gradient_steps"] == pytest.approx(14 * 40 / 20)
    assert (second["policy_versions_max"], second["gradient_steps_max"]) == (1.0, 40.0)
    lags.record(2, 70, acted((1, ((0, 2),)), (1, ((0, 2),))), [])
    # 3 steps of version 0 (3 versions, 120 gradient steps behind), 5 of 1 (2 and 80), 2 of 3; 10 of 2 (1 and 50).
    fourth = lags.record(3, 120, acted((0, ((0, 0), (3, 1), (8, 3))), (1, ((0, 2),))), [])
    assert fourth["policy_versions"] == pytest.approx((3 * 3 + 5 * 2 + 10 * 1) / 20)
    assert fourth["gradient_steps"] == pytest.approx((3 * 120 + 5 * 80 + 10 * 50) / 20)
    assert (fourth["policy_versions_max"], fourth["gradient_steps_max"]) == (3.0, 120.0)
    assert [fourth[f"share_{lag}_behind"] for lag in range(4)] == [2 / 20, 10 / 20, 5 / 20, 3 / 20]


def test_without_data_there_is_no_lag() -> None:
    lags = Lags(experiment(lag="async", max_lag=3))
    lags.record(0, 0, acted((0, ((0, 0),)), (1, ((0, 0),))), [])
    assert lags.record(1, 10, [], []) == {}
    third = lags.record(2, 30, acted((0, ((0, 1),))), [])
    assert (third["policy_versions"], third["gradient_steps"]) == (1.0, 20.0)


def test_versions_are_counted_in_trajectories_of_240_steps() -> None:
    """Three rollouts of 80 steps make one; a shard counts once it has played as many."""
    lags = Lags(experiment(80, lag="async", max_lag=2))
    assert "versions_per_trajectory" not in lags.record(0, 0, acted((0, ((0, 0),)), (0, ((0, 0), (40, 1)))), [])
    # Shard 0: {0}, {0, 1}, {1}: two versions. Shard 1 has played one rollout.
    assert lags.record(1, 1, acted((0, ((0, 1),)), (1, ((0, 0),))), [])["versions_per_trajectory"] == 2.0
    # Shard 0: {0, 1}, {1}, {1, 2}: three. Shard 1: {0}, {2}: not enough yet.
    second = lags.record(2, 2, acted((0, ((0, 1), (8, 2))), (1, ((0, 2),))), [])
    assert second["versions_per_trajectory"] == 3.0
    # Shard 0: {1, 2}, {3}, {3}: three. Shard 1: {0}, {2}, {2, 3}, of which the first is forgotten with the next.
    third = lags.record(3, 3, acted((1, ((0, 2), (70, 3))), (0, ((0, 3),)), (0, ((0, 3),))), [])
    assert third["versions_per_trajectory"] == pytest.approx((3 + 3) / 2)
    fourth = lags.record(4, 4, acted((1, ((0, 3),)), (1, ((0, 3),))), [])
    assert fourth["versions_per_trajectory"] == pytest.approx((3 + 2) / 2)


@pytest.mark.parametrize(
    ("rollout", "counted"), [(500, [1.0, 1.0, 1.0]), (240, [1.0, 1.0, 1.0]), (100, [None, 2.0, 2.0])]
)
def test_a_trajectory_is_made_of_whole_rollouts(rollout: int, counted: list[float | None]) -> None:
    lags = Lags(experiment(rollout, lag="async"))
    found = [lags.record(i, i, acted((0, ((0, i),))), []) for i in range(3)]
    assert [metrics.get("versions_per_trajectory") for metrics in found] == counted
