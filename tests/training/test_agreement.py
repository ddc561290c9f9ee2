"""Learners that no longer hold the same parameters end the run, before a checkpoint keeps what one of them has."""

from __future__ import annotations

from pathlib import Path

import pytest
from sentences import says
from tiny import EXPERIMENTS

from lockstep.agent import Agent
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.run import checkpoint
from lockstep.training import agreement
from lockstep.training.agreement import Held, LearnersDiffer, require_agreement

OWN = """
import multiprocessing
from dataclasses import dataclass, replace
from lockstep import recipes
from lockstep.algorithms.ppo import PPO, PPOConfig

@dataclass(frozen=True)
class Settings(PPOConfig):
    drifting: str = ""

    def build(self):
        return Drifting(self)

class Drifting(PPO):
    def hyperparameters(self, progress):
        found = super().hyperparameters(progress)
        if self.config.drifting and self.config.drifting in multiprocessing.current_process().name:
            found["learning_rate"] *= 1.0001
        return found

def recipe():
    base = recipes.ppo_cartpole()
    return replace(base, algorithm=Settings(rollout=8, epochs=1), total_steps=2000, precision="fp32")
"""


@pytest.mark.parametrize("drifting", ["", "1-of-2"])
def test_a_learner_that_drifts_ends_the_run(
    drifting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    flags = ["--env.adapter", "gymnasium", "--display", "none", "--no-tensorboard", "--run", "run"]
    flags += ["--layout", "processes:2", "--algorithm.drifting", drifting]
    assert main(["train", "own.py:recipe", *flags]) == (2 if drifting else 0)
    kept = checkpoint.list_checkpoints(Path("run", "checkpoints"))
    assert bool(kept) != bool(drifting)
    if drifting:
        assert says(capfd.readouterr().err, "learner 1 of 2 (cpu) and learner 0 of 2 (cpu) have different parameters")


def test_those_that_differ_are_named_with_their_devices() -> None:
    layout, digests = Layout.parse("a0-l1,2,3"), (("a", "b"), ("a", "c"), ("a", "c"))
    require_agreement([Held(f"cuda:{rank}", digests[0]) for rank in (1, 2, 3)], layout, 4)
    every = [Held(f"cuda:{rank}", each) for rank, each in enumerate(digests, start=1)]
    with pytest.raises(LearnersDiffer, match=r"iteration 4, learner 1 of 3 \(cuda:2\), learner 2 of 3 \(cuda:3\) and "):
        require_agreement(every, layout, 4)
    with pytest.raises(LearnersDiffer, match="--layout inline,device=0 names"):
        require_agreement(every, layout, 4)


def test_one_changed_bit_is_noticed() -> None:
    agent = Agent(EXPERIMENTS["mujoco-normalized"]())
    before = agreement.held(agent)
    assert before == agreement.held(agent)
    vector = agent.flat.vector.detach()
    vector[-1] = -vector[-1]
    assert agreement.held(agent) != before
