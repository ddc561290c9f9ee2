"""Admission of free-running rollouts, in simulated time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.clock import Clock, Fill
from lockstep.collect import Delivery
from lockstep.freerun import Admission, may_take
from lockstep.remote import RemoteRollouts
from lockstep.runtime.shared import SharedMemory

ITERATIONS = 12


# ------------------------------------------------------------------------------------------------------ may_take


@pytest.mark.parametrize(
    ("deadline", "pending", "places", "may"),
    [
        # Two shards. One place is left in iteration 5, and one rollout can wait no longer.
        (6, {5: 1, 6: 1}, 1, False),
        (5, {5: 1, 6: 1}, 1, True),
        (6, {5: 1, 6: 1}, 2, True),
        # Iterations 5 and 6 have 1 + 2 places for the three that are due by 6, so none for one that is due at 7.
        (7, {6: 3, 7: 1}, 1, False),
        (7, {6: 2, 7: 2}, 1, True),
        (7, {6: 3, 7: 1}, 2, True),
        # Nothing is due at 6, but by 7 five places stay for six others.
        (8, {7: 6, 8: 1}, 2, False),
        (8, {7: 5, 8: 1}, 2, True),
        (7, {7: 6, 8: 1}, 2, True),
        # It is the only one.
        (5, {5: 1}, 1, True),
        (9, {9: 1}, 1, True),
    ],
)
def test_a_rollout_may_be_taken_if_all_others_stay_in_time(
    deadline: int, pending: dict[int, int], places: int, may: bool
) -> None:
    assert may_take(deadline, pending, iteration=5, places=places, shards=2) is may


# ----------------------------------------------------------------------------------------------------- admission


def test_admission_is_the_same_for_all_who_map_it() -> None:
    memory = SharedMemory()
    collector, learner = (Admission(memory, shards=4, slabs=2) for _ in range(2))
    assert collector.begin([0, 1], lap=0) == 0
    learner.publish(1, [])
    assert collector.newest == 1
    assert collector.begin([0, 1], lap=1) == 1
    assert collector.begin([2], lap=0) == 1
    assert learner.in_flight() == {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 1, (2, 0): 1}

    learner.publish(2, [0, 2])
    assert learner.in_flight() == {(0, 1): 1, (1, 0): 0, (1, 1): 1}
    assert collector.begin([0, 1], lap=2) is None, "shard 1 has no slab"
    assert collector.begin([0], lap=2) == 2
    learner.publish(3, [1])
    assert collector.begin([1], lap=2) == 3
    assert collector.in_flight() == {(0, 1): 1, (0, 2): 2, (1, 1): 1, (1, 2): 3}
    memory.close()


# ---------------------------------------------------------------------------------------------------- simulation


@dataclass
class Collector:
    """Shards that act in lockstep."""

    shards: list[int]
    seconds: Callable[[], float]
    """How long the next rollout takes."""
    lap: int = 0
    busy: bool = False


@dataclass
class World:
    """Collectors and a learner in simulated time, with the library's own admission and choice between them."""

    shards: int
    max_lag: int
    collectors: list[Collector]
    now: float = 0.0
    arriving: list[tuple[float, int]] = field(default_factory=list)
    """(time, collector), a heap."""
    inbox: list[Delivery] = field(default_factory=list)
    began: dict[Fill, int] = field(default_factory=dict)
    """The version that each rollout began with."""
    given_back: list[int] = field(default_factory=list)
    """Laps by shard."""

    def __post_init__(self) -> None:
        self.memory = SharedMemory()
        self.admission = Admission(self.memory, self.shards, self.max_lag + 1)
        self.given_back = [0] * self.shards

    def begin(self) -> None:
        """Let every idle collector begin, if it may."""
        for index, collector in enumerate(self.collectors):
            if collector.busy or (version := self.admission.begin(collector.shards, collector.lap)) is None:
                continue
            for shard in collector.shards:
                assert collector.lap <= self.given_back[shard] + self.max_lag, "this slab was not given back"
                self.began[Fill(shard, collector.lap)] = version
            collector.busy = True
            heapq.heappush(self.arriving, (self.now + collector.seconds(), index))

    def advance(self, until: float) -> None:
        """Let time pass for collectors."""
        self.begin()
        while self.arriving and self.arriving[0][0] <= until:
            self.now, index = heapq.heappop(self.arriving)
            collector = self.collectors[index]
            acting = ((0, self.began[Fill(collector.shards[0], collector.lap)]),)
            lap, nothing = collector.lap, np.zeros(0)
            self.inbox += [Delivery(shard, lap, lap, acting, nothing, {}, []) for shard in collector.shards]
            collector.lap, collector.busy = lap + 1, False
            self.begin()
        self.now = max(self.now, until)


