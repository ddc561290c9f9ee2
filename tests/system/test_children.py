from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.system import children, machine, supervision
from lockstep.system.supervision import StallDetector


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pinned_processes_share_the_cores(count: int) -> None:
    cores = os.sched_getaffinity(0)
    processes = [children.start(time.sleep, (60.0,), f"sleeper-{index}") for index in range(count)]
    try:
        for index, process in enumerate(processes):
            children.pin(process, index, count)
        shares = [os.sched_getaffinity(process.pid) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert set.union(*shares) == cores
    assert sum(map(len, shares)) == max(count, len(cores)), "no core is shared while there is another"


def _answers_and_waits(pipe: Connection) -> None:
    pipe.send("here")
    time.sleep(60)


def _answers_and_dies(pipe: Connection) -> None:
    pipe.send("before")
    os._exit(3)


def _dies(pipe: Connection) -> None:
    del pipe
    os._exit(4)


def test_answers_before_a_death_count_and_a_death_without_one_is_reported() -> None:
    pipes, processes = [], []
    for index, target in enumerate((_answers_and_waits, _answers_and_dies, _dies)):
        ours, theirs = multiprocessing.Pipe()
        processes.append(children.start(target, (theirs,), f"child-{index}"))
        theirs.close()
        pipes.append(ours)
    try:
        answers: dict[int, str] = {}
        deaths: dict[int, str] = {}
        while missing := {0, 1, 2} - answers.keys() - deaths.keys():
            found, ended = children.first_answers(processes, pipes, missing)
            answers |= found
            deaths |= ended
        assert answers == {0: "here", 1: "before"}
        assert list(deaths) == [2] and "exit code 4" in deaths[2]
        assert children.first_answers(processes, pipes, {0}, timeout=0) == ({}, {}), "it has nothing more to say"
        processes[1].join()  # its answer may have come before it ended
        assert children.first_answers(processes, pipes, {1}, timeout=0)[1].keys() == {1}
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL (the system may have"), (signal.SIGRTMIN + 3, f"signal {signal.SIGRTMIN + 3}")],
)
def test_a_death_by_a_signal_is_named(number: int, name: str) -> None:
    process: Any = SimpleNamespace(exitcode=-number)
    assert children.death_report(process).startswith(f"was ended by {name}")


def test_a_pause_of_the_watcher_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *range(3_600, 3_900), 3_900.0, 3_900.0])
    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    standstill = StallDetector(300.0)
    for _ in range(3_600, 3_896):
        assert standstill.too_long(started=True) is None, "of the hour in which it was stopped, it saw 5 seconds"
    assert standstill.too_long(started=True) == 300.0
    standstill.moved()
    assert standstill.too_long(started=True) is None


def test_what_has_changed_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    standstill = StallDetector(6.0)
    for steps in ([1, 0], [1, 1], [2, 1], [2, 2]):
        assert standstill.too_long(steps, started=True) is None
        assert standstill.too_long(list(steps), started=True) is None
    assert [standstill.too_long([2, 2], started=True) for _ in range(5)] == [None, None, None, None, 6.0]


def test_a_start_and_explanations_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 4.0, 4.0, 4.0])
    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    standstill = StallDetector(3.0)
    assert standstill.too_long(started=False) is None
    assert standstill.too_long(started=False) is None
    assert standstill.too_long(started=True) == 3.0
    assert standstill.too_long(started=True, grace=2.0) is None


def test_many_environments_may_take_long_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(environments: int, *, started: bool) -> list[float | None]:
        clock = iter(range(0, 1_000, 5))
        monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        standstill = StallDetector(3.0, environments)
        return [standstill.too_long(started=started) for _ in range(36)]

    assert answers(100, started=False)[33:] == [None, 170.0, 170.0], "120 seconds, and half a second for each"
    assert answers(0, started=False)[23:25] == [None, 120.0]
    assert answers(100, started=True)[0] == 3.0, "a run that has begun needs no time to start"


@pytest.mark.parametrize(
    ("told", "cores"), [("max 100000", 8), ("150000 100000", 2), ("20000 100000", 1), ("9900000 100000", 8)]
)
def test_a_container_may_keep_fewer_cores_busy_than_it_shows(
    told: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(machine.Path, "read_text", lambda _: told)
    assert machine.cores() == cores
