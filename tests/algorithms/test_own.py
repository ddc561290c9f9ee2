"""Algorithms of users' own: their mistakes are explained, and what would be lost is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import says
from torch import Tensor

import lockstep
from lockstep.algorithms.base import LossOutput
from lockstep.algorithms.checks import check_loss
from lockstep.algorithms.dqn import DQN, DQNConfig
from lockstep.algorithms.ppo import PPO, PPOConfig
from lockstep.algorithms.wrapper import Wrapper
from lockstep.cli.main import main
from lockstep.config.settings import SettingsError

X = torch.ones((), requires_grad=True)


class Own(PPO):
    metric_names = ("loss/a", "loss/b")


def output(total: Any = X * 2, **changes: Any) -> LossOutput:
    return LossOutput(total, {"loss/a": torch.tensor(1.0), "loss/b": torch.tensor(2.0), **changes})


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (X * 2, "Own.loss returned a Tensor. Return a lockstep.algorithms.base.LossOutput"),
        (output(torch.tensor(1.0)), r"a tensor of shape \[\] without gradients as its total"),
        (output((X * 2).expand(3)), r"a tensor of shape \[3\] with gradients as its total"),
        (LossOutput(X * 2, {"loss/a": torch.tensor(1.0)}), "no metric 'loss/b', which its metric_names list"),
        (output(**{"loss/c": torch.tensor(1.0)}), "the metric 'loss/c', which its metric_names do not list"),
        (output(**{"loss/a": 1.0}), "a float as the metric 'loss/a'"),
        (output(**{"loss/a": torch.zeros(3)}), r"a tensor of shape \[3\] without gradients as the metric 'loss/a'"),
        (output(**{"loss/a": X * 2}), r"a tensor of shape \[\] with gradients as the metric 'loss/a'"),
    ],
)
def test_what_is_no_loss_is_explained(loss: Any, words: str) -> None:
    check_loss(Own(PPOConfig()), output())
    with pytest.raises(SettingsError, match=words):
        check_loss(Own(PPOConfig()), loss)


def test_steps_are_read_where_something_decides_by_them() -> None:
    class Stopping(PPO):
        def stop_early(self, metrics: dict[str, float]) -> bool:
            return True

    class Plain(Wrapper):
        def loss(self, model: Any, batch: Any, hyper: dict[str, Any]) -> LossOutput:
            return output()

    class Wrapped(Plain):
        def adapt(self, hyper: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
            return hyper

    config = PPOConfig()
    reading = [PPO(PPOConfig(target_kl=0.1)), PPO(PPOConfig(desired_kl=0.1)), Stopping(config), Wrapped(PPO(config))]
    assert all(each.reads_steps for each in [*reading, Plain(Stopping(config))])
    assert not any(each.reads_steps for each in (Own(config), Plain(PPO(config)), DQN(DQNConfig())))


OWN = """
from dataclasses import dataclass, replace
import torch
from lockstep import recipes
from lockstep.algorithms.ppo import PPO, PPOConfig

@dataclass(frozen=True)
class Settings(PPOConfig):
    lost: bool = False
    broken: bool = False

    def build(self):
        return Adaptive(self)

class Adaptive(PPO):
    beta = 1.0

    def __init__(self, config):
        super().__init__(config)
        self.inner, self.table = 3, {"weights": torch.zeros(3)}

    def stop_early(self, metrics):
        if self.config.lost:
            self.beta *= 0.9
        return False

    def loss(self, model, batch, hyper):
        loss = super().loss(model, batch, hyper)
        return loss._replace(total=loss.total * torch.nan) if self.config.broken else loss

def recipe():
    base = recipes.ppo_cartpole()
    return replace(base, algorithm=Settings(rollout=16, epochs=1), total_steps=2048)

def other():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    return ["train", "own.py:recipe", "--env.adapter", "gymnasium", "--display", "none", "--no-tensorboard"]


@pytest.mark.slow
def test_state_that_checkpoints_would_lose_is_told(own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    own = [*own, "--precision", "fp32"]  # portable warns: no kernels compute this algorithm
    assert main([*own, "--checkpoint-every", "1"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main([*own, "--checkpoint-every", "1", "--algorithm.lost"]) == 0
    told = "warning: beta of the algorithm changed while it learned, and checkpoints do not hold it"
    assert capsys.readouterr().err.count(told) == 1


@pytest.mark.slow
def test_a_run_that_diverged_says_so_at_its_end(own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(own) == 0
    assert "diverged" not in capsys.readouterr().out
    broken = [*own, "--algorithm.broken", "--eval-every", "1", "--eval-episodes", "1"]
    assert main([*broken, "--on-nonfinite", "continue"]) == 1
    said = capsys.readouterr().out
    assert "diverged: loss/" in said and said.splitlines()[-1].startswith("digest: ")


def test_a_function_that_is_not_there_names_those_that_are(own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "own.py:recip"]) == 2
    assert says(capsys.readouterr().err, "own.py has no recip", "Settings, Adaptive, recipe, other")


def test_a_mistake_in_a_recipe_s_value_is_told_once(own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(OWN.replace("total_steps=2048", 'total_steps="2048"'))
    assert main(own) == 2
    assert re.fullmatch(r"error: total_steps='2048' .*whole number\.", capsys.readouterr().err.strip())


def test_a_relative_import_is_explained(own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text("from .neighbor import thing\n")
    assert main(own) == 2
    assert "without the dot" in capsys.readouterr().err


def test_python_s_train_wants_an_experiment() -> None:
    with pytest.raises(SettingsError, match="'ppo-cartpole' is not an Experiment"):
        lockstep.train("ppo-cartpole")  # type: ignore[arg-type]


def test_variables_of_ones_own_move_by_their_gradient() -> None:
    """The docs' rule for an adaptive coefficient raises it where the divergence is above its target."""
    log_beta = torch.zeros((), requires_grad=True)
    kl: Tensor = torch.tensor(0.5, requires_grad=True)
    (-log_beta * (kl - 0.1).detach()).backward()
    assert log_beta.grad is not None and log_beta.grad < 0
