"""The model of what more hosts would do, against a tree that is simulated message by message."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from projection import Network, Work, free_running, project, tree_seconds

WORK = Work(samples=1000, collecting=2.0, learning=1.0, gradient_steps=10, gradient_bytes=4_000_000, other=0.5)
ETHERNET = Network(latency=100e-6, bandwidth=125e6)


def simulated(learners: int, size: float, network: Network) -> float:
    """When the last learner has the total, message by message as lockstep.distributed.tree sends them."""
    ready = [0.0] * learners
    levels = learners.bit_length() - 1
    portions = [size / 2 ** (level + 1) for level in range(levels)]
    for distance, portion in [(1 << k, portions[k]) for k in (*range(levels), *reversed(range(levels)))]:
        ready = [
            max(ready[rank], ready[rank ^ distance]) + 2 * network.latency + portion / network.bandwidth
            for rank in range(learners)
        ]
    return max(ready)


@pytest.mark.parametrize("learners", [1, 2, 4, 16, 64, 256])
@pytest.mark.parametrize("size", [0, 4, 40_000, 6_700_000])
def test_a_sum_takes_as_long_as_its_messages(learners: int, size: int) -> None:
    assert tree_seconds(learners, size, ETHERNET) == pytest.approx(simulated(learners, size, ETHERNET))


def test_three_learners_send_whole_vectors() -> None:
    # 1 → 0 and 2 → 0 one after the other, since each has to be there before the next; then 0 → 1, 0 → 2.
    assert tree_seconds(3, 125e6, Network(0.5, 125e6)) == pytest.approx(2 * 2.0 + 1.0 + 2.0)


def test_by_hand() -> None:
    seen = project(4, WORK, Network(latency=0.001, bandwidth=1e9))
    tree = 4 * 2 * 0.001 + 2 * 0.75 * 4e6 / 1e9  # two levels there and back, and every message takes two ways
    assert seen.network == pytest.approx(10 * tree + 2 * 4 * 2 * 0.001 + (3 + 1 + 2) * 2 * 0.001)
    assert seen.computing == 3.5
    assert seen.rate == pytest.approx(4000 / (3.5 + seen.network))
    assert seen.efficiency == pytest.approx(3.5 / (3.5 + seen.network))


def test_one_learner_needs_no_network() -> None:
    alone = project(1, WORK, Network(latency=math.inf, bandwidth=1.0))
    assert (alone.seconds, alone.rate) == (3.5, 1000 / 3.5)


def test_apart_the_slower_role_counts() -> None:
    near = Network(latency=0.0)
    assert project(8, WORK, near, apart=True).seconds == pytest.approx(2.0), "collecting is slower"
    slow = replace(WORK, learning=3.0, rollout_bytes=10**9)
    assert project(8, slow, near, apart=True).seconds == pytest.approx(3.5), "learning is"
    narrow = Network(latency=0.0, bandwidth=1e8)
    assert project(1, slow, narrow, apart=True).seconds == pytest.approx(2.0 + 10.0 + 0.04), "the rollouts' way is"


@pytest.mark.parametrize("apart", [False, True])
def test_a_worse_network_is_never_faster(apart: bool) -> None:
    work = replace(WORK, rollout_bytes=10**7)
    for learners in (2, 16, 256):
        rates = [
            project(learners, work, Network(latency, bandwidth), apart=apart).rate
            for latency, bandwidth in ((0.0, math.inf), (1e-5, 1e10), (1e-4, 1e9), (1e-2, 1e7))
        ]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] <= learners * project(1, work, Network(0.0), apart=apart).rate * (1 + 1e-9)


@pytest.mark.parametrize(
    ("collectors", "delay", "bandwidth", "seconds", "limit", "lag", "waiting"),
    [
        (1, 0.0, math.inf, 8.0, "collectors", 1.0, 0.0),
        (4, 0.0, math.inf, 2.0, "collectors", 1.0, 0.0),
        (5, 0.0, math.inf, 1.6, "collectors", 2 / 1.6, 0.0),  # of eight shards, three collectors have two
        (8, 0.0, math.inf, 1.5, "learner", 4, 1 - 1 / 1.5),
        (4, 2.5, math.inf, 4.0, "learner", 4, 0.5),
        (8, 0.0, 1e6, 2.0, "network", 4, 0.5),
    ],
)
def test_a_free_running_scheme_is_as_fast_as_its_slowest_part(
    collectors: int, delay: float, bandwidth: float, seconds: float, limit: str, lag: float, waiting: float
) -> None:
    work = replace(WORK, collecting=8.0, rollout_bytes=0 if bandwidth == math.inf else 2_000_000)
    seen = free_running(collectors, work, Network(0.0, bandwidth), shards=8, learner_delay=delay)
    assert (seen.seconds, seen.limit) == (pytest.approx(seconds), limit)
    assert (seen.policy_lag, seen.waiting) == (pytest.approx(lag), pytest.approx(waiting))
