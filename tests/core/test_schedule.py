from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.agent import Agent
from lockstep.config.settings import SettingsError
from lockstep.core.schedule import Recorded, RolloutId, Schedule
from lockstep.core.shards import block, holder
from lockstep.models.versions import Versions
from lockstep.recipes import ppo_cartpole
from lockstep.scheme import Scheme


@given(st.integers(0, 6), st.data())
def test_blocks_cover_every_shard_once_in_order(exponent: int, data: st.DataObject) -> None:
    shards = 2**exponent
    workers = data.draw(st.integers(1, shards))
    blocks = [block(shards, workers, rank) for rank in range(workers)]
    assert [shard for part in blocks for shard in part] == list(range(shards))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    for rank, part in enumerate(blocks):
        assert all(holder(shards, workers, shard) == rank for shard in part)


@pytest.mark.parametrize(("lag", "versions"), [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (3, [0, 0, 0, 0, 1])])
def test_rollout_i_is_collected_with_version_i_minus_lag(lag: int, versions: list[int]) -> None:
    schedule = Schedule(lag, iterations=5)
    assert [schedule.collects_with(i) for i in schedule.iterations_from(0)] == versions


def test_ticks_resume_and_stop() -> None:
    schedule = Schedule(0, iterations=5)
    assert list(schedule.iterations_from(3)) == [3, 4]
    assert list(schedule.iterations_from(1, stop_after=3)) == [1, 2]
    assert list(schedule.iterations_from(1, stop_after=9)) == [1, 2, 3, 4]


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_versions_keep_just_what_coming_rollouts_need(lag: int) -> None:
    schedule = Schedule(lag, iterations=20)
    versions, agent = Versions(schedule), Agent(ppo_cartpole())
    versions.publish(agent.version(0))
    for i in schedule.iterations_from(0):
        assert versions[schedule.collects_with(i)].number == max(0, i - lag)
        versions.publish(agent.version(i + 1))
        assert len(versions.held()) <= lag + 1
        assert list(versions.held()) == sorted(versions.held())


EVENTS = [
    [{"shard": 1, "rollout": 0, "versions": [[0, 0]]}, {"shard": 1, "rollout": 1, "versions": [[0, 0]]}],
    [{"shard": 0, "rollout": 0, "versions": [[0, 0], [3, 1]]}, {"shard": 1, "rollout": 2, "versions": [[0, 1]]}],
    [{"shard": 0, "rollout": 1, "versions": [[0, 0], [5, 2]]}, {"shard": 0, "rollout": 2, "versions": [[0, 1]]}],
]
"""Of two shards, for three iterations."""


def test_a_recorded_clock_repeats_what_was_decided() -> None:
    schedule = Recorded(2, iterations=10, shards=2, events=EVENTS)
    assert [schedule.rollout_ids(i) for i in range(3)] == [[(1, 0), (1, 1)], [(0, 0), (1, 2)], [(0, 1), (0, 2)]]
    assert schedule.acting(RolloutId(0, 0)) == ((0, 0), (3, 1))
    assert schedule.acting(RolloutId(1, 2)) == ((0, 1),)
    assert [schedule.slot(RolloutId(0, number)) for number in range(3)] == [0, 0, 1]
    assert [schedule.slot(RolloutId(1, number)) for number in range(3)] == [0, 1, 1]


def test_a_recorded_clock_ends_where_the_record_ends() -> None:
    schedule = Recorded(2, iterations=10, shards=2, events=EVENTS)
    assert list(schedule.iterations_from(0)) == list(schedule.iterations_from(0, stop_after=9)) == [0, 1, 2]
    assert list(schedule.iterations_from(1, stop_after=2)) == [1]
    assert list(Recorded(2, iterations=2, shards=2, events=EVENTS).iterations_from(0)) == [0, 1]


@pytest.mark.parametrize(("scheme", "lag"), [(Scheme(lag=1), 1), (Scheme(lag="async", max_lag=3), 3)])
def test_the_clock_of_an_experiment(scheme: Scheme, lag: int) -> None:
    schedule = ppo_cartpole().replace(scheme=scheme).schedule()
    assert (schedule.lag, schedule.shards) == (lag, 4)
    assert schedule.rollout_ids(7) == [(shard, 7) for shard in range(4)]
    assert schedule.acting(RolloutId(2, 7)) == ((0, 7 - lag),)
    assert [schedule.slot(rollout_id) for rollout_id in schedule.rollout_ids(7)] == [0, 1, 2, 3]


@dataclass(frozen=True)
class Scheduled(Schedule):
    """A schedule of its own."""

    schedule: Callable[[int], int] = field(default=lambda rollout: rollout)

    def collects_with(self, rollout: int) -> int:
        return self.schedule(rollout)


def of_a_schedule(schedule: Callable[[int], int], **settings: Any) -> Schedule:
    class Own(Scheme):
        def schedule(self, iterations: int) -> Schedule:
            return Scheduled(self.buffers - 1, 40, self.shards, schedule=schedule)

    return ppo_cartpole().replace(scheme=Own(**settings)).schedule()


def test_a_schedule_of_its_own_may_use_all_of_its_lag() -> None:
    assert of_a_schedule(lambda i: i - i % 3, lag=2).collects_with(5) == 3
    assert of_a_schedule(lambda i: max(0, i - 2), lag=2).collects_with(1) == 0


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        (lambda i: i + 1, {"lag": 2}),
        (lambda i: max(0, i - 3), {"lag": 2}),
        (lambda i: i - 2, {"lag": 2}),
        (lambda i: max(0, i - 2 * (i % 2)), {"lag": 2}),
        (lambda i: i, {"preempt": 0.5}),
        (lambda i: max(0, i - 1), {"lag": "async"}),
    ],
    ids=["future", "too-old", "negative", "falling", "preempt", "async"],
)
def test_a_schedule_that_cannot_be_kept_is_refused(schedule: Callable[[int], int], settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"Scheduled.*versions"):
        of_a_schedule(schedule, **settings)
