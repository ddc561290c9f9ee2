"""Experiments in which timing decides, and forged records of what it decided."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from tiny import cut, options, replaying
from workers import Ran

from lockstep import recipes
from lockstep.algorithms import APPOConfig, DQNConfig, IMPALAConfig
from lockstep.experiment import Experiment
from lockstep.models.normalize import NormalizeConfig
from lockstep.reproducibility.replay import replay
from lockstep.run import ledger
from lockstep.run.folder import RunFolder


def free(
    iterations: int = 6, *, lstm: bool = False, normalize: bool = False, appo: bool = False, **scheme: Any
) -> Experiment:
    """CartPole, with four shards of two environments and rollouts of eight steps."""
    tiny = cut(
        recipes.ppo_cartpole,
        env={"adapter": "gymnasium"},
        model={"core": "lstm" if lstm else "none"},
        scheme={"lag": "async", "max_lag": 2, **scheme},
    )
    return tiny.replace(
        algorithm=APPOConfig(rollout=8, epochs=2, minibatches=2) if appo else IMPALAConfig(rollout=8, minibatches=2),
        normalize=NormalizeConfig(observations=normalize, returns=normalize),
        total_steps=iterations * 8 * 8,
    )


def remembering(iterations: int = 8, *, r2d2: bool = False, updates: int = 3, **scheme: Any) -> Experiment:
    """CartPole or the memory task, with four shards of one environment; the first iteration only collects."""
    lag = {"lag": "async", "max_lag": 2, **scheme}
    if r2d2:
        memory, lengths = {"capacity": 4 * 24, "slack": 1.0}, {"burn_in": 2, "unroll": 4}
        tiny = replaying(recipes.r2d2_memory, replay=memory, algorithm=lengths, scheme=lag)
    else:
        tiny = replaying(recipes.dqn_cartpole, replay={"prioritized": True, "slack": 1.0}, scheme=lag)
    assert isinstance(tiny.algorithm, DQNConfig)
    greedy = {"epsilon_start": 0.0, "epsilon_end": 0.0, "learning_rate": 0.02}  # so that the version that acts matters
    algorithm = dataclasses.replace(tiny.algorithm, updates=updates, **greedy)
    return tiny.replace(algorithm=algorithm, total_steps=iterations * 8 * 4)


def with_async(experiment: Experiment, **scheme: Any) -> Experiment:
    """With asynchronous gradients."""
    return experiment.replace(scheme=dataclasses.replace(experiment.scheme, gradient_lag="async", **scheme))


def updates(run: Path) -> list[list[tuple[int, int]]]:
    """By iteration and place: (slot, behind)."""
    return [[tuple(update) for update in line["updates"]] for line in ledger.read(run / "ledger.jsonl")[1]]


def check_updates(experiment: Experiment, recorded: list[list[tuple[int, int]]], *, all_steps: bool = True) -> None:
    """The bound, that a slot's gradients come one after the other, and that all slots took all steps."""
    steps, shards = experiment.gradient_steps[0] // experiment.scheme.shards, range(experiment.scheme.shards)
    for iteration, decided in enumerate(recorded):
        last = dict.fromkeys(shards, -1)
        for place, (slot, behind) in enumerate(decided):
            assert 0 <= behind <= experiment.scheme.max_gradient_lag
            assert place - behind > last[slot]
            last[slot] = place
        if all_steps:
            warm = experiment.algorithm.replays and iteration == 0
            taken = [sum(slot == each for slot, _ in decided) for each in shards]
            assert taken == [0 if warm else steps] * len(shards)


def repeated(ran: Ran, layout: str = "inline", *, ended: bool = True) -> list[dict[str, Any]]:
    """Check the record of a run in which timing decided: no rollout and no gradient was too old, none was left out, and
    a run that repeats the decisions ends with the same bits. Returns the record; ended: whether the run was not stopped
    before."""
    experiment = RunFolder(ran.run).experiment()
    _, lines = ledger.read(ran.run / "ledger.jsonl")
    assert len(lines) == experiment.iterations or not ended
    numbers = dict.fromkeys(range(experiment.scheme.shards), 0)
    for iteration, line in enumerate(lines):
        for event in line.get("events", ()):
            ((_, version),) = event["versions"]
            assert iteration - experiment.scheme.max_lag <= version <= iteration
            assert event["rollout"] == numbers[event["shard"]]
            numbers[event["shard"]] += 1
    if experiment.scheme.gradient_lag == "async":
        check_updates(experiment, updates(ran.run))
    again = replay(ran.run, layout, options(Path("again")))
    assert again.ok and again.digest == ran.digest, again
    return lines


def forge(run: Path, iteration: int, **changes: Any) -> Path:
    """A copy of a run with a changed line of its ledger, and a valid chain."""
    copy = Path(shutil.copytree(run, "forged", dirs_exist_ok=True))
    head, lines = ledger.read(copy / "ledger.jsonl")
    (copy / "ledger.jsonl").unlink()
    writer = ledger.Ledger.create(copy / "ledger.jsonl", head)
    for line in lines:
        writer.append({**line, **(changes if line["iteration"] == iteration else {})})
    writer.close()
    return copy
