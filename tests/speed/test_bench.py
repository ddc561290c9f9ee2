"""bench: its figures by hand, and a whole measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep import Layout
from lockstep.cli.main import main
from lockstep.speed import bench
from lockstep.speed.bench import CAUSES, Report, Round
from lockstep.speed.parts import PARTS, Costs

COSTS = Costs(env=200e-6, inference=100e-6, training=400e-6, optimizer=10e-6, reduction=5e-6)
SHARES = {"env": 0.25, "inference": 0.12, "learning": 0.45, "waiting": 0.1, "other": 0.05, "recording": 0.03}


def test_what_is_not_the_limit_is_lost_to_something() -> None:
    # Two processes make 2,000 samples a second, 1,000 each: 700 of 1,000 ms are the parts.
    measured = Round(COSTS, 2000.0, limit=2 / 700e-6, shares=SHARES)
    lost = measured.lost(2)
    assert lost == pytest.approx(
        {
            "waiting": 0.1,
            "collecting": 0.37 - 0.3,
            "optimizer": 0.01,
            "reduction": 0.005,
            "learning": 0.45 - 0.4 - 0.015,
            "delivery": 0.05,
            "recording": 0.03,
        }
    )
    assert set(lost) == set(CAUSES)
    assert measured.fraction_of_limit + sum(lost.values()) == pytest.approx(1.0)
    assert Round(COSTS, 2000.0, 2000.0, shares={}).lost(2) == {}


def test_a_report_gives_medians_and_ranges() -> None:
    rates = (1000.0, 3000.0, 1500.0)
    rounds = tuple(Round(COSTS, rate, 4000.0 - rate, SHARES) for rate in rates)
    report = Report(Layout.parse("processes:2"), 8, 0.5, 2, rounds)
    found = report.to_json()
    assert (found["samples_per_second"], found["limit"], found["fraction_of_limit"]) == (1500.0, 2500.0, 0.6)
    assert found["spread"]["fraction_of_limit"] == {"median": 0.6, "min": 1000 / 3000, "max": 3.0}
    assert found["microseconds_per_sample"]["env"]["median"] == pytest.approx(200)
    table = report.table()
    assert "1,500" in table and "0.60" in table and all(cause in table for cause in CAUSES.values())


def test_a_whole_measurement(capfd: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--env.adapter",
        "gymnasium",
        "--env.num-envs",
        "8",
        "--algorithm.rollout",
        "16",
        "--algorithm.epochs",
        "1",
    ]
    command = ["bench", "ppo-cartpole", *flags, "--rounds", "2", "--seconds", "0.1", "--random-actions", "--json"]
    command += ["--layout", "inline"]
    assert main(command) == 0
    captured = capfd.readouterr()
    report = json.loads(captured.out)
    assert report["samples_per_second"] > 0 and report["limit"] > 0 and report["layout"] == "inline"
    ratios = sorted(r["samples_per_second"] / r["limit"] for r in report["rounds"])
    assert report["spread"]["fraction_of_limit"] == pytest.approx(
        {"median": sum(ratios) / 2, "min": ratios[0], "max": ratios[1]}
    )
    assert set(report["lost"]) == set(CAUSES) and len(report["rounds"]) == 2
    assert report["machine"]["cores"] >= 1 and report["machine"]["torch"] and report["load_of_others"] >= 0
    assert "round 2 of 2" in captured.err and " s each" in captured.err


def test_replay_is_measured_too(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--env.adapter", "gymnasium", "--algorithm.updates", "2", "--algorithm.replay.prioritized"]
    flags += ["--layout", "inline"]
    assert main(["bench", "dqn-cartpole", *flags, "--rounds", "1", "--seconds", "0.1", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    (measured,) = report["rounds"]
    assert set(report["taken"]) == set(PARTS)
    assert all(report["microseconds_per_sample"][part]["median"] > 0 for part in PARTS)
    # Together they are all of the time.
    spent = sum(each["median"] for each in (*report["taken"].values(), *report["lost"].values()))
    assert spent == pytest.approx(1.0)
    assert measured["shares"]["learning"] > 0


def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, text in ((["--rounds", "0"], "--rounds"), (["--layout", "processes:9"], "processes:9")):
        assert main(["bench", "ppo-cartpole", *flags]) == 2
        assert text in capsys.readouterr().err


def test_cores_are_busy_with_all_but_idling_and_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 {} 0 0\ncpu1 7 7 7 7 7 7 7 7 0 0\nintr 3\n"
    counted = iter(["1 1 1 1 1 1 1 1", "101 21 31 5001 6001 2 3 48"])
    looked: list[float] = []
    monkeypatch.setattr(Path, "read_text", lambda _: told.format(next(counted)))
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(bench.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(bench.time, "sleep", looked.append)
    assert bench.load_of_others(4, lambda _: None) * looked[0] == pytest.approx(2.0)


@pytest.mark.parametrize(("seconds", "warned"), [(1.0, 0), (1.5, 1)])
def test_other_programs_that_keep_many_cores_busy_are_warned_of(
    seconds: float, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, said = iter([10000, 10000 + round(100 * seconds)]), list[str]()
    monkeypatch.setattr(Path, "read_text", lambda _: f"cpu0 {next(busy)} 0 0 0 0 0 0 0 0 0\n")
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(bench.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(bench.time, "sleep", lambda _: None)
    assert bench.load_of_others(4, said.append) == seconds and len(said) == warned
