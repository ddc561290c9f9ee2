"""Rollouts that are cut count as far as they got, and a run that cut some is repeated bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import cut, options, replaying
from workers import Ran, ran_of

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms import IMPALAConfig
from lockstep.algorithms.returns import gae, n_step_returns, vtrace
from lockstep.collectors.collectors import Collector, RolloutInfo
from lockstep.collectors.preemption import Counts, DistantPreemption, RecordedPreemption, SharedPreemption, preemption
from lockstep.config.layout import Layout
from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.core.schedule import Recorded, RolloutId
from lockstep.distributed.shared_memory import PrivateArena, SharedMemory
from lockstep.experiment import Experiment
from lockstep.launchers.launch import launch, resume, train
from lockstep.models.normalize import NormalizeConfig
from lockstep.models.rnd import RNDConfig
from lockstep.reproducibility.replay import replay
from lockstep.reproducibility.verify import verify
from lockstep.run import ledger
from lockstep.run.folder import RunFolder
from lockstep.run.ledger import LedgerError
from lockstep.scheme import Scheme
from lockstep.training.prepare import prepare
from lockstep.transport.rollouts import buffers_of

STEPS = 16

pytestmark = pytest.mark.usefixtures("processes_are_there_already", "own_folder")


def experiment(rollout: int = STEPS, iterations: int = 4, *, impala: bool = False, **scheme: Any) -> Experiment:
    """CartPole, four shards of two environments, with a core that remembers and everything normalized."""
    tiny = cut(
        recipes.ppo_cartpole,
        rollout=rollout,
        env={"adapter": "gymnasium"},
        model={"core": "lstm", "previous_action_reward": True},
        scheme={"preempt": 0.5, **scheme},
    )
    return tiny.replace(
        algorithm=IMPALAConfig(rollout=rollout, minibatches=2) if impala else tiny.algorithm,
        normalize=NormalizeConfig(observations=True, returns=True),
        total_steps=iterations * rollout * 8,
    )


# ------------------------------------------------------------------------------------------------------- rollouts


def collector(of: Experiment, cuts: dict[RolloutId, int] | None = None) -> tuple[Agent, Collector]:
    resolved = prepare(of, Layout())
    agent = Agent(resolved)
    (buffers,) = buffers_of(agent, range(4), resolved.schedule(), PrivateArena(), ahead=False)
    return agent, Collector(agent, buffers, preemption=None if cuts is None else RecordedPreemption(cuts))


def copied(rollout: Rollout) -> Rollout:
    return rollout.map(lambda leaf: leaf.clone())


def collected(
    of: Experiment, count: int, cuts: dict[RolloutId, int] | None
) -> list[list[tuple[RolloutInfo, Rollout, Any]]]:
    """By rollout and shard: each with the shard's state behind it."""
    agent, collecting = collector(of, cuts)
    version = agent.version(0)
    collecting.reset()
    found = []
    for lap in range(count):
        rollouts = collecting.collect(lap, lambda t: version)
        found.append([(each.info, copied(each.rollout), collecting.state(s)) for s, each in enumerate(rollouts)])
    collecting.close()
    return found


LENGTHS = (5, STEPS, 1, 9, STEPS - 1)
"""Of shard 0's rollouts. The others are never cut."""
CUTS = {RolloutId(0, number): length for number, length in enumerate(LENGTHS) if length < STEPS}


