"""Delayed and asynchronous gradients: against numbers computed by hand, and repeated from the record."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from children import Child
from free_running import check_updates, forge, free, remembering, updates, with_async
from hypothesis import given
from hypothesis import strategies as st
from tiny import EXPERIMENTS, cut, options, replaying
from torch import Tensor, nn
from workers import Ran, ran_of

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms import PPOConfig
from lockstep.algorithms.base import LossOutput, ParameterGroup
from lockstep.buffers.batches import Slice
from lockstep.config.layout import Layout
from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError
from lockstep.core.digests import state_digest
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import SharedMemory
from lockstep.distributed.tree import TreeSum
from lockstep.experiment import Experiment
from lockstep.launchers.launch import resume, train
from lockstep.learners import parameter_store
from lockstep.learners.asynchronous import AsyncLearner
from lockstep.learners.learner import Learner
from lockstep.learners.optimizer import Optimizer, optimizer_for
from lockstep.learners.parameter_store import ParameterStore, StoredParameters
from lockstep.learners.shared_parameters import SharedParameters, in_time
from lockstep.learners.steps import Applied, Computed
from lockstep.models.parameters import FlatParameters
from lockstep.reproducibility.replay import replay
from lockstep.reproducibility.verify import verify
from lockstep.run import checkpoint
from lockstep.run.folder import RunFolder
from lockstep.run.ledger import LedgerError
from lockstep.scheme import Scheme

INLINE = Layout()

pytestmark = pytest.mark.usefixtures("processes_are_there_already", "own_folder")


# ------------------------------------------------------------------------------------- on a model of one number


class Goal(NamedTuple):
    """A batch: slot s pulls the number towards goal s."""

    goal: float
    valid: Tensor


class Pull:
    """The loss (w - goal)² / 2, whose gradient is w - goal."""

    metric_names = ("error",)
    mean_loss, weighted, has_target, counted = True, False, False, ()
    annealings = MappingProxyType[str, Any]({})

    def __init__(self, steps: int, goals: list[float], stop_below: float = -1.0) -> None:
        self._steps, self._goals, self._stop_below = steps, goals, stop_below

    def batches(self, agent: Any, slots: range, tree: TreeSum) -> Any:
        one = torch.ones(1, 1)
        return SimpleNamespace(
            begin=lambda iteration, filled, hyper: self._steps,
            slice=lambda slot, step: Slice(Goal(self._goals[slot], one), NEVER),
            learned=lambda slot, priorities: None,
        )

    def loss(self, model: Any, batch: Goal, hyper: dict[str, float]) -> LossOutput:
        error = model.w - batch.goal
        return LossOutput(0.5 * error.square().sum(), {"error": error.detach().abs().sum()})

    def hyperparameters(self, progress: float) -> dict[str, float]:
        return {"learning_rate": 0.5}

    def updates_before(self, iteration: int, samples_per_iteration: int) -> int:
        return iteration * self._steps

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        return (ParameterGroup("", hyper["learning_rate"] * (2 if updates == 3 else 1)),)

    reads_steps = True

    def adapt(self, hyper: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        return {}

    def stop_early(self, metrics: dict[str, float]) -> bool:
        return metrics["error"] < self._stop_below

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics


NEVER: Any = SimpleNamespace(apply=lambda model: None)


class Toy:
    """A learner that learns w, which begins as 1, by gradient descent; remembers what w was after each update."""

    def __init__(self, kind: Callable[..., Learner], algorithm: Pull, slots: int = 1, **scheme: Any) -> None:
        model: Any = nn.Module()
        model.portable_operations = False
        model.w = nn.Parameter(torch.ones(1))
        flat = FlatParameters(model, 2)
        plain = recipes.ppo_cartpole()
        experiment: Any = SimpleNamespace(
            precision="fp32",
            scheme=Scheme(shards=slots, **scheme),
            algorithm=plain.algorithm,
            model=plain.model,
            iterations=10,
            samples_per_iteration=1,
        )
        agent: Any = SimpleNamespace(
            experiment=experiment,
            algorithm=algorithm,
            flat=flat,
            model=model,
            networks=model,
            target=None,
            device=torch.device("cpu"),
            follow=lambda updates: self.followed.append(updates),
            sees_gradients=False,
            vectors=[flat.vector.detach()],
            round=lambda: None,
        )
        self.learner, self.flat = kind(agent, range(slots), TreeSum(slots, Group())), flat
        self.learner.optimizer.step = self._step  # type: ignore[method-assign]
        self.seen: list[float] = []
        self.followed: list[int] = []

    def _step(self, gradient: Tensor, groups: tuple[ParameterGroup, ...]) -> float:
        vector = self.flat.vector.detach()
        vector -= groups[0].learning_rate * gradient
        self.seen.append(float(vector[0]))
        return float(gradient.norm())


def test_a_gradient_is_applied_steps_later() -> None:
    """w - 0 is the gradient; the third is applied with twice the rate, as said when it was computed."""
    toy = Toy(Learner, Pull(3, [0.0]), gradient_lag=1)
    first = toy.learner.learn(0, {})
    # g1 = 1 | g2 = 1, w = 1 - g1/2 | g3 = 1/2, w = 1/2 - g2/2
    assert toy.seen == [0.5, 0.0] and toy.followed == [1, 2]
    assert first.updates == 3 and first.applied == {0: Applied(None, 0), 1: Applied(None, 1), 2: Applied(None, 1)}
    assert first.metrics["gradient_norm"] == 1.0 and first.metrics["error"] == pytest.approx(2.5 / 3)
    second = toy.learner.learn(1, {})
    # g4 = 0, w = 0 - g3 | g5 = -1/2, w = -1/2 - g4/2 | g6 = -1/2, w = -1/2 - g5/2
    assert toy.seen[2:] == [-0.5, -0.5, -0.25] and toy.followed == [1, 2, 3, 4, 5]
    assert [second.applied[place].behind for place in range(3)] == [1, 1, 1]
    assert second.metrics["gradient_norm"] == pytest.approx((0.5 + 0.0 + 0.5) / 3)


def test_gradients_of_a_larger_lag() -> None:
    """In iterations of one step, so that the first two change nothing."""
    toy = Toy(Learner, Pull(1, [0.0]), gradient_lag=2)
    for iteration in range(5):
        report = toy.learner.learn(iteration, {})
        assert ("gradient_norm" in report.metrics) == (iteration >= 2)
        assert report.applied[0].behind == min(iteration, 2)
    # All of the first three are 1, and the third is applied with twice the rate.
    assert toy.seen == [0.5, 0.0, -1.0]


def test_steps_behind_one_that_stops_are_left_out() -> None:
    """The error is a mean over both slots: 1, then 1/2."""
    toy = Toy(Learner, Pull(3, [0.0, 0.0], stop_below=0.6), slots=2)
    report = toy.learner.learn(0, {})
    assert toy.seen == [0.5, 0.25] and report.updates == len(report.applied) == 2
    assert report.metrics["error"] == pytest.approx(0.75)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", [Learner, AsyncLearner])
def test_a_loss_that_changes_a_buffer_for_later_losses_is_refused(kind: type[Learner], in_place: bool) -> None:
    class Counting(Pull):
        def loss(self, model: Any, batch: Goal, hyper: dict[str, float]) -> LossOutput:
            model.seen = model.seen.add_(1) if in_place else model.seen + 1
            return super().loss(model, batch, hyper)

    def counting(*, persistent: bool) -> Learner:
        toy = Toy(kind, Counting(1, [0.0]), gradient_lag="async" if kind is AsyncLearner else 0)
        toy.learner._agent.model.register_buffer("seen", torch.zeros(1), persistent=persistent)
        return toy.learner

    counting(persistent=False).learn(0, {})
    with pytest.raises(SettingsError, match=r"Counting\.loss changed the model's buffer seen\. .* persistent=False"):
        counting(persistent=True).learn(0, {})


@pytest.mark.parametrize(("kind", "lag"), [(Learner, 1), (AsyncLearner, "async")])
def test_hyperparameters_that_adapt_need_gradients_without_a_lag(kind: type[Learner], lag: Any) -> None:
    algorithm = Pull(3, [0.0])
    algorithm.adapt = lambda hyper, metrics: {"learning_rate": 0.1}  # type: ignore[method-assign]
    with pytest.raises(SettingsError, match=rf"Pull\.adapt changes learning_rate .* scheme\.gradient_lag={lag} "):
        Toy(kind, algorithm, gradient_lag=lag).learner.learn(0, {})
    Toy(Learner, algorithm).learner.learn(0, {})


def test_each_slot_has_an_update_of_its_own() -> None:
    """Goals 0 and 1: w goes half of the way to each in turn."""
    toy = Toy(AsyncLearner, Pull(2, [0.0, 1.0]), slots=2, gradient_lag="async")
    report = toy.learner.learn(0, {})
    assert toy.seen == [0.5, 0.75, 0.375, 0.6875] and toy.followed == [1, 2, 3, 4]
    assert report.updates == 4 and [report.applied[place] for place in range(4)] == [(0, 0), (1, 0), (0, 0), (1, 0)]
    assert report.metrics["error"] == pytest.approx((1 + 0.5 + 0.75 + 0.625) / 4)
    assert report.metrics["gradient_norm"] == pytest.approx((1 + 0.5 + 0.75 + 0.625) / 4)
    toy.learner.learn(1, {})
    # Each slot's third gradient, the first of this iteration, has twice the rate: it takes w to the goal.
    assert toy.seen[4:6] == [0.0, 1.0] and toy.followed[4:] == [5, 6, 7, 8]


def test_a_record_is_repeated_with_the_parameters_of_then() -> None:
    decided = [(0, 0), (1, 1), (0, 0), (1, 1)], [(1, 0), (1, 0), (0, 2), (0, 0)]
    kind = functools.partial(AsyncLearner, recorded=decided)
    toy = Toy(kind, Pull(2, [0.0, 1.0]), slots=2, gradient_lag="async", max_gradient_lag=2)
    report = toy.learner.learn(0, {})
    # Slot 1 computes 0 with w = 1, which has become 1/2; at the end -1/2 with w = 1/2, which has become 1/4.
    assert toy.seen == [0.5, 0.5, 0.25, 0.5]
    assert [tuple(report.applied[place]) for place in range(4)] == decided[0]
    toy.learner.learn(1, {})
    # 1/2 to 1, where it stays; slot 0 computed 1/2 before that, applied with twice the rate; then w = 1/2.
    assert toy.seen[4:] == [1.0, 1.0, 0.5, 0.25]


def test_a_slot_stops_by_itself() -> None:
    toy = Toy(AsyncLearner, Pull(3, [0.0, 0.5], stop_below=0.1), slots=2, gradient_lag="async")
    report = toy.learner.learn(0, {})
    # Slot 1 sees an error of 0 at once, as slot 0 has brought w to its goal; slot 0 goes on.
    assert [report.applied[place].slot for place in range(report.updates)] == [0, 1, 0, 0]


# ----------------------------------------------------------------------------------------------------- the bound


@given(learners=st.integers(1, 6), bound=st.integers(0, 7), seed=st.integers(0, 10_000))
def test_the_bound_holds_and_somebody_may_always_go_on(learners: int, bound: int, seed: int) -> None:
    """Learners in any order, of which each computes eight gradients."""
    draw, count, left = random.Random(seed), 0, dict.fromkeys(range(learners), 8)
    bases: dict[int, int] = {}
    while left:
        may = []
        for learner in left:
            others = [base for other, base in bases.items() if other != learner]
            if in_time(count + 1, others, bound) if learner in bases else in_time(count, [*others, count], bound):
                may.append(learner)
        assert may, "nobody may go on"
        learner = draw.choice(may)
        if learner not in bases:
            bases[learner] = count
            assert len(bases) <= bound + 1
            continue
        assert count - bases.pop(learner) <= bound
        count += 1
        left[learner] -= 1
        if not left[learner]:
            del left[learner]
    assert count == 8 * learners


@pytest.mark.parametrize(
    ("count", "bases", "bound", "fine"),
    [
        *((5, [], 0, True), (5, [5], 0, True), (5, [4], 0, False), (5, [5, 5], 0, False), (5, [4, 4, 5], 2, True)),
        *((5, [3, 4], 2, True), (5, [3, 3], 2, False), (6, [3], 2, False), (5, [4, 3, 3], 3, True)),
    ],
)
def test_gradients_are_in_time_if_they_are_in_order(count: int, bases: list[int], bound: int, fine: bool) -> None:
    assert in_time(count, bases, bound) is fine


# ------------------------------------------------------------------------------------------------- shared memory


def one_number(name: str) -> tuple[Optimizer, Tensor]:
    """A model of one number, 1, and what changes it."""
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(1))
    flat = FlatParameters(model)
    experiment = recipes.ppo_cartpole().replace(**{"algorithm.optimizer.name": name})
    return Optimizer(experiment, flat), flat.vector.detach()


def pull() -> Computed:
    return Computed(torch.ones(16), 0, 1, (ParameterGroup("", 0.25),))


@pytest.mark.parametrize("name", ["adam", "rmsprop_tf"])
@pytest.mark.parametrize("device", ["cpu", "elsewhere"])
def test_learners_see_each_others_updates(device: str, name: str) -> None:
    """Two in one process, by turns. On a CPU the optimizer's state is in the shared memory; elsewhere it is copied. The
    statistics of rmsprop_tf begin with 1."""
    memory = SharedMemory()

    def learner(rank: int) -> tuple[SharedParameters, Optimizer, Tensor]:
        optimizer, vector = one_number(name)
        agent: Any = SimpleNamespace(
            vectors=[vector],
            device=SimpleNamespace(type=device),
            round=lambda: None,
            follow=lambda updates: None,
            sees_gradients=False,
            algorithm=SimpleNamespace(updates_before=lambda *_: 0),
            experiment=recipes.ppo_cartpole(),
        )
        group: Any = SimpleNamespace(rank=rank, size=2, shared=memory, waited=0.0, barrier=lambda: None)
        return SharedParameters(agent, optimizer, group, bound=1), optimizer, vector

    (a, rule_a, w_a), (b, rule_b, w_b) = learner(0), learner(1)
    a.open()
    b.open()
    a.read(0)
    b.read(0)
    assert a.change(pull())[:2] == (0, 0)
    assert w_a[0] != 1 and w_b[0] == 1
    assert b.change(pull())[:2] == (1, 1)
    a.read(0)
    assert torch.equal(w_a, w_b)
    assert a.change(pull())[:2] == (2, 0)
    a.close()
    b.close()
    optimizer, w = one_number(name)
    for _ in range(3):
        optimizer.step(pull().gradient, pull().groups)
    for mine, of in ((w_a, rule_a), (w_b, rule_b)):
        assert torch.equal(mine, w)
        assert {name: x.tolist() for name, x in of.state().items()} == {
            n: x.tolist() for n, x in optimizer.state().items()
        }
    a.open()
    b.open()
    b.read(0)
    assert b.change(pull())[:2] == (0, 0), "counted within the iteration"
    memory.close()


def test_learners_of_several_machines_see_each_others_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in one process, by turns, as above; what learner 0's optimizer remembers is the store's. Each update takes a
    second, in learner 0's process."""
    experiment = ppo(scheme={"max_gradient_lag": 1})
    store = ParameterStore(bound=1)
    apply, now, groups = parameter_store.apply, [0.0], list[Any]()

    def slowly(*arguments: Any) -> float:
        now[0] += 1.0
        return apply(*arguments)

    monkeypatch.setattr(parameter_store, "apply", slowly)
    monkeypatch.setattr(parameter_store, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    shown: Any = SimpleNamespace(read=store.read, newest=store.newest, change=store.change)

    def learner(rank: int) -> tuple[StoredParameters, Optimizer, Agent]:
        agent = Agent(experiment)
        optimizer = optimizer_for(experiment, agent.flat)
        groups.append(SimpleNamespace(rank=rank, waited=0.0))
        return StoredParameters(agent, optimizer, groups[rank], shown if rank else store), optimizer, agent

    (a, rule, of_a), (b, _, of_b) = learner(0), learner(1)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(of_a.flat.vector.shape, generator=generator) for _ in range(3)]
    computed = [Computed(gradient, 0, 1, (ParameterGroup("", 0.25),)) for gradient in gradients]
    a.open()
    b.open()
    a.read(0)
    b.read(0)
    assert a.change(computed[0])[:2] == (0, 0)
    assert b.change(computed[1])[:2] == (1, 1)
    b.read(0)
    assert b.change(computed[2])[:2] == (2, 0)
    assert [group.waited for group in groups] == [0.0, 2.0], "learner 0 worked"
    a.close()
    b.close()
    alone = Agent(experiment)
    optimizer = optimizer_for(experiment, alone.flat)
    for each in gradients:
        optimizer.step(each.clone(), computed[0].groups)
    assert torch.equal(of_a.flat.vector, alone.flat.vector) and torch.equal(of_b.flat.vector, alone.flat.vector)
    assert rule.state().keys() == optimizer.state().keys()
    assert all(torch.equal(mine, optimizer.state()[name]) for name, mine in rule.state().items())
    a.open()
    a.read(0)
    assert a.change(computed[0])[:2] == (0, 0), "counted within the iteration"


