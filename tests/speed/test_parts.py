"""The parts' measurements: in the shapes of training, and the limits that follow from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import simulated_gpu
import torch
from simulated_books import BACK, KERNEL, LAUNCH
from tiny import EXPERIMENTS, options, portable

from lockstep import Experiment, Layout, recipes, train
from lockstep.agent import Agent
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.collectors.compiled_actor import CompiledPolicy
from lockstep.core.arrays import ArrayTuple
from lockstep.distributed.groups import Group
from lockstep.distributed.tree import TreeSum
from lockstep.learners.learner_table import LEARNERS
from lockstep.learners.off_policy_kernels import (
    DiscreteSACLearner,
    DrQLearner,
    MPOLearner,
    QLearner,
    ReplayLearner,
    ReturnsLearner,
    SACLearner,
    TD3Learner,
)
from lockstep.learners.on_policy_kernels import LossLearner, ValueLearner
from lockstep.learners.policies_kernels import PoliciesLearner
from lockstep.learners.ppo_kernels import PPOLearner
from lockstep.learners.sequence_kernels import SequenceLearner
from lockstep.speed import parts
from lockstep.speed.calls import Calls
from lockstep.speed.parts import Costs, limit, parts_of, processes_to_load
from lockstep.training.prepare import prepare

COSTS = Costs(env=300e-6, inference=100e-6, training=800e-6, optimizer=1e-6, reduction=1e-6)


def atari(shards: int = 4, lag: int = 0, torch_threads: int = 1) -> Experiment:
    experiment = recipes.ppo_atari()
    scheme = dataclasses.replace(experiment.scheme, shards=shards, lag=lag, acting_batch=0)
    env = dataclasses.replace(experiment.env, adapter="ale")
    return experiment.replace(scheme=scheme, env=env, torch_threads=torch_threads)


@pytest.mark.parametrize(
    ("layout", "experiment", "cores", "expected"),
    [
        # Both cores always busy with 300 + 100 + 800 µs a sample.
        ("processes:2", atari(), 2, 2 / 1200e-6),
        # Environments of two shards step in two threads while the policy runs for others.
        ("processes:2", atari(), 64, 2 / (150e-6 + 800e-6)),
        # One shard a process: no other acting batch to step meanwhile.
        ("processes:4", atari(), 64, 4 / 1200e-6),
        ("processes:4,env_threads=3", atari(), 64, 4 / 1000e-6),
        ("inline", atari(), 1, 1 / 1200e-6),
        ("inline", atari(), 2, 1 / (100e-6 + 800e-6)),
        ("inline", atari(torch_threads=2), 2, 2 / (300e-6 + 1800e-6)),
        # Split: in turns at lag 0, the slower side from lag 1 on.
        ("cpu:a1-l1", atari(), 64, 1 / (100e-6 + 800e-6)),
        ("cpu:a1-l1", atari(lag=1), 64, 1 / 800e-6),
        ("cpu:a1-l1", atari(lag=1), 1, 1 / 1200e-6),
        ("cpu:a4-l4", atari(lag=1), 64, 4 / 800e-6),
    ],
)
def test_the_limit_by_hand(layout: str, experiment: Experiment, cores: int, expected: float) -> None:
    assert limit(experiment, Layout.parse(layout), COSTS, cores).rate == pytest.approx(expected)


def test_replay_counts_as_learning() -> None:
    costs = dataclasses.replace(COSTS, inserting=50e-6, sampling=150e-6)
    for layout, lag, expected in (("processes:2", 0, 2 / 1400e-6), ("cpu:a1-l1", 1, 1 / 1000e-6)):
        assert limit(atari(lag=lag), Layout.parse(layout), costs, 2 if lag == 0 else 64).rate == pytest.approx(expected)


def test_environments_of_python_step_while_nothing_else_does_unless_they_have_processes() -> None:
    experiment = atari()
    experiment = experiment.replace(
        env=dataclasses.replace(experiment.env, id="CartPole-v1", adapter="gymnasium", protocol="none")
    )
    for layout, expected in (("inline", 1 / 1200e-6), ("inline,env_processes=2", 1 / (150e-6 + 800e-6))):
        assert limit(experiment, Layout.parse(layout), COSTS, 64).rate == pytest.approx(expected)


def test_as_many_processes_measure_as_the_layout_loads_cores() -> None:
    for layout, cores, expected in (
        ("inline", 8, 1),
        ("processes:4", 8, 4),
        ("processes:4", 2, 2),
        ("cpu:a2-l1", 8, 3),
        ("inline,env_threads=2", 8, 8),
    ):
        assert processes_to_load(atari(), Layout.parse(layout), cores) == expected


def shapes(batch: ArrayTuple) -> list[Any]:
    found: list[Any] = []

    def note(leaf: torch.Tensor) -> torch.Tensor:
        found.append((leaf.shape, leaf.dtype))
        return leaf

    batch.map(note)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "ppo-lag-1",
        "ppo-acting-batch-of-two-shards",
        "impala-lstm-lag-2",
        "tuple-dict-mask",
        "mujoco-normalized",
        "dqn-prioritized-frames",
        "hindsight",
        "r2d2-prioritized-frames",
        "sac-prioritized-lag-1",
        "td3",
        "mpc-lag-1",
    ],
)
def test_parts_have_the_shapes_of_training(name: str, tmp_path: Path) -> None:
    experiment = prepare(EXPERIMENTS[name](), Layout())
    algorithm = type(experiment.algorithm.build())
    trained: list[ArrayTuple] = []
    loss = algorithm.loss

    def spy(self: Any, model: Any, batch: ArrayTuple, hyper: dict[str, float]) -> Any:
        trained.append(batch)
        return loss(self, model, batch, hyper)

    replays = isinstance(experiment.algorithm, OffPolicyConfig)
    with mock.patch.object(algorithm, "loss", spy):
        train(experiment, options=options(tmp_path / "run"), stop_after=3 if replays else 1)
        used, trained[:] = shapes(trained[0]), []
        made = Calls(experiment, Layout(), 0)
        calls = made.calls
        assert set(calls) == {*parts_of(experiment), *parts.OVERHEAD}
        assert replays == ("sampling" in calls)
        for call, samples in calls.values():
            call()
            assert samples > 0
    assert [shapes(batch) for batch in trained] == [used]
    per_shard, steps = experiment.envs_per_shard, experiment.algorithm.rollout
    updates, _ = experiment.algorithm.gradient_steps(experiment.samples_per_iteration)
    acting = experiment.scheme.acting_batch or per_shard
    assert calls["env"][1] == calls["inference"][1] == acting
    per_step = per_shard * steps / updates
    assert calls["training"][1] == per_step
    assert calls["optimizer"][1] == calls["reduction"][1] == experiment.scheme.shards * per_step
    if replays:
        assert calls["inserting"][1] == per_shard * steps and calls["sampling"][1] == per_step
    made.close()


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Notes each call of a method."""
    calls, method = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append(name) or method(*args, **kwargs))
    return calls