@pytest.mark.parametrize("acting_batch", [0, 8])
def test_a_cut_rollout_is_a_shorter_one(acting_batch: int) -> None:
    """Slowly: each of shard 0's rollouts again, by a collector whose rollouts have its length, from the state that the
    one before left."""
    of = experiment(acting_batch=acting_batch)
    cuts = collected(of, len(LENGTHS), CUTS)
    for number, length in enumerate(LENGTHS):
        agent, shorter = collector(experiment(length, acting_batch=acting_batch))
        if number:
            states = {shard: state for shard, (_, _, state) in enumerate(cuts[number - 1])}
            shorter.load(states, dict.fromkeys(states, number))
        else:
            shorter.reset()
        version = agent.version(0)
        only = shorter.collect(0, lambda t, version=version: version)[0]
        expected, whole, state = only.info, only.rollout, shorter.state(0)
        info, rollout, after = cuts[number][0]

        assert info.preempted_after == (length if length < STEPS else None)
        assert (info.number, info.episodes) == (number, expected.episodes)
        assert (info.moments == expected.moments).all()
        assert state.keys() == after.keys()
        assert all(torch.equal(state[name], after[name]) for name in state)
        for name in ("obs", "start", "value", "prev_action", "prev_reward"):
            assert torch.equal(getattr(rollout, name)[: length + 1], getattr(whole, name)), name
        for name in ("action", "reward", "terminated", "valid"):
            assert torch.equal(getattr(rollout, name)[:length], getattr(whole, name)), name
        assert torch.equal(rollout.core_state, whole.core_state)
        torch.testing.assert_close(rollout.log_prob[:length], whole.log_prob)
        if length < STEPS:
            assert torch.equal(rollout.truncated[: length - 1], whole.truncated[:-1])
            assert torch.equal(rollout.truncated[length - 1], whole.truncated[-1] | ~whole.terminated[-1])
            assert not rollout.valid[length:].any() and not rollout.reward[length:].any()
            assert (rollout.obs[length:] == rollout.obs[length]).all()

        ends, wanted = ((each.terminated, each.truncated) for each in (rollout, whole))
        for a, b in (
            (gae(rollout.reward, rollout.value, *ends, 0.9, 0.8), gae(whole.reward, whole.value, *wanted, 0.9, 0.8)),
            (
                (n_step_returns(rollout.reward, rollout.value, *ends, 0.9),),
                (n_step_returns(whole.reward, whole.value, *wanted, 0.9),),
            ),
            (
                vtrace(rollout.log_prob / 2, rollout.reward, rollout.value, *ends, 0.9),
                vtrace(whole.log_prob / 2, whole.reward, whole.value, *wanted, 0.9),
            ),
        ):
            for left, right in zip(a, b, strict=True):
                torch.testing.assert_close(left[:length][whole.valid], right[whole.valid])
        shorter.close()


def test_shards_beside_it_do_not_notice() -> None:
    of = experiment(acting_batch=8)
    for cut_ones, whole_ones in zip(collected(of, 5, CUTS), collected(of, 5, {}), strict=True):
        for (info, _, _), (expected, _, _) in zip(cut_ones[1:], whole_ones[1:], strict=True):
            assert (info.preempted_after, info.digests) == (None, expected.digests)
            assert (info.moments == expected.moments).all()


def test_advantages_of_a_cut_rollout_by_hand() -> None:
    """Two steps and two that were not made: the second is bootstrapped from the observation behind it."""
    reward, value = torch.tensor([[1.0], [2.0], [0.0], [0.0]]), torch.tensor([[0.5], [1.0], [3.0], [0.0], [0.0]])
    terminated, truncated = torch.zeros(4, 1, dtype=torch.bool), torch.tensor([[False], [True], [False], [False]])
    advantage, target = gae(reward, value, terminated, truncated, 0.5, 0.5)
    assert advantage[:2, 0].tolist() == [1.625, 2.5], "1 + 0.5 * 1 - 0.5 + 0.25 * 2.5, and 2 + 0.5 * 3 - 1"
    assert target[:2, 0].tolist() == [2.125, 3.5]


def test_the_truncation_is_needed() -> None:
    """Without it the last step's advantage would depend on what was not collected."""
    _, rollout, _ = collected(experiment(), 1, {RolloutId(0, 0): 5})[0][0]
    never = torch.zeros_like(rollout.truncated)
    right = gae(rollout.reward, rollout.value, rollout.terminated, rollout.truncated, 0.9, 0.8)[0]
    wrong = gae(rollout.reward, rollout.value, rollout.terminated, never, 0.9, 0.8)[0]
    assert not torch.allclose(right[:5], wrong[:5])


# ---------------------------------------------------------------------------------------------------------- layouts


def recorded(of: Experiment, cuts: list[list[tuple[int, int]]]) -> Recorded:
    schedule = of.schedule()
    return Recorded(schedule.lag, schedule.iterations, schedule.shards, schedule.by_shard, cuts=cuts)


BY_HAND = [[(0, 5), (1, 9)], [], [(1, 1), (3, 15)], [(2, 7)]]