# ------------------------------------------------------------------------------------------------ runs and records


def ppo(iterations: int = 4, **changes: Any) -> Experiment:
    """CartPole with four shards of two environments, and four gradient steps an iteration."""
    tiny = with_async(cut(recipes.ppo_cartpole, env={"adapter": "gymnasium"}, **changes))
    return tiny.replace(total_steps=iterations * 8 * 8)


def stopping() -> Experiment:
    """Large steps, so that some slots stop before others."""
    experiment = ppo(6)
    assert isinstance(experiment.algorithm, PPOConfig)
    return experiment.replace(
        algorithm=dataclasses.replace(experiment.algorithm, target_kl=0.02, learning_rate=0.02, epochs=4)
    )


RUNS: dict[str, tuple[Callable[[], Experiment], str]] = {
    "ppo": (lambda: ppo(scheme={"lag": 1}), "processes:2,jitter=0.003"),
    "ppo-stops": (stopping, "processes:2,jitter=0.003"),
    "ppo-bf16-atari": (
        lambda: with_async(cut(recipes.ppo_atari, env={"num_envs": 4}, precision="bf16")),
        "processes:2,jitter=0.001",
    ),
    "impala-async": (lambda: with_async(free(lstm=True, normalize=True)), "cpu:a2-l2,jitter=0.003"),
    "dqn-prioritized-async": (lambda: with_async(remembering()), "cpu:a1-l2,jitter=0.003"),
    "sac": (lambda: with_async(replaying(recipes.sac_mujoco, replay={})), "processes:2,jitter=0.003"),
    "td3-bound-1": (
        lambda: with_async(replaying(recipes.td3_mujoco, replay={}), max_gradient_lag=1),
        "processes:4,jitter=0.003",
    ),
    "ppo-in-turn": (
        lambda: ppo().replace(scheme=Scheme(gradient_lag="async", max_gradient_lag=0)),
        "processes:3,jitter=0.002",
    ),
    "inline": (ppo, "inline"),
}
"""Each with the layout that it ran on."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Runs with asynchronous gradients, to be read only."""
    folder = tmp_path_factory.mktemp("async")

    @functools.cache
    def ran(name: str) -> Ran:
        make, layout = RUNS[name]
        return ran_of(train(make(), Layout.parse(layout), options(folder / name, checkpoint_every=2)))

    return ran


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == "ppo-bf16-atari" else ()) for name in RUNS]
)
def test_a_run_is_repeated(name: str, recorded: Callable[[str], Ran]) -> None:
    run, experiment = recorded(name), RUNS[name][0]()
    decided = updates(run.run)
    check_updates(experiment, decided, all_steps=name != "ppo-stops")
    most = max(behind for _, behind in itertools.chain(*decided))
    assert (most == 0) == (name in ("ppo-in-turn", "inline"))
    if name == "ppo-stops":
        assert any(len({slot for slot, _ in each}) == 4 and len(each) < 4 * 8 for each in decided)
    found = replay(run.run, INLINE, options(Path("again")))
    assert found.ok, found.difference
    assert Ran(found.digest, RunFolder(found.run).ledger.read_bytes(), found.run) == run


