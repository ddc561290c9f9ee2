"""What collectors of a split layout tell the learners, without processes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from lockstep.core.rollout import RolloutInfo
from lockstep.transport.processes import CollectorConnection, SharedMemoryRollouts


def info(shard: int) -> RolloutInfo:
    return RolloutInfo(shard, 0, 0, ((0, 0),), np.zeros(0), {}, [])


def test_times_of_several_rollouts_add_up_and_are_told_once() -> None:
    inbox = [(0, ("rollout", [info(0)], {"env": 1.0})), (1, ("rollout", [], {"env": 4.0}))]
    inbox.append((0, ("rollout", [info(1)], {"env": 2.0})))
    channels = SimpleNamespace(receive=lambda everyone, block: inbox)
    learner: Any = SimpleNamespace(
        _channels=channels, _everyone=range(2), _times={}, _delivered={}, _answers={}, _speaks=True
    )
    SharedMemoryRollouts._receive(learner)
    assert list(learner._delivered) == [(0, 0), (1, 0)]
    assert SharedMemoryRollouts.collector_times(learner) == [{"env": 3.0}, {"env": 4.0}]
    assert SharedMemoryRollouts.collector_times(learner) == []


def test_learner_0_hears_the_times_of_rollouts_that_are_not_its_own() -> None:
    sent: list[Any] = []
    only = info(1)
    collectors = SimpleNamespace(take_times=lambda: {"env": 1.0})
    link = SimpleNamespace(peers=[0, 1], send=lambda message, to: sent.append((to, message)))
    end: Any = SimpleNamespace(_remember=lambda *_: None, _slot=lambda each: each.shard, _channels=link, _shards=2)
    end._collectors, end.waited, end._since = collectors, 2.0, time.perf_counter() - 10
    CollectorConnection.deliver(end, [only])
    (to, (_, none, times)), (other, (_, own, again)) = sent
    assert (to, none, other, own) == (0, [], 1, [only]) and times == again
    assert times["waiting"] == 2.0 and abs(times["other"] - 7.0) < 0.5
    CollectorConnection.deliver(end, [only])
    assert sent[2][1][2] == {"env": 1.0, "waiting": 0.0, "other": 0.0}, "since the last delivery"