@pytest.mark.parametrize(
    ("of", "layouts"),
    [
        (experiment(acting_batch=4), ("processes:2", "processes:3", "cpu:a2-l2")),
        (experiment(impala=True, lag=1), ("processes:4", "cpu:a3-l1", "cpu:a1-l2")),
    ],
    ids=["ppo", "impala-lag-1"],
)
def test_cuts_are_repeated_on_any_layout(of: Experiment, layouts: tuple[str, ...]) -> None:
    schedule = recorded(of, BY_HAND)
    alone = ran_of(launch(of, Layout(), options(Path("inline")), recorded=schedule))
    for layout in layouts:
        other = launch(of, Layout.parse(layout), options(Path(layout.replace(":", "-"))), recorded=schedule)
        assert ran_of(other) == alone, layout
    lines = ledger.read(alone.run / "ledger.jsonl")[1]
    assert [line["cuts"] for line in lines] == json.loads(json.dumps(BY_HAND))
    metrics = [json.loads(line) for line in RunFolder(alone.run).metrics.read_text().splitlines()]
    assert [line["lag/kept"] for line in metrics] == [46 / 64, 1.0, 48 / 64, 55 / 64]
    assert [line["samples"] for line in metrics] == [STEPS * 8 * (i + 1) for i in range(4)], "as if nothing were cut"
    fewer = launch(of, Layout(), options(Path("fewer")), recorded=recorded(of, [*BY_HAND[:3], []]))
    assert fewer.digest != alone.digest


def test_one_process_cuts_nothing_and_learns_what_it_does_without() -> None:
    with_it = train(experiment(), Layout(), options(Path("with")))
    without = train(experiment(preempt=1.0), Layout(), options(Path("without")))
    assert with_it.digest == without.digest
    assert [line["cuts"] for line in ledger.read("with/ledger.jsonl")[1]] == [[]] * 4
    assert "cuts" not in ledger.read("without/ledger.jsonl")[1][0]


