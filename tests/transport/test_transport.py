"""Between collectors and learners: nobody waits for somebody who waits for him."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny import options
from workers import Workers

from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.envs.settings import EnvConfig
from lockstep.launchers.launch import train
from lockstep.models.normalize import NormalizeConfig

WIDE = """
import gymnasium, numpy, time

class Wide(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (20_000,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return numpy.zeros(20_000, numpy.float32), {}

    def step(self, action):
        time.sleep(0.005)
        return numpy.zeros(20_000, numpy.float32), 1.0, False, False, {}

def make():
    return Wide()
"""


def test_checkpoints_of_two_learners_whose_messages_fill_the_pipes(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments of long observations: a collector cannot deliver them to a learner who does not read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.launchers.processes.run_processes", workers.run)
    Path("wide.py").write_text(WIDE)
    recipe = recipes.ppo_cartpole()
    experiment = recipe.replace(
        env=EnvConfig(id="wide.py:make", num_envs=8, adapter="gymnasium"),
        algorithm=dataclasses.replace(recipe.algorithm, rollout=8, epochs=1, minibatches=1),
        model=dataclasses.replace(recipe.model, hidden_sizes=(4,)),
        normalize=NormalizeConfig(observations=True),
        scheme=dataclasses.replace(recipe.scheme, lag=1, acting_batch=0),
        total_steps=8 * 8 * 4,
    )
    result = train(experiment, Layout.parse("cpu:a1-l2"), options(Path("run"), checkpoint_every=1))
    assert result.iterations == 4
