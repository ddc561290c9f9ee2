"""tune: the layouts that it tries, what it makes of their rates, and that what it names trains."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sentences import says

from lockstep import Experiment, Layout, SettingsError, recipes, train
from lockstep.algorithms import OnPolicyConfig
from lockstep.cli.main import main
from lockstep.config.options import RunOptions
from lockstep.launchers import auto
from lockstep.launchers.auto import remembered
from lockstep.recipes import RECIPES
from lockstep.speed import tune as module
from lockstep.speed.trial import OutOfTime, Slot
from lockstep.speed.tune import Candidate, Tuned, candidates, shortened, tune
from lockstep.system.supervision import WorkerError
from lockstep.training.prepare import prepare


def texts(experiment: Experiment, cores: int, gpus: int = 0) -> list[str]:
    return [str(layout) for layout in candidates(experiment, cores, gpus)]


def scheme(experiment: Experiment, **changes: Any) -> Experiment:
    return experiment.replace(scheme=dataclasses.replace(experiment.scheme, **changes))


def test_candidates_are_what_the_experiment_allows() -> None:
    cartpole, memory = (prepare(RECIPES[name](), Layout()) for name in ("ppo-cartpole", "ppo-memory"))
    assert texts(cartpole, 1) == ["inline"]
    helped = ["processes:2,env_processes=2", "inline,env_processes=2"]
    assert texts(memory, 2) == ["processes:2", "inline", "processes:2,pin=1", *helped]
    assert not any("pin" in text for text in texts(memory, 16)), "cores are left over"
    assert {"processes:4", "processes:2", "inline", "inline,env_processes=16"} <= set(texts(memory, 16))
    assert not any("processes:8" in text or "-l" in text for text in texts(memory, 16)), "4 shards, no overlap"
    assert "cpu:a1-l1" in texts(scheme(memory, lag=1), 2)
    free = texts(scheme(memory, lag="async"), 16)
    assert {"cpu:a4-l1", "cpu:a4-l4", "cpu:a4-l1,env_processes=3"} <= set(free)
    assert not any(text.startswith(("inline", "processes")) for text in free), "collectors need their own processes"


def test_candidates_use_the_gpus_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    memory = prepare(RECIPES["ppo-memory"]().replace(precision="fp32"), Layout())
    assert texts(memory, 16, 2)[:6] == [
        *("inline,device=0,graphs=1", "inline,device=0"),
        *("processes:4,device=0,graphs=1", "processes:4,device=0"),
        *("processes:4,device=0+1,graphs=1", "processes:4,device=0+1"),
    ]
    overlapping = texts(scheme(memory, lag=1), 16, 2)
    assert {"a0-l1", "a0-l0,graphs=1", "a0,0-l1", "acpu,cpu,cpu,cpu-l0"} <= set(overlapping)
    assert not any("cpu" in text and "graphs" in text for text in overlapping), "graphs need GPUs for all processes"
    assert not any("graphs" in text for text in texts(memory, 16))
    assert not any(text.endswith("l1,2") for text in overlapping), "there is no GPU 2"


ON_POLICY = [name for name, recipe in RECIPES.items() if isinstance(recipe().algorithm, OnPolicyConfig)]


@pytest.mark.parametrize("name", ON_POLICY)
def test_shortened_iterations_do_the_same_work_a_sample(name: str) -> None:
    full = RECIPES[name]()
    short = shortened(full)
    short.validate()
    assert short.replace(algorithm=full.algorithm) == full, "only rollout and minibatches change"
    before, after = full.algorithm, short.algorithm
    assert isinstance(before, OnPolicyConfig) and isinstance(after, OnPolicyConfig)
    assert dataclasses.replace(after, rollout=before.rollout, minibatches=before.minibatches) == before
    assert after.rollout <= before.rollout and (before.minibatches == 1) == (after.minibatches == 1)
    if before.sequences or full.model.recurrent:
        assert short == full
    size = full.envs_per_shard
    slices = [size * each.rollout // each.minibatches for each in (before, after)]
    assert slices[1] == slices[0] or slices[0] > slices[1] >= 128


def test_iterations_with_replay_are_as_they_are() -> None:
    dqn = RECIPES["dqn-atari"]()
    assert shortened(dqn) == dqn


class FakeTrial:
    """As fast as it is told, on a clock of its own."""

    clock = 0.0
    speeds: dict[str, Iterator[float]]
    start_seconds = 5.0
    open: set[str]
    settling = 1

    def __init__(self, experiment: Experiment, layout: Layout) -> None:
        self._layout = str(layout)
        self.open.add(self._layout)
        self._started = False

    def run(self, seconds: float, iterations: int = 1, deadline: float = float("inf")) -> Slot:
        spent = seconds if self._started else self.start_seconds
        if FakeTrial.clock + spent > deadline:
            FakeTrial.clock = deadline
            raise OutOfTime
        FakeTrial.clock += spent
        if not self._started:
            self._started = True
            return Slot(1, 1.0, [])
        rate = next(self.speeds[self._layout])
        if rate < 0:
            raise WorkerError("it broke")
        return Slot(int(rate), 1.0, [])

    def close(self) -> None:
        self.open.discard(self._layout)


def constant(value: float) -> Iterator[float]:
    while True:
        yield value


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeTrial]:
    monkeypatch.setattr(module, "Trial", FakeTrial)
    monkeypatch.setattr(module.time, "perf_counter", lambda: FakeTrial.clock)
    monkeypatch.setattr(module, "cores", lambda: 2)
    FakeTrial.clock, FakeTrial.open, FakeTrial.start_seconds = 0.0, set(), 5.0
    return FakeTrial


def silent(text: str) -> None: ...


def test_the_fastest_wins_although_its_first_turn_was_slow(fake: type[FakeTrial]) -> None:
    fake.speeds = {
        "processes:2": iter([90.0, *[150.0] * 9]),
        "inline": constant(100.0),
        "processes:2,pin=1": constant(15.0),
        "processes:2,env_processes=2": constant(10.0),
        "inline,env_processes=2": constant(20.0),
    }
    tuned = tune(recipes.ppo_memory(), budget=120.0, say=silent)
    assert str(tuned.best) == "processes:2" and tuned.seconds <= 120.0 and not fake.open
    turns = {str(each.layout): len(each.rates) for each in tuned.candidates}
    assert turns["inline"] == turns["processes:2"] > turns["processes:2,env_processes=2"] == 1


def test_of_equally_fast_layouts_the_simplest_is_taken(fake: type[FakeTrial]) -> None:
    fake.speeds = {
        "processes:2": constant(1000.0),
        "inline": constant(990.0),
        "processes:2,pin=1": constant(15.0),
        "processes:2,env_processes=2": constant(1010.0),
        "inline,env_processes=2": constant(10.0),
    }
    assert str(tune(recipes.ppo_memory(), budget=120.0, say=silent).best) in ("processes:2", "inline")


def test_a_short_budget_tries_fewer_layouts_and_is_kept(fake: type[FakeTrial]) -> None:
    fake.speeds = {"processes:2": constant(10.0), "inline": constant(20.0)}
    fake.start_seconds = 20.0
    tuned = tune(recipes.ppo_memory(), budget=80.0, say=silent)
    assert str(tuned.best) == "inline" and tuned.seconds <= 80.0
    assert [each.note for each in tuned.candidates if not each.rates] == ["not tried: no time left"] * 3
    fake.start_seconds = 100.0
    with pytest.raises(SettingsError, match="--budget"):
        tune(recipes.ppo_memory(), budget=80.0, say=silent)
    assert not fake.open


def test_a_layout_that_fails_is_left_out_with_its_reason(fake: type[FakeTrial]) -> None:
    fake.speeds = {
        "processes:2": constant(-1.0),
        "inline": iter([20.0, 20.0, *[-1.0] * 9]),
        "processes:2,pin=1": constant(7.0),
        "processes:2,env_processes=2": constant(10.0),
        "inline,env_processes=2": constant(5.0),
    }
    tuned = tune(recipes.ppo_memory(), budget=120.0, say=silent)
    assert str(tuned.best) == "processes:2,env_processes=2"
    failed = {str(each.layout): each for each in tuned.candidates}
    for name in ("processes:2", "inline"):  # at once, and after it was the fastest
        assert failed[name].note == "failed: it broke" and not failed[name].rates
    assert not fake.open


@pytest.mark.slow
def test_it_ends_within_its_budget_with_a_layout_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_turn", lambda left, parts: 0.2)
    monkeypatch.setattr(module, "_ENOUGH", 3)
    monkeypatch.setattr(module, "_with_helpers", lambda *_: [])
    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr("lockstep.cli.main.BEGAN", time.perf_counter())
    monkeypatch.setattr(auto, "user_cache", lambda: tmp_path)
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
    begin = time.perf_counter()
    assert main(["tune", "ppo-cartpole", *flags, "--budget", "200", "--json"]) == 0
    assert time.perf_counter() - begin < 200, "the budget is what it is asked to keep"
    report = json.loads(capfd.readouterr().out)
    assert report["may_change_results"] is False and 0 < report["seconds"] < 200
    measured = [entry for entry in report["candidates"] if entry["turns"]]
    assert measured and report["layout"] in [entry["layout"] for entry in measured]
    assert all(entry["samples_per_second"] > 0 for entry in measured)
    layout = Layout.parse(report["layout"])
    options = RunOptions(run=str(tmp_path / "run"), display="none", tensorboard=False)
    experiment = RECIPES["ppo-cartpole"]()
    env = dataclasses.replace(experiment.env, adapter="gymnasium")
    assert train(experiment.replace(env=env), layout, options, stop_after=1).iterations == 1


@pytest.mark.parametrize(
    ("lag", "found", "kept"),
    [
        (
            "0",
            ["inline,device=0", "processes:2,env_threads=2", "inline"],
            "processes:2,env_threads=2",
        ),  # GPUs: different bits
        ("0", ["inline,device=0"], None),
        ("async", ["cpu:a2-l1"], None),  # another layout may give another result
    ],
)
def test_auto_is_told_of_the_best_layout_on_the_cpu(
    lag: str,
    found: list[str],
    kept: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(auto, "user_cache", lambda: tmp_path)
    tried = tuple(Candidate(Layout.parse(text), [1.0]) for text in found)
    monkeypatch.setattr(module, "tune", lambda *given, **named: Tuned(tried[0].layout, tried, 1.0, 0.0))
    assert main(["tune", "ppo-cartpole", "--scheme.lag", lag]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"layout: {found[0]}"
    known = remembered(scheme(RECIPES["ppo-cartpole"](), lag=lag if lag == "async" else int(lag)))
    assert known == (kept and Layout.parse(kept))
    assert any(f"--layout auto chooses {kept} " in line for line in printed) is bool(kept)


@pytest.mark.parametrize("budget", ["0", "-3"])
def test_mistakes_are_explained(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "ppo-cartpole", "--budget", budget]) == 2
    assert "--budget" in capsys.readouterr().err
    assert main(["tune", "ppo-cartpole", "--env.num-envs", "3"]) == 2
    assert says(capsys.readouterr().err, "scheme.shards=4", "--env.num-envs")
