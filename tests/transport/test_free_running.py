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

from lockstep import recipes
from lockstep.core.rollout import RolloutInfo
from lockstep.core.schedule import LapId, Schedule
from lockstep.distributed.shared_memory import SharedMemory
from lockstep.transport.free_running import Admission, Pace, RolloutChooser, may_take

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


# ---------------------------------------------------------------------------------------------------------- pace


def test_on_policy_every_iteration_takes_as_many() -> None:
    pace = Pace(shards=4)
    assert [pace.least(i) for i in range(3)] == [pace.most(i) for i in range(3)] == [4, 8, 12]


def test_with_replay_the_ratio_is_bounded_once_something_is_learned() -> None:
    """Two iterations only collect. A third of 4 rollouts, rounded up, must be there for the first that learns."""
    pace = Pace(shards=4, warm=2, slack=2.0)
    assert [pace.least(i) for i in range(6)] == [4, 8, 8 + 2, 8 + 3, 8 + 4, 8 + 6]
    assert [pace.most(i) for i in range(6)] == [4, 8, 8 + 12, 8 + 24, 8 + 36, 8 + 48]


@given(st.sampled_from([1, 2, 8]), st.integers(0, 5), st.floats(0, 5), st.integers(0, 100_000))
def test_a_pace_leaves_room_for_one_rollout_of_every_shard(shards: int, warm: int, slack: float, i: int) -> None:
    pace = Pace(shards, warm, slack)
    assert pace.least(i) <= shards * (i + 1) <= pace.most(i)
    assert pace.least(i + 1) - pace.least(i) <= shards <= pace.most(i + 1) - pace.most(i)


def test_the_pace_of_experiments() -> None:
    """2,000 steps of warm-up in iterations of 128."""
    full = recipes.dqn_cartpole()
    assert Pace.of(full) == Pace(4, warm=16, slack=0.5, even=17)
    assert Pace.of(full, begin=40) == Pace(4, warm=16, slack=0.5, even=41)
    assert Pace.of(recipes.ppo_cartpole(), begin=40) == Pace(4)


# ----------------------------------------------------------------------------------------------------- admission


def test_admission_is_the_same_for_all_who_map_it() -> None:
    memory = SharedMemory()
    collector, learner = (Admission(memory, shards=4, buffers=2) for _ in range(2))
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
    refused: int = 0
    """How often it had to wait for a buffer."""


@dataclass
class World:
    """Collectors and a learner in simulated time, with the library's own admission and choice between them."""

    shards: int
    max_lag: int
    collectors: list[Collector]
    pace: Pace | None = None
    """With replay; None is on-policy."""
    now: float = 0.0
    waited: float = 0.0
    """How long the learner waited."""
    arriving: list[tuple[float, int]] = field(default_factory=list)
    """(time, collector), a heap."""
    inbox: list[RolloutInfo] = field(default_factory=list)
    began: dict[LapId, int] = field(default_factory=dict)
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
            if collector.busy:
                continue
            if (version := self.admission.begin(collector.shards, collector.lap)) is None:
                collector.refused += 1
                continue
            for shard in collector.shards:
                assert collector.lap <= self.given_back[shard] + self.max_lag, "this slab was not given back"
                self.began[LapId(shard, collector.lap)] = version
            collector.busy = True
            heapq.heappush(self.arriving, (self.now + collector.seconds(), index))

    def advance(self, until: float) -> None:
        """Let time pass for collectors."""
        self.begin()
        while self.arriving and self.arriving[0][0] <= until:
            self.now, index = heapq.heappop(self.arriving)
            collector = self.collectors[index]
            acting = ((0, self.began[LapId(collector.shards[0], collector.lap)]),)
            lap, nothing = collector.lap, np.zeros(0)
            self.inbox += [RolloutInfo(shard, lap, lap, acting, nothing, {}, []) for shard in collector.shards]
            collector.lap, collector.busy = lap + 1, False
            self.begin()
        self.now = max(self.now, until)


class Learner:
    """Chooses among what arrives in a simulated world."""

    too_patient = 0
    """Versions by which it would let data be too old."""

    def __init__(self, world: World) -> None:
        self.world = world
        by_shard = world.pace is not None
        lag = world.max_lag + self.too_patient
        schedule, pace = Schedule(lag, ITERATIONS, world.shards, by_shard), world.pace or Pace(world.shards)
        self._chooser = RolloutChooser(schedule, pace, world.admission)
        self._arrived: dict[LapId, RolloutInfo] = {}

    def choose(self, iteration: int) -> list[RolloutInfo]:
        self._receive()
        return self._chooser.choose(iteration, self._arrived, self._wait)

    def _wait(self) -> None:
        begin = self.world.now
        self.world.begin()
        assert self.world.inbox or self.world.arriving, "deadlock: nobody collects, and the learner waits"
        if not self.world.inbox:
            self.world.advance(self.world.arriving[0][0])
        self._receive()
        self.world.waited += self.world.now - begin

    def _receive(self) -> None:
        self._arrived |= {info.lap_id: info for info in self.world.inbox}
        self.world.inbox = []


