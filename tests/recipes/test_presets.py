"""Every cell of the grid of schemes, and every preset, trains; deterministic ones all alike."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import ITERATIONS, cut, discrete_sac, options, replaying

from lockstep import presets, recipes
from lockstep.algorithms import A2CConfig, IMPALAConfig
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.recipes.presets import PRESETS, CollectorSet, Composed, LearnerSet, Updates, compose
from lockstep.reproducibility.replay import replay
from lockstep.run.folder import RunFolder
from lockstep.scheme import Scheme
from lockstep.training.job import Result

pytestmark = pytest.mark.usefixtures("processes_are_there_already", "own_folder")

Captured = pytest.CaptureFixture[str]


def ppo() -> Experiment:
    return cut(recipes.ppo_cartpole, env={"adapter": "gymnasium"})


AGENTS: dict[str, Callable[[], Experiment]] = {
    "ppo": ppo,
    "a2c": lambda: ppo().replace(algorithm=A2CConfig(rollout=8)),
    "impala": lambda: ppo().replace(algorithm=IMPALAConfig(rollout=8, minibatches=2)),
    "dqn": lambda: replaying(recipes.dqn_cartpole, replay={"prioritized": True}),
    "sac": lambda: replaying(discrete_sac, replay={}),
    "r2d2": lambda: replaying(recipes.r2d2_memory, replay={"capacity": 4 * 24}, algorithm={"burn_in": 2, "unroll": 4}),
}
"""Three iterations each; with replay the first only collects."""


def ran(composed: Composed, name: str = "run") -> tuple[Result, list[dict[str, Any]]]:
    """Its result and metrics."""
    result = train(*composed, options(Path(name)))
    return result, [json.loads(line) for line in RunFolder(result.run).metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The digest of an agent in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return functools.cache(lambda agent: ran(presets.single(AGENTS[agent]()), str(folder / agent))[0].digest)


# --------------------------------------------------------------------------------------------------------- the grid

COLLECTION = {
    "central": CollectorSet(),
    "parallel": CollectorSet(2),
    "central async": CollectorSet(1, lag="async"),
    "parallel async": CollectorSet(2, lag="async"),
}
GRADIENTS = {
    "central": (LearnerSet(), Updates()),
    "parallel": (LearnerSet(2), Updates()),
    "central async": (LearnerSet(), Updates(lag="async")),
    "parallel async": (LearnerSet(2), Updates(lag="async")),
}


@pytest.mark.parametrize("agent", ["ppo", "sac"])
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("collection", COLLECTION)
def test_a_cell_of_the_grid(collection: str, gradients: str, agent: str, alone: Callable[[str], str]) -> None:
    composed = compose(AGENTS[agent](), COLLECTION[collection], *GRADIENTS[gradients])
    result, lines = ran(composed)
    assert len(lines) == ITERATIONS and lines[-1]["updates"] > 0
    learned = [line for line in lines if line["updates"]]
    if "async" not in collection:
        assert all(line["lag/policy_versions"] == 0 for line in lines)
    lags = [line["lag/policy_versions"] for line in lines if "lag/policy_versions" in line]
    assert all(lag <= composed.experiment.scheme.max_lag for lag in lags)
    if gradients != "parallel async":
        assert all(line["lag/gradient_asynchrony"] == 0 for line in learned)
    assert all(0 <= line["lag/gradient_asynchrony"] <= Scheme.max_gradient_lag for line in learned)
    if "async" not in collection + gradients:
        assert result.digest == alone(agent)
    if "async" in collection and "async" in gradients:
        found = replay(result.run, Layout(), options(Path("again")))
        assert found.ok and found.digest == result.digest, found.difference


CASES = [(name, agent) for name in PRESETS if name not in ("a2c", "ppo") for agent in ("a2c", "impala", "dqn")]


@pytest.mark.parametrize(("name", "agent"), [*CASES, ("r2d2", "r2d2")])
def test_a_preset_trains(name: str, agent: str) -> None:
    experiment = AGENTS[agent]()
    remembers = experiment.algorithm.replays
    if (name in ("apex", "r2d2") and not remembers) or (name == "r2d2" and not experiment.model.recurrent):
        with pytest.raises(SettingsError, match=f"preset {name} "):
            PRESETS[name](experiment)
        return
    composed = PRESETS[name](experiment)
    if name == "ddppo" and remembers:
        with pytest.raises(SettingsError, match=r"scheme.preempt=0.8 cuts rollouts"):
            train(*composed)
        return
    _, lines = ran(composed)
    assert len(lines) == ITERATIONS and lines[-1]["updates"] > 0
    assert ("lag/kept" in lines[0]) == (name == "ddppo")
    if name == "cleanba":
        assert [line["lag/policy_versions"] for line in lines] == [0, 1, 1]


def test_presets_differ_in_what_they_wait_for() -> None:
    found = {name: PRESETS[name](AGENTS["r2d2"]()) for name in PRESETS}
    schemes = {
        name: (composed.experiment.scheme.lag, composed.experiment.scheme.gradient_lag, str(composed.layout))
        for name, composed in found.items()
    }
    assert schemes == {
        "single": (0, 0, "inline"),
        "sync": (0, 0, "cpu:a2-l1"),
        "a2c": (0, 0, "cpu:a2-l1"),
        "ppo": (0, 0, "cpu:a2-l1"),
        "cleanba": (1, 0, "cpu:a2-l1"),
        "impala": ("async", 0, "cpu:a2-l1"),
        "apex": ("async", 0, "cpu:a2-l1"),
        "r2d2": ("async", 0, "cpu:a2-l1"),
        "appo": (0, "async", "processes:2"),
        "dppo": (0, 0, "processes:2"),
        "ddppo": (0, 0, "processes:2"),
        "rapid": ("async", 0, "cpu:a2-l2"),
        "async-rapid": ("async", "async", "cpu:a2-l2"),
    }
    assert [name for name in PRESETS if found[name].experiment.scheme.preempt < 1] == ["ddppo"]


def test_a_preset_keeps_the_rest_of_the_scheme() -> None:
    """And leaves no setting behind that is for another kind of scheme."""
    free = dataclasses.replace(ppo().scheme, lag="async", max_lag=2, refresh="step", shards=8, acting_batch=4)
    full = ppo().replace(scheme=free)
    assert presets.impala(full).experiment.scheme == free
    assert presets.dppo(full).experiment.scheme == Scheme(shards=8, acting_batch=4)
    assert presets.dppo(ppo().replace(scheme=Scheme(gradient_lag="async", max_gradient_lag=1))).experiment == (
        ppo().replace(scheme=Scheme())
    )


def test_numbers_and_devices() -> None:
    assert str(presets.ddppo(ppo(), workers=4).layout) == "processes:4"
    assert str(presets.rapid(ppo(), collectors=3, learners=2).layout) == "cpu:a3-l2"
    assert str(presets.dppo(ppo(), workers=1).layout) == "inline"
    on_gpus = compose(ppo(), CollectorSet(2, device="0"), LearnerSet(device="1"), Updates())
    assert str(on_gpus.layout) == "a0,0-l1"
    assert str(compose(ppo(), CollectorSet(), LearnerSet(2, device="0"), Updates()).layout) == "processes:2,device=0"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_short_and_drawn(name: str) -> None:
    source = inspect.getsource(PRESETS[name])
    doc = inspect.getdoc(PRESETS[name])
    assert doc is not None and re.search(r"\| c", doc) and doc.splitlines()[0].endswith(".")
    assert len(source.splitlines()) - len(doc.splitlines()) <= 10


# ---------------------------------------------------------------------------------------------------- command line


def resolved(capsys: Captured, *flags: str) -> tuple[dict[str, Any], str]:
    assert main(["train", *flags, "--dry-run", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    return printed["experiment"]["scheme"], printed["layout"]


def test_the_command_line_takes_presets(capsys: Captured) -> None:
    scheme, layout = resolved(capsys, "ppo-cartpole", "--preset", "impala")
    assert (scheme["lag"], layout) == ("async", "cpu:a2-l1")
    flags = ("--preset=impala", "--scheme.max-lag", "2", "--scheme.acting-batch", "0", "--layout", "cpu:a3-l1")
    scheme, layout = resolved(capsys, "ppo-cartpole", *flags)
    assert (scheme["lag"], scheme["max_lag"], scheme["acting_batch"], layout) == ("async", 2, 0, "cpu:a3-l1")
    scheme, layout = resolved(capsys, "impala-atari", "--preset", "ddppo", "--scheme.preempt", "0.6")
    assert (scheme["lag"], scheme["preempt"], layout) == (0, 0.6, "processes:2")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["ppo-cartpole", "--preset", "impla"], "There is no preset 'impla'. Did you mean impala"),
        (["ppo-cartpole", "--preset", "apex"], "The preset apex is for algorithms that learn from replay, but ppo"),
        (["sac-mujoco", "--preset", "r2d2"], "The preset r2d2 is for models with a recurrent core"),
        (["dqn-cartpole", "--preset", "ddppo"], "scheme.preempt=0.8 cuts rollouts"),
    ],
)
def test_mistakes(flags: list[str], text: str, capsys: Captured) -> None:
    assert main(["train", *flags, "--dry-run"]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_a_sweep_over_presets(capsys: Captured) -> None:
    """What differs in its layout alone is the same run."""
    flags = ("--preset", "single,dppo,cleanba", "--seed", "1..2", "--env.adapter", "gymnasium", "--dry-run", "--json")
    assert main(["sweep", "set", "ppo-cartpole", *flags]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["settings"]["layout"] for run in runs] == ["processes:2", "processes:2", "cpu:a2-l1", "cpu:a2-l1"]


def test_schemes_are_drawn(capsys: Captured) -> None:
    assert main(["schemes", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(PRESETS)
    assert main(["schemes"]) == 0
    printed = capsys.readouterr().out
    assert "\nsync, a2c, ppo\n" in printed and "    worker 2   | c0 x g" in printed
    assert main(["schemes", "ddppo"]) == 0
    assert "worker 2" in capsys.readouterr().out
    assert main(["schemes", "ddpo"]) == 2
    assert "Did you mean" in capsys.readouterr().err