def test_a_record_is_repeated_beside_collectors_and_verified(recorded: Callable[[str], Ran]) -> None:
    run = recorded("impala-async")
    found = replay(run.run, Layout.parse("cpu:a2-l1"), options(Path("split")))
    assert found.ok and found.digest == run.digest
    verdict = verify(recorded("sac").run, INLINE, "all")
    assert verdict.ok, verdict.message


def test_metrics_say_how_stale_gradients_were(recorded: Callable[[str], Ran]) -> None:
    for name in ("ppo", "td3-bound-1", "inline"):
        run, experiment = recorded(name).run, RUNS[name][0]()
        lines = [json.loads(line) for line in RunFolder(run).metrics.read_text().splitlines()]
        total = 0
        for line, decided in zip(lines, updates(run), strict=True):
            behind, total = [each for _, each in decided], total + len(decided)
            assert line["updates"] == total
            if not behind:
                assert not [metric for metric in line if metric.startswith("lag/gradient_a")]
                continue
            assert line["lag/gradient_asynchrony"] == pytest.approx(sum(behind) / len(behind))
            assert line["lag/gradient_asynchrony_max"] == max(behind)
            shares = [line[f"lag/gradient_share_{n}_behind"] for n in range(experiment.scheme.max_gradient_lag + 1)]
            assert shares == [pytest.approx(behind.count(n) / len(behind)) for n in range(len(shares))]
    synchronous = train(EXPERIMENTS["ppo-lag-1"](), options=options(Path("synchronous")))
    lines = [json.loads(line) for line in RunFolder(synchronous.run).metrics.read_text().splitlines()]
    assert [line["lag/gradient_asynchrony"] for line in lines] == [0.0] * len(lines)
    assert "lag/gradient_asynchrony_max" not in lines[0]