class Learner(RemoteRollouts):
    """Chooses among what arrives in a simulated world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._clock, self._shards = Clock(world.max_lag, ITERATIONS, world.shards), world.shards
        self._delivered = {}

    def choose(self, iteration: int) -> list[Delivery]:
        self._receive()
        return self._choose(iteration, self.world.admission)

    def _await(self, met: Callable[[], bool]) -> None:
        while not met():
            self.world.begin()
            assert self.world.inbox or self.world.arriving, "deadlock: nobody collects, and the learner waits"
            if not self.world.inbox:
                self.world.advance(self.world.arriving[0][0])
            self._receive()

    def _receive(self) -> None:
        self._delivered |= {Fill(delivery.shard, delivery.lap): delivery for delivery in self.world.inbox}
        self.world.inbox = []


def run(world: World, learning: Callable[[], float]) -> list[list[Fill]]:
    """Check everything that is promised; returns what each iteration took."""
    learner, taken = Learner(world), []
    for iteration in range(ITERATIONS):
        fills = [Fill(delivery.shard, delivery.lap) for delivery in learner.choose(iteration)]
        assert len(set(fills)) == world.shards
        taken.append(fills)
        learned = {fill for slots in taken for fill in slots}
        for fill, version in world.began.items():
            last = iteration if fill in fills else version if fill in learned else iteration + 1
            assert version + world.max_lag >= last, "a rollout is too old, or will be"
        world.advance(world.now + learning())
        for shard, lap in fills:
            assert lap == world.given_back[shard], "laps are learned from in order"
            world.given_back[shard] += 1
        world.admission.publish(iteration + 1, [fill.shard for fill in fills])
    world.memory.close()
    return taken


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, Callable[[], float]]:
    """Any number of collectors, each with any shards and a speed of its own, which varies."""
    shards = draw(st.sampled_from([1, 2, 4, 8]))
    of = draw(st.lists(st.integers(0, shards - 1), min_size=shards, max_size=shards))
    luck = random.Random(draw(st.integers(0, 2**32)))

    def varying(mean: float, spread: float) -> Callable[[], float]:
        return lambda: mean * luck.uniform(1 - spread, 1 + spread)

    speed, spread = st.sampled_from([0.0, 0.1, 1.0, 1.5, 10.0, 100.0]), st.sampled_from([0.0, 0.3, 1.0])
    collectors = [
        Collector([shard for shard in range(shards) if of[shard] == c], varying(draw(speed), draw(spread)))
        for c in sorted(set(of))
    ]
    world = World(shards, draw(st.integers(0, 4)), collectors)
    return world, varying(draw(speed), draw(spread))


@given(worlds())
def test_no_rollout_is_too_old_and_nothing_blocks(simulated: tuple[World, Callable[[], float]]) -> None:
    run(*simulated)


def fast_and_slow(max_lag: int, slow: float) -> tuple[World, Callable[[], float]]:
    collectors = [Collector([0, 1], lambda: 1.0), Collector([2, 3], lambda: slow)]
    return World(4, max_lag, collectors), lambda: 0.0


def test_a_slow_collector_is_waited_for_only_when_it_has_to_be() -> None:
    """Version 0 begins all first rollouts, so with a lag of 2 those of the slow one fill iteration 2 at the latest."""
    fast, slow = {0, 1}, {2, 3}
    taken = run(*fast_and_slow(max_lag=2, slow=1000.0))
    assert [{fill.shard for fill in fills} for fills in taken[:3]] == [fast, fast, fast | slow]
    assert taken[:2] == [[(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 2), (1, 2), (0, 3), (1, 3)]]


def test_a_lag_of_zero_takes_one_rollout_of_every_shard() -> None:
    for iteration, fills in enumerate(run(*fast_and_slow(max_lag=0, slow=7.0))):
        assert sorted(fills) == [(shard, iteration) for shard in range(4)]


def test_first_come_first_served_would_be_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.remote.may_take", lambda *_: True)
    with pytest.raises(AssertionError, match="too old"):
        run(*fast_and_slow(max_lag=2, slow=1000.0))


@pytest.mark.parametrize("wrong", ["slabs", "deadlines"])
def test_what_is_checked_can_be_broken(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, learning = fast_and_slow(max_lag=2, slow=5.0)
    if wrong == "slabs":
        world.admission = Admission(world.memory, 4, slabs=9)
        match = "was not given back"
    else:
        monkeypatch.setattr("lockstep.remote.may_take", lambda deadline, *_: deadline > 3)
        match = "deadlock"
    with pytest.raises(AssertionError, match=match):
        run(world, learning)
