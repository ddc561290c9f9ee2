"""Rollouts that stay on a (simulated) GPU have the bits of those that the host steps, and cost one launch a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simulated_gpu
from simulated_books import BACK, LAUNCH, PINNED, SYNC
from tiny import cut, in_torch, options, replaying

from lockstep import recipes
from lockstep.collectors.stepping import BatchEnvs
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.launchers.launch import resume, train
from lockstep.reports.runs import Run

CARTPOLE = f"{Path(__file__).resolve().parents[2] / 'examples'}/gpu_env.py:CartPole"
GPU, GRAPHS = "inline,device=0", "inline,device=0,graphs=1"


def pictures(wrong: str = "") -> Experiment:
    made = in_torch()
    options = {"wrong": wrong} if wrong else {}
    return made.replace(env=dataclasses.replace(made.env, options=options))


def cartpole(recipe: Callable[[], Experiment] = recipes.ppo_cartpole, **changes: Any) -> Experiment:
    env = {"id": CARTPOLE, "adapter": "auto", "protocol": "none"}
    return cut(recipe, env=env, model={"encoder": "mlp", **changes}, precision="fp32")


def careless() -> Experiment:
    made = cartpole()
    return made.replace(env=dataclasses.replace(made.env, id="wind:Careless"))


def impala() -> Experiment:
    made = cartpole(recipes.impala_atari)
    return made.replace(algorithm=dataclasses.replace(made.algorithm, epochs=1))  # type: ignore[call-arg]


def dqn() -> Experiment:
    made = replaying(recipes.dqn_cartpole, replay={"prioritized": True})
    return made.replace(env=dataclasses.replace(made.env, id=CARTPOLE, adapter="auto"))


def digest(experiment: Experiment, text: str, folder: Path) -> tuple[Any, ...]:
    """That of the run, and the scores of each iteration."""
    found = train(experiment, Layout.parse(text), options(folder / text)).digest
    assert not simulated_gpu.faults()
    records = Run.read(folder / text).records
    return (found, *((each["episodes"], each.get("score/mean")) for each in records))


def by_host(experiment: Experiment, folder: Path) -> tuple[Any, ...]:
    """The same where the host steps the environments, which are on the GPU all the same."""
    with pytest.MonkeyPatch.context() as patch, simulated_gpu.simulated():
        patch.setattr(BatchEnvs, "on_device", lambda self: None)
        return digest(experiment, GPU, folder / "host")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(pictures, marks=pytest.mark.slow),
        pytest.param(careless, marks=pytest.mark.slow),
        pytest.param(dqn, marks=[pytest.mark.slow, pytest.mark.full]),  # test_replay_on_gpu.py replays on a GPU
        pytest.param(impala, marks=pytest.mark.slow),
        pytest.param(lambda: cartpole(recipes.a2c_atari), marks=[pytest.mark.slow, pytest.mark.full]),  # as impala
    ],
)
def test_a_rollout_on_the_gpu_has_the_bits_of_one_that_the_host_steps(make: Any, tmp_path: Path) -> None:
    experiment = make()
    expected = by_host(experiment, tmp_path)
    assert make is not pictures or expected[-1][0] > 0, "no episode ended"
    for text in (GPU, GRAPHS):
        with simulated_gpu.simulated():
            assert digest(experiment, text, tmp_path) == expected


@pytest.mark.slow
def test_other_processes_learn_from_it_and_it_is_resumed(tmp_path: Path) -> None:
    with simulated_gpu.simulated():
        expected = digest(cartpole(), GRAPHS, tmp_path)
        assert {digest(cartpole(), text, tmp_path) for text in ("a0-l0", "processes:2,device=0")} == {expected}
        train(cartpole(), Layout.parse(GPU), options(tmp_path / "part"), stop_after=1)
        assert resume(tmp_path / "part", Layout.parse(GRAPHS)).digest == expected[0]


def test_a_step_is_one_launch_and_a_rollout_comes_back_once(tmp_path: Path) -> None:
    with simulated_gpu.simulated():
        hot = simulated_gpu.hot_path(lambda: digest(cartpole(), GRAPHS, tmp_path))
        seen = simulated_gpu.counts()
    for step in hot.acting[-8:]:
        assert {kind: step[kind] for kind in step.kinds()} == {LAUNCH: 1}
    finish = [line for line in seen.lines(BACK) if "device_rollout" in line]
    assert sum(seen.lines(BACK)[line] for line in finish) == 3 * 4 * 9, "fields, of four shards that act apart"
    assert sum(n for line, n in seen.lines(SYNC).items() if "device_rollout" in line and "finish" in line) == 3 * 4
    assert not [line for line in seen.lines(PINNED) if "to_device" in line], "the learner takes it as it is"


@pytest.mark.parametrize(("wrong", "message"), [("item", "reads a number"), ("tolist", "graphs=1: .*the environment")])
def test_an_environment_that_waits_cannot_be_captured(wrong: str, message: str, tmp_path: Path) -> None:
    with simulated_gpu.simulated(), pytest.raises(SettingsError, match=message):
        train(pictures(wrong), Layout.parse(GRAPHS), options(tmp_path / "run"))


@pytest.mark.slow
def test_what_cuts_rollouts_steps_by_the_host(tmp_path: Path) -> None:
    experiment = cartpole()
    experiment = experiment.replace(scheme=dataclasses.replace(experiment.scheme, preempt=0.99))
    with simulated_gpu.simulated():
        digest(experiment, "processes:2,device=0", tmp_path)
        assert any("device_actor.py" in line for line in simulated_gpu.counts().lines(BACK))