@pytest.mark.parametrize("name", ["ppo-bf16", "dqn-prioritized-frames"])
def test_recorded_calls_are_what_is_measured_of_acting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = prepare(EXPERIMENTS[name](), Layout())
    made = Calls(experiment, Layout(), 0)
    inference, _ = made.calls["inference"]
    inference()
    forwards = counted(monkeypatch, type(Agent(experiment).model.for_acting()), "forward")
    inference()
    made.close()
    assert not forwards, "the model's modules do not act"


def test_compiled_functions_are_measured_where_they_act(monkeypatch: pytest.MonkeyPatch) -> None:
    base = EXPERIMENTS["cartpole-lag-1"]()
    env = dataclasses.replace(base.env, adapter="gymnasium")
    made = Calls(prepare(base.replace(precision="portable", env=env), Layout()), Layout(), 0)
    acted = counted(monkeypatch, CompiledPolicy, "act")
    made.calls["inference"][0]()
    made.close()
    assert acted


KERNELS = {
    "portable-minatar-ppo": PPOLearner,
    "portable-cartpole-a2c": LossLearner,
    "pqn": ValueLearner,
    "portable-minatar-dqn": QLearner,
    "der": ReturnsLearner,
    "drq-single": DrQLearner,
    "r2d2-prioritized-frames": SequenceLearner,
    "sac-prioritized-lag-1": SACLearner,
    "sac-discrete": DiscreteSACLearner,
    "td3": TD3Learner,
    "mpo": MPOLearner,
    "policies-lag-1": PoliciesLearner,
}
"""By name of an experiment: the learner that has its kernels."""


