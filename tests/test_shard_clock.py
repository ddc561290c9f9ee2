from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.clock import Clock, Versions
from lockstep.shard import block, holder


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
    clock = Clock(lag, iterations=5)
    assert [clock.collects_with(i) for i in clock.ticks(0)] == versions


def test_ticks_resume_and_stop() -> None:
    clock = Clock(0, iterations=5)
    assert list(clock.ticks(3)) == [3, 4]
    assert list(clock.ticks(1, stop_after=3)) == [1, 2]
    assert list(clock.ticks(1, stop_after=9)) == [1, 2, 3, 4]


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_versions_keep_just_what_coming_rollouts_need(lag: int) -> None:
    clock = Clock(lag, iterations=20)
    versions: Versions[str] = Versions(clock)
    versions.publish(0, "v0")
    for i in clock.ticks(0):
        assert versions[clock.collects_with(i)] == f"v{max(0, i - lag)}"
        versions.publish(i + 1, f"v{i + 1}")
        assert len(versions.held()) <= lag + 1
        assert list(versions.held()) == sorted(versions.held())