def test_a_resumed_run_is_repeated_as_a_whole() -> None:
    """With an optimizer whose statistics begin with 1."""
    experiment = ppo(6).replace(**{"algorithm.optimizer.name": "rmsprop_tf"})
    first = train(experiment, Layout.parse("processes:2"), options(Path("run")), stop_after=2)
    saved, _ = checkpoint.open_checkpoint(checkpoint.latest("run/checkpoints")).part("learner")
    assert float(saved["optimizer.step"]) == len([*itertools.chain(*updates(first.run))]) == 2 * 16
    resume("run", Layout.parse("cpu:a1-l2,jitter=0.002"), stop_after=4)
    run = ran_of(resume("run", Layout.parse("processes:3,jitter=0.002")))
    found = replay(run.run, INLINE, options(Path("again")))
    assert found.ok and found.digest == run.digest and found.iterations == 6


def test_in_flight_gradients_are_part_of_the_digest_and_verified() -> None:
    experiment = EXPERIMENTS["cartpole-gradient-lag-3"]()
    result = train(experiment, options=options(Path("run")))
    saved, _ = checkpoint.open_checkpoint(checkpoint.latest("run/checkpoints")).part("learner")
    steps = [saved[f"in_flight.{place}.of"].tolist() for place in range(3)]
    assert steps == [[2, 2], [2, 3], [2, 4]] and "in_flight.3.of" not in saved
    covered = {name: x for name, x in saved.items() if not name.startswith("version.")}
    assert state_digest(covered) == result.digest
    assert verify("run", Layout.parse("processes:2"), "all").ok