def check_cuts(run: Ran) -> None:
    found = [line["cuts"] for line in ledger.read(run.run / "ledger.jsonl")[1]]
    assert any(found), "no rollout was cut"
    for cuts in found:
        assert len(cuts) <= 2 and all(0 < steps < STEPS for _, steps in cuts)
        assert len({shard // 2 for shard, _ in cuts}) <= 1, "the process that is done first is never cut"


@pytest.mark.parametrize(
    ("of", "layout", "other"),
    [
        (experiment(iterations=10, preempt=0.8), "processes:2,jitter=0.01", "cpu:a2-l1"),
        (experiment(iterations=10, impala=True, lag=1), "cpu:a2-l1,jitter=0.01", "processes:2"),
    ],
    ids=["together", "apart"],
)
def test_stragglers_are_cut_and_the_run_is_repeated(of: Experiment, layout: str, other: str) -> None:
    """From a checkpoint on, too."""
    train(of, Layout.parse(layout), options(Path("run")), stop_after=3)
    run = ran_of(resume("run", Layout.parse(layout), options(Path("run"))))
    check_cuts(run)
    for repetition in ("inline", other):
        name = repetition.replace(":", "-")
        found = replay(run.run, Layout.parse(repetition), options(Path(name)))
        assert found.ok, found.difference
        assert Ran(found.digest, RunFolder(found.run).ledger.read_bytes(), found.run) == run
    assert verify(run.run, Layout(), 2).ok


@pytest.mark.parametrize(
    "cuts",
    [[[9, 3]], [[1, 0]], [[1, STEPS]], [[1, 3], [0, 3]], [[1, 3], [1, 4]], [[s, 3] for s in range(4)]],
    ids=["shard", "nothing", "everything", "order", "twice", "all"],
)
def test_cuts_that_cannot_have_been_decided_are_refused(cuts: list[list[int]]) -> None:
    train(experiment(iterations=2), Layout(), options(Path("run")))
    head, lines = ledger.read("run/ledger.jsonl")
    shutil.copytree("run", "forged")
    Path("forged/ledger.jsonl").unlink()
    writer = ledger.Ledger.create("forged/ledger.jsonl", head)
    for line in lines:
        writer.append({**line, **({"cuts": cuts} if line["iteration"] == 1 else {})})
    writer.close()
    with pytest.raises(LedgerError, match=r"iteration 1: cuts"):
        replay("forged", Layout(), options(Path("refused")))


# --------------------------------------------------------------------------------------------------------- the rule


def test_a_shard_is_cut_once_enough_others_have_collected_as_many() -> None:
    memory, scheme = SharedMemory(), Scheme(shards=8, preempt=0.8)
    one, other = SharedPreemption(memory, scheme, 1), SharedPreemption(memory, scheme, 1)
    assert scheme.enough(1) == 6, "80% of 7"
    for shard in range(6):
        assert not other.preempts(RolloutId(7, 0), 1)
        one.collected(RolloutId(shard, 0))
    assert other.preempts(RolloutId(7, 0), 1) and one.preempts(RolloutId(6, 0), 9)
    assert not other.preempts(RolloutId(7, 1), 1), "of the next rollout nobody has anything"
    other.collected(RolloutId(7, 3))
    assert not one.preempts(RolloutId(0, 2), 1)
    memory.close()


def test_another_process_says_who_is_late() -> None:
    """By the same rule; a thread stands for its answer."""
    counts, scheme = Counts(4), Scheme(shards=4, preempt=0.6)
    with ThreadPoolExecutor() as threads:
        asked: list[Future[None]] = []

        class Distant:
            collected = counts.collected

            def late(self, rollout_id: RolloutId, enough: int) -> Future[None]:
                asked.append(threads.submit(counts.late, rollout_id, enough))
                return asked[-1]

        fast, slow = (DistantPreemption(Distant(), scheme, 2) for _ in range(2))
        assert scheme.enough(2) == 2
        assert not slow.preempts(RolloutId(2, 0), 1) and not slow.preempts(RolloutId(3, 0), 1)
        fast.collected(RolloutId(0, 0))
        assert not slow.preempts(RolloutId(2, 0), 2)
        fast.collected(RolloutId(1, 0))
        (answer,) = asked  # one for both shards and all steps
        answer.result(60)
        assert slow.preempts(RolloutId(2, 0), 3) and slow.preempts(RolloutId(3, 0), 3)
        assert not slow.preempts(RolloutId(2, 1), 1), "of the next rollout nobody has anything"
        slow.collected(RolloutId(2, 1))
        asked[1].result(60)  # a rollout that was not late ends the question, too


@pytest.mark.parametrize(
    ("shards", "own", "share", "enough"),
    [(2, 1, 0.8, 1), (4, 1, 0.8, 3), (4, 1, 0.6, 2), (16, 1, 0.8, 12), (4, 2, 0.8, 2), (8, 2, 0.8, 5), (4, 2, 0.5, 1)],
)
def test_enough_is_a_share_of_what_others_collect(shards: int, own: int, share: float, enough: int) -> None:
    assert Scheme(shards=shards, preempt=share).enough(own) == enough <= shards - own


def test_who_decides() -> None:
    scheme = Scheme(preempt=0.5)
    memory = SharedMemory()
    assert preemption(Scheme(), None, memory, 2) is None and preemption(scheme, None, None, 4) is None
    assert preemption(scheme, None, memory, 4) is None, "nobody is faster"
    assert isinstance(preemption(scheme, None, memory, 2), SharedPreemption)
    assert preemption(scheme, recorded(experiment(), BY_HAND), memory, 2) == RecordedPreemption(
        {RolloutId(0, 0): 5, RolloutId(1, 0): 9, RolloutId(1, 2): 1, RolloutId(3, 2): 15, RolloutId(2, 3): 7}
    )
    memory.close()


def test_an_experiment_that_waits_for_all_is_the_one_it_was() -> None:
    assert "preempt" not in to_json(Scheme()) and to_json(Scheme(preempt=0.8))["preempt"] == 0.8
    assert Scheme(preempt=0.8).timing_decides and not Scheme().timing_decides


@pytest.mark.parametrize(
    ("of", "layout", "text"),
    [
        (experiment(preempt=0.0), "inline", "scheme.preempt=0.0 must be above 0"),
        (experiment(preempt=1.5), "inline", "at most 1"),
        (experiment(lag="async"), "cpu:a1-l1", "scheme.lag=async and scheme.shards=4 it waits for none"),
        (experiment(shards=1), "inline", "2 or more shards"),
        (experiment(), "torchrun", "Use --layout processes:N, cpu:aC-lL, ray:N or ray:aC-lL"),
        (replaying(recipes.dqn_cartpole, replay={}, scheme={"preempt": 0.5}), "inline", "replay needs whole ones"),
        (recipes.mpc_pendulum().replace(scheme=Scheme(preempt=0.5)), "inline", "replay needs whole ones"),
    ],
)
def test_what_does_not_go_with_it(of: Experiment, layout: str, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        prepare(of, Layout.parse(layout))


def test_curiosity_does_not_go_with_it() -> None:
    of = experiment()
    with pytest.raises(SettingsError, match=r"algorithm.rnd.coef=0.5 rewards every step"):
        prepare(of.replace(algorithm=dataclasses.replace(of.algorithm, rnd=RNDConfig(coef=0.5))), Layout())