def run(world: World, learning: Callable[[], float]) -> list[list[LapId]]:
    """Check everything that is promised; returns what each iteration took."""
    learner, taken = Learner(world), []
    pace = world.pace or Pace(world.shards)
    for iteration in range(ITERATIONS):
        lap_ids = [info.lap_id for info in learner.choose(iteration)]
        taken.append(lap_ids)
        assert pace.least(iteration) <= len({lap_id for slots in taken for lap_id in slots}) <= pace.most(iteration)
        if iteration < pace.even:
            assert lap_ids == [(shard, iteration) for shard in range(world.shards)]
        learned = {lap_id for slots in taken for lap_id in slots}
        for lap_id, version in world.began.items():
            last = iteration if lap_id in lap_ids else version if lap_id in learned else iteration + 1
            assert version + world.max_lag >= last, "a rollout is too old, or will be"
        world.advance(world.now + learning())
        for shard, lap in lap_ids:
            assert lap == world.given_back[shard], "laps are learned from in order"
            world.given_back[shard] += 1
        world.admission.publish(iteration + 1, [lap_id.shard for lap_id in lap_ids])
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
    pace = None
    if draw(st.booleans()):
        warm = draw(st.integers(0, 3))
        pace = Pace(shards, warm, draw(st.sampled_from([0.0, 0.1, 0.5, 3.0])), warm + 1)
    world = World(shards, draw(st.integers(0 if pace is None else 1, 4)), collectors, pace)
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
    assert [{lap_id.shard for lap_id in lap_ids} for lap_ids in taken[:3]] == [fast, fast, fast | slow]
    assert taken[:2] == [[(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 2), (1, 2), (0, 3), (1, 3)]]


def test_a_lag_of_zero_takes_one_rollout_of_every_shard() -> None:
    for iteration, lap_ids in enumerate(run(*fast_and_slow(max_lag=0, slow=7.0))):
        assert sorted(lap_ids) == [(shard, iteration) for shard in range(4)]


def replaying(
    seconds: list[float], learning: float, *, slack: float = 0.5, max_lag: int = 4
) -> tuple[World, list[list[LapId]]]:
    """Collectors of two shards each that take so long for a rollout; what each iteration took."""
    collectors = [Collector([2 * c, 2 * c + 1], lambda s=each: s) for c, each in enumerate(seconds)]
    shards = 2 * len(collectors)
    world = World(shards, max_lag, collectors, Pace(shards, warm=1, slack=slack, even=2))
    return world, run(world, lambda: learning)


def test_a_slow_learner_is_not_drowned() -> None:
    """S = 4, and with a slack of 0.5 at most 6 rollouts an iteration that learns."""
    world, taken = replaying([1.0, 1.0], learning=100.0)
    assert [len(lap_ids) for lap_ids in taken] == [4, 4, 8, *[6] * 9]
    assert world.waited == 1.0, "for the first rollouts"
    assert all(collector.refused for collector in world.collectors)


def test_a_fast_learner_does_not_learn_too_often_from_too_few() -> None:
    """At least 4 / 1.5 rollouts an iteration that learns. Two arrive at a time."""
    world, taken = replaying([100.0, 100.0], learning=0.0)
    least = 4 + (ITERATIONS - 1) * 4 / 1.5
    assert least <= sum(len(lap_ids) for lap_ids in taken) < least + 4
    assert not any(collector.refused for collector in world.collectors)


@pytest.mark.parametrize("learning", [0.7, 1.0, 1.4])
def test_within_the_bound_nobody_waits_for_anybody(learning: float) -> None:
    """But in the warm-up, and in the first iterations that learn."""
    world, taken = replaying([1.0, 1.0], learning)
    assert not any(collector.refused for collector in world.collectors)
    assert world.waited == pytest.approx({0.7: 1.6, 1.0: 1.0, 1.4: 1.0}[learning])
    assert {len(lap_ids) for lap_ids in taken[3:]} == {0.7: {0, 4}, 1.0: {4}, 1.4: {4, 8}}[learning]


def test_with_replay_a_slow_collector_is_waited_for_only_when_it_has_to_be() -> None:
    """Version 1 begins its third rollouts, so iteration 4 is the last that may take them."""
    _, taken = replaying([1.0, 1000.0], learning=2.0, slack=9.0, max_lag=3)
    assert [any(lap_id.shard >= 2 for lap_id in lap_ids) for lap_ids in taken[:5]] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_first_come_first_served_would_leave_no_place_for_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.transport.free_running.may_take", lambda _, __, ___, places, ____: places > 0)
    with pytest.raises(AssertionError, match="deadlock"):
        run(*fast_and_slow(max_lag=2, slow=1000.0))


@pytest.mark.parametrize("wrong", ["slabs", "deadlines", "lag"])
def test_what_is_checked_can_be_broken(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, learning = fast_and_slow(max_lag=2, slow=5.0)
    if wrong == "slabs":
        world.admission = Admission(world.memory, 4, buffers=9)
        match = "was not given back"
    elif wrong == "lag":
        monkeypatch.setattr(Learner, "too_patient", 1)
        match = "too old"
    else:
        monkeypatch.setattr("lockstep.transport.free_running.may_take", lambda deadline, *_: deadline > 3)
        match = "deadlock"
    with pytest.raises(AssertionError, match=match):
        run(world, learning)
