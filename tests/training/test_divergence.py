"""Learning that has diverged ends the run, and keeps what it had learned before."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from lockstep import recipes, train
from lockstep.agent import Agent
from lockstep.config.options import RunOptions
from lockstep.config.settings import Diverged, NotFinite, SettingsError
from lockstep.run import checkpoint
from lockstep.run.folder import RunFolder
from lockstep.training.divergence import PATIENCE, Divergence


def taken(directory: Path, iteration: int, *, finite: bool) -> None:
    part = checkpoint.write_part(directory, iteration, "learner", {"w": torch.ones(1)}, {})
    checkpoint.finish(directory, iteration, [part], {}, keep=1, finite=finite)


def test_the_last_finite_checkpoint_outlives_those_that_are_not(tmp_path: Path) -> None:
    for iteration, finite in enumerate([True, True, False, False, False], 1):
        taken(tmp_path, iteration, finite=finite)
    assert [int(path.name) for path in checkpoint.list_checkpoints(tmp_path)] == [2, 5]
    assert checkpoint.newest_finite(tmp_path) == checkpoint.checkpoint_path(tmp_path, 2)
    taken(tmp_path, 6, finite=True)
    assert [int(path.name) for path in checkpoint.list_checkpoints(tmp_path)] == [6]


def test_losses_get_some_patience_and_parameters_none(tmp_path: Path) -> None:
    watch, nan = Divergence(RunFolder(tmp_path), stop=True), {"loss/policy": math.nan, "loss/value": 1.0}
    for _ in range(2):
        for iteration in range(1, PATIENCE):
            watch.check(iteration, nan, [], "")
        watch.check(PATIENCE, {"loss/policy": 1.0}, [], "")
    for iteration in range(1, PATIENCE):
        watch.check(iteration, nan, [], "")
    with pytest.raises(Diverged, match=r"iteration 5 .*loss/policy.*learning-rate.*No checkpoint"):
        watch.check(PATIENCE, nan, [], "")
    run = tmp_path / "my run"
    taken(run / "checkpoints", 3, finite=True)
    with pytest.raises(NotFinite, match=r"w\.bias.*environment 3 returned.*00000003.*my run' --checkpoint 3") as raised:
        Divergence(RunFolder(run), stop=True).check(7, {}, ["w.bias"], "environment 3 returned the reward nan")
    assert not isinstance(raised.value, Diverged) and "learning-rate" not in str(raised.value)
    Divergence(RunFolder(tmp_path), stop=False).check(7, nan, ["w.bias"], "")


def test_what_is_not_finite_has_a_name() -> None:
    agent = Agent(recipes.ppo_cartpole())
    assert agent.not_finite() == []
    name, x = list(agent.flat.named().items())[3]
    with torch.no_grad():
        x.view(-1)[0] = math.inf
    assert agent.not_finite() == [name]


def test_a_run_that_diverges_ends_with_its_last_finite_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = recipes.ppo_cartpole()
    small = dataclasses.replace(base.algorithm, rollout=8, epochs=1, minibatches=1)
    settings = base.replace(algorithm=small, total_steps=100 * 8 * base.env.num_envs)
    step, count = Agent.not_finite, 0

    def diverging(agent: Agent) -> list[str]:
        nonlocal count
        count += 1
        if count == 4:
            with torch.no_grad():
                agent.flat.vector[0] = math.nan
        return step(agent)

    monkeypatch.setattr(Agent, "not_finite", diverging)
    options = RunOptions(run=str(tmp_path / "run"), display="none", tensorboard=False, checkpoint_every=1)
    options = dataclasses.replace(options, keep_checkpoints=1)
    with pytest.raises(Diverged, match=r"after iteration 4 .*00000003"):
        train(settings, options=options)
    kept = checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert max(int(path.name) for path in kept) == 3
    assert len(RunFolder(tmp_path / "run").records()) == 4


def test_errors_reach_another_process_as_what_they_are() -> None:
    class Mine(SettingsError):
        pass

    for error, kind in ((Mine("a"), SettingsError), (NotFinite("a"), NotFinite), (Diverged("a"), Diverged)):
        assert type(error.bare()) is kind and str(error.bare()) == "a"
    assert (SettingsError.exit_code, NotFinite.exit_code) == (2, 1)
