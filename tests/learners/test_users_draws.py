"""Users' models and losses may draw from global generators; what they draw is the same on every layout."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import mtrand
from sentences import says
from tiny import options

from lockstep import train
from lockstep.agent import Agent
from lockstep.cli.main import main
from lockstep.config.user_code import load_object
from lockstep.learners.users_draws import users_draws
from lockstep.run.folder import RunFolder
from lockstep.system.generators import GlobalGenerators, drawn, seeded, states

CPU = torch.device("cpu")
OWN = """
import copy
import random
from dataclasses import dataclass
import numpy as np
import torch
from torch import nn
from lockstep import recipes
from lockstep.algorithms.losses import masked_sum
from lockstep.algorithms.ppo import PPO, PPOConfig
from lockstep.models import ModelConfig, ModelOutput, PolicyModel, make_distribution
from lockstep.models.distributions import Categorical

@dataclass(frozen=True)
class Settings(PPOConfig):
    source: str = "torch"
    targets: str = ""

    def build(self):
        return Noisy(self)

class Noisy(PPO):
    def auxiliary_loss(self, model, output, batch):
        draws = {"torch": lambda: torch.rand(()), "numpy": np.random.rand, "python": random.random}
        noise = draws.get(self.config.source, lambda: 0.5)() + torch.rand(())
        error_t = (output.value - batch.value_target).square()
        if self.config.source == "batch":
            batch.reward.mul_(2)
        if self.config.source == "in place":
            hidden = output.value.exp()
            error_t = hidden.square()
            hidden.add_(1)
        return noise * masked_sum(error_t, batch.valid)

    def targets(self, rollout, reward, hyper):
        found = super().targets(rollout, reward, hyper)
        if self.config.targets == "draws":
            torch.rand(())
        if self.config.targets == "in place":
            rollout.value.mul_(2)
        return found

class Sampled(Categorical):
    def sample(self, params, noise):
        return torch.distributions.Categorical(logits=params).sample()

class Model(PolicyModel):
    def __init__(self, space, action_space, kind):
        super().__init__()
        self.kind = kind
        self.distribution = Sampled(action_space) if kind == "sampled" else make_distribution(action_space)
        self.head = nn.Linear(space.shape[0], 1 + self.distribution.num_params)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.from_numpy(np.random.rand(1).astype("float32")))
        if kind == "norm":
            self.norm = nn.BatchNorm1d(space.shape[0])

    def forward(self, obs, start, state, prev_action=None, prev_reward=None):
        if self.kind == "constant":
            obs = obs + torch.rand(())
        if self.kind == "by value" and obs.sum() > -torch.rand(()) * 1e9:
            obs = -obs
        out = self.head(self.drop(obs) * self.scale)
        return ModelOutput(out[..., 1:], out[..., 0]), state

    def set_observation_statistics(self, mean, std):
        pass

    def for_acting(self):
        return copy.deepcopy(self).requires_grad_(False)

@dataclass(frozen=True)
class Config(ModelConfig):
    kind: str = "good"

    def build(self, observation_space, action_space, **_):
        return Model(observation_space, action_space, self.kind)

def recipe():
    return recipes.ppo_cartpole().replace(
        algorithm=Settings(rollout=8, epochs=2, minibatches=1), model=Config(), precision="fp32", total_steps=3 * 64
    )
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    return ["train", "own.py:recipe", "--env.adapter", "gymnasium", "--display", "none", "--no-tensorboard"]


def ledger(run: str) -> bytes:
    return RunFolder(Path(run)).ledger.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["torch", "numpy"])
def test_draws_in_a_loss_are_the_same_on_every_layout_and_after_resuming(own: list[str], source: str) -> None:
    own = [*own, "--algorithm.source", source]
    torch.manual_seed(1)
    np.random.seed(1)
    assert main([*own, "--run", "whole", "--layout", "inline"]) == 0
    assert main(["verify", "whole", "--layout", "processes:2", "--iterations", "all"]) == 0
    torch.manual_seed(2)
    np.random.seed(2)
    experiment = load_object("own.py:recipe")().replace(**{"algorithm.source": source, "env.adapter": "gymnasium"})
    train(experiment, "inline", options(Path("halved")), on_iteration=lambda progress: progress.stop())
    assert main(["resume", "halved", "--display", "none"]) == 0
    assert ledger("halved") == ledger("whole")


def test_draws_differ_between_iterations_steps_shards_and_seeds(own: list[str]) -> None:
    experiment = load_object("own.py:recipe")()

    def first(seed: int, iteration: int, *place: int) -> float:
        draws = users_draws(Agent(experiment.replace(seed=seed)))
        assert draws is not None
        with draws.of_iteration(iteration):
            draws.seed(*place)
            return float(torch.rand(())) + float(np.random.rand())

    found = [first(1, 0, 0, 0), first(1, 0, 0, 1), first(1, 0, 1, 0), first(1, 1, 0, 0), first(2, 0, 0, 0)]
    assert len(set(found)) == 5 and first(1, 0, 0, 0) == found[0]


def test_weights_without_a_seed_of_their_own_follow_from_that_of_the_run(own: list[str]) -> None:
    experiment = load_object("own.py:recipe")()
    torch.manual_seed(1)
    first = Agent(experiment).model.state_dict()
    torch.manual_seed(2)
    np.random.seed(2)
    again, other = Agent(experiment).model.state_dict(), Agent(experiment.replace(seed=2)).model.state_dict()
    for name in ("head.weight", "scale"):
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--algorithm.source", "python"), ("Noisy.loss", "Python's global", "torch.rand")),
        (("--algorithm.source", "batch"), ("Noisy.loss", "batch.reward", "in place", "batch.replace")),
        (("--algorithm.source", "in place"), ("in place", "torch.FloatTensor", "x.mul_(2)")),
        (("--algorithm.targets", "draws"), ("Noisy.targets", "torch's global", "lockstep.core.rng.stream")),
        (("--algorithm.targets", "in place"), ("Noisy.targets", "rollout.value", "rollout.replace")),
        (("--model.kind", "constant"), ("Model.forward", "torch's global", "self.training")),
        (("--model.kind", "by value"), ("Model.forward", "torch's global", "self.training")),
        (("--model.kind", "sampled"), ("Sampled", "torch's global", "noise")),
        (("--model.kind", "norm"), ("norm", "BatchNorm1d", "LayerNorm")),
    ],
)
def test_what_would_depend_on_the_layout_is_refused(
    own: list[str], capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert main([*own, *flags]) == 2
    assert says(capsys.readouterr().err, "error:", *words)


def test_other_code_does_not_notice_that_generators_are_seeded() -> None:
    before, of_numpy = states(CPU), mtrand.get_bit_generator()
    generators = GlobalGenerators(CPU)
    for _ in range(2):
        with generators.restored():
            generators.seed(5)
            found = float(torch.rand(())), np.random.rand()
            generators.seed(5)
            assert found == (float(torch.rand(())), np.random.rand())
    with pytest.raises(ZeroDivisionError), seeded(5):
        raise ZeroDivisionError(torch.rand(()), np.random.rand())
    assert not drawn(before, CPU) and mtrand.get_bit_generator() is of_numpy


def test_every_draw_is_noticed() -> None:
    for name, draw in (("torch", lambda: torch.rand(())), ("NumPy", np.random.rand), ("Python", random.random)):
        before = states(CPU)
        assert drawn(before, CPU) == []
        draw()
        assert drawn(before, CPU) == [name]