# --------------------------------------------------------------------------------------------- what is refused


def test_what_cannot_have_been_decided_is_refused(recorded: Callable[[str], Ran]) -> None:
    run = recorded("ppo").run
    decided = [list(each) for each in updates(run)[1]]
    for forged in (
        [[9, 0], *decided[1:]],
        [[decided[0][0], 1], *decided[1:]],
        [[decided[0][0], -1], *decided[1:]],
        [*decided, decided[-1]],
        [each for each in decided if each[0] != 2],
        [*decided[:12], [decided[12][0], 9], *decided[13:]],
        [],
    ):
        with pytest.raises(LedgerError, match=r"impossible decision in iteration 1\b"):
            replay(forge(run, 1, updates=forged), INLINE, options(Path("refused")))
    assert not Path("refused").exists()


@pytest.mark.parametrize("changed", [[(1, 0), (0, 0)], [(0, 0), (1, 1)]])
def test_another_order_is_found(changed: list[tuple[int, int]], recorded: Callable[[str], Ran]) -> None:
    """Inline they were (0, 0), (1, 0)."""
    run = recorded("inline").run
    decided = [*changed, *updates(run)[1][2:]]
    found = replay(forge(run, 1, updates=decided), INLINE, options(Path("changed")))
    assert not found.ok and found.difference is not None and found.difference.iteration == 1
    assert found.difference.where.startswith(("gradient in", "gradient of", "parameter "))