def with_kernels(name: str) -> Experiment:
    if name == "drq-single":
        return portable("drq").replace(**{"algorithm.copies": 1, "algorithm.target_copies": 1})
    return portable(name)


def test_every_learner_with_kernels_is_measured() -> None:
    assert set(KERNELS.values()) == set(LEARNERS.values())


@pytest.mark.parametrize("name", KERNELS)
def test_training_is_measured_by_the_kernels_of_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call computes the gradients of all slots, as a run's does, of the same items every time. Except with several
    policies, it also adds them up."""
    experiment = prepare(with_kernels(name), Layout())
    made = Calls(experiment, Layout(), 0)
    written: list[np.ndarray] = []
    kind = KERNELS[name]
    place = "_compute" if issubclass(kind, ReplayLearner) else "compute"
    compute = getattr(kind, place)

    def spy(self: Any, *args: Any, joined: bool) -> None:
        compute(self, *args, joined=joined)
        apart, (*before, _) = np.zeros_like(self._out), args
        compute(self, *before, apart, joined=False)
        assert joined == (kind is not PoliciesLearner) and len(self._slots) == experiment.scheme.shards
        tree = TreeSum(len(apart), Group())
        slots = dict(enumerate(map(torch.from_numpy, apart)))
        expected = tree.sum(slots) if joined else slots[0]
        size = self._parameters.size
        assert torch.equal(torch.from_numpy(args[-1][0, :size]), expected[:size]) and expected[:size].any()
        written.append(args[-1][0].copy())

    monkeypatch.setattr(kind, place, spy)
    updates, _ = experiment.algorithm.gradient_steps(experiment.samples_per_iteration)
    call, samples = made.calls["training"]
    call()
    call()
    made.close()
    assert samples == experiment.samples_per_iteration / updates
    assert len(written) == 2 and (written[0] == written[1]).all()


@pytest.mark.parametrize(("layout", "launches"), [("inline,device=0", 0), ("inline,device=0,graphs=1", 1)])
def test_acting_on_a_gpu_is_measured_with_its_copies_and_graphs(layout: str, launches: int) -> None:
    with simulated_gpu.simulated():
        made = Calls(prepare(EXPERIMENTS["ppo-bf16"](), Layout.parse(layout)), Layout.parse(layout), 0)
        inference, _ = made.calls["inference"]
        inference()
        before = simulated_gpu.counts()
        inference()
        spent = simulated_gpu.counts() - before
        made.close()
        assert (spent[LAUNCH], spent[BACK]) == (launches, 1)
        assert bool(spent[KERNEL]) == (not launches)


def test_a_measuring_process_that_fails_is_named_with_its_traceback() -> None:
    experiment = prepare(EXPERIMENTS["cartpole-8-shards"](), Layout())
    workers = parts.PartsWorkers(experiment, Layout(), cores=1)
    try:
        workers.ready()
        assert workers.measure("env", 0.01) > 0
        with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
            workers.measure("nothing", 0.01)
    finally:
        workers.close()