def test_what_cannot_be_asynchronous_is_refused(recorded: Callable[[str], Ran]) -> None:
    with pytest.raises(SettingsError, match=r"--scheme.gradient-lag async with --layout torchrun.*processes:N"):
        train(ppo(), Layout.parse("torchrun"), options(Path("refused")))
    for layout in ("processes:2", "cpu:a1-l2"):
        with pytest.raises(SettingsError, match=rf"--layout {layout} .* asynchronous gradients.*aC-l1"):
            replay(recorded("inline").run, Layout.parse(layout), options(Path("refused")))
    assert not Path("refused").exists()
    for scheme, message in (
        (Scheme(gradient_lag=-1), r"scheme.gradient_lag=-1 must be 0"),
        (Scheme(gradient_lag="async", max_gradient_lag=-1), r"scheme.max_gradient_lag=-1 must be at least 0"),
        (
            Scheme(gradient_lag=1, max_gradient_lag=2),
            r"scheme.max_gradient_lag=2 only applies with --scheme.gradient-lag async",
        ),
    ):
        with pytest.raises(SettingsError, match=message):
            scheme.validate()


def test_settings_that_came_later_change_no_experiment() -> None:
    plain = recipes.ppo_cartpole()
    written = to_json(plain)
    assert not {"gradient_lag", "max_gradient_lag"} & set(written["scheme"])
    assert from_json(written) == plain
    other = plain.replace(scheme=dataclasses.replace(plain.scheme, gradient_lag=1))
    assert from_json(to_json(other)) == other and other.identity() != plain.identity()


# ------------------------------------------------------------------------------------------------------ death

LOCKED = """
import dataclasses, os, time
from pathlib import Path
from lockstep import recipes
from lockstep.algorithms import PPOConfig
from lockstep.algorithms.ppo import PPO

PLACE = Path(__file__).parent

class Slow(PPO):
    def groups(self, updates, hyper):
        return Groups(super().groups(updates, hyper)) if updates == 3 else super().groups(updates, hyper)

class Groups(tuple):
    def __iter__(self):
        "Is called while the parameters are changed."
        if not (PLACE / "locked").exists():
            (PLACE / "writing").write_text(str(os.getpid()))
            (PLACE / "writing").rename(PLACE / "locked")
            time.sleep(1000)
        return super().__iter__()

@dataclasses.dataclass(frozen=True)
class SlowConfig(PPOConfig):
    def build(self):
        return Slow(self)

def recipe():
    full = recipes.ppo_cartpole()
    settings = {f.name: getattr(full.algorithm, f.name) for f in dataclasses.fields(full.algorithm)}
    return full.replace(algorithm=SlowConfig(**settings))
"""


def test_a_learner_that_dies_with_the_lock_ends_the_run(start: Callable[..., Child]) -> None:
    Path("slow.py").write_text(LOCKED)
    child = start(
        *("train", "slow.py:recipe", "--env.adapter", "gymnasium", "--scheme.gradient-lag", "async", "--run", "run"),
        *("--layout", "processes:2", "--display", "plain", "--no-tensorboard"),
    )
    child.until(Path("locked").exists, "the lock to be held")
    time.sleep(0.2)  # the other one waits for it by then
    os.kill(int(Path("locked").read_text()), signal.SIGKILL)
    assert child.wait() == 1
    assert re.search(r"Worker \d of 2 .*SIGKILL", child.output()), child.output()
