"""Algorithms of users' own: their mistakes are explained, and what would be lost is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium import spaces
from sentences import says
from torch import Tensor, nn

import lockstep
from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms.base import Algorithm, Exploration, LossOutput, ParameterGroup
from lockstep.algorithms.checks import check_loss, check_targets
from lockstep.algorithms.dqn import DQN, DQNConfig
from lockstep.algorithms.offpolicy import ReplayConfig
from lockstep.algorithms.onpolicy import Batch, OnPolicy, Targets
from lockstep.algorithms.popart import PopArt
from lockstep.algorithms.ppo import PPO, PPOConfig
from lockstep.algorithms.rnd import RND, with_curiosity
from lockstep.algorithms.several import Several
from lockstep.algorithms.wrapper import Wrapper
from lockstep.buffers.on_policy import FreshBatches
from lockstep.buffers.sources import batches_for
from lockstep.cli.main import main
from lockstep.config.settings import SettingsError
from lockstep.distributed.groups import Group
from lockstep.distributed.tree import TreeSum
from lockstep.models.policies import Part, PoliciesSpace
from lockstep.models.popart import PopArtConfig, PopArtHead
from lockstep.models.rnd import RNDConfig
from lockstep.scheme import Scheme

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


@pytest.mark.parametrize(
    ("priorities", "words"),
    [
        (None, r"DQN\.loss returned a NoneType as priorities.* shape \[3\]"),
        (torch.ones(1, 3), r"a tensor of shape \[1, 3\] without gradients as priorities"),
        (X.expand(3), r"a tensor of shape \[3\] with gradients as priorities"),
    ],
)
def test_priorities_that_replay_cannot_take_are_explained(priorities: Any, words: str) -> None:
    algorithm, batch = DQN(DQNConfig(replay=ReplayConfig(prioritized=True))), SimpleNamespace(weight=torch.ones(3))
    loss = LossOutput(X * 2, dict.fromkeys(algorithm.metric_names, torch.tensor(0.0)), torch.ones(3))
    check_loss(algorithm, loss, batch)
    with pytest.raises(SettingsError, match=words):
        check_loss(algorithm, loss._replace(priorities=priorities), batch)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ((torch.zeros(3, 2), torch.zeros(3, 2)), "Own.targets returned a tuple. Return a lockstep.algorithms.onpolicy"),
        (Targets(torch.zeros(4, 2), torch.zeros(3, 2)), r"shape \[4, 2\] without .* as advantage.*here \[3, 2\]"),
        (Targets(torch.zeros(3, 2), torch.zeros(3, 2, 1)), r"shape \[3, 2, 1\] without gradients as value_target"),
        (Targets(torch.zeros(3, 2), X.expand(3, 2)), "with gradients as value_target"),
        (Targets(torch.zeros(3, 2), 0.0), "a float as value_target"),  # type: ignore[arg-type]
    ],
)
def test_what_are_no_targets_is_explained(targets: Any, words: str) -> None:
    check_targets(Own(PPOConfig()), Targets(torch.zeros(3, 2), torch.zeros(3, 2)), torch.zeros(3, 2))
    with pytest.raises(SettingsError, match=words):
        check_targets(Own(PPOConfig()), targets, torch.zeros(3, 2))


@pytest.mark.parametrize("size", [1, 3])
def test_targets_may_have_any_order_in_memory(size: int) -> None:
    agent = Agent(recipes.ppo_cartpole().replace(scheme=Scheme(shards=1), precision="fp32"))
    batches, steps = FreshBatches(agent, range(1), TreeSum(1, Group())), 4
    plain = torch.arange(float(steps * size)).view(steps, size)
    wide = torch.arange(float(steps * 5)).view(steps, 5)
    orders = [
        *(plain, plain.T.contiguous().T, torch.empty(size, steps).T.copy_(plain)),
        *(wide[:, :size], wide[:, :1].expand(steps, size), torch.ones(()).expand(steps, size)),
        *(torch.stack([plain, plain], -1)[..., 0], wide.repeat(1, 2)[:, : 2 * size : 2]),
    ]
    flags, index = torch.zeros(steps, size, dtype=torch.bool), torch.randperm(steps * size)[:3]
    fields: dict[str, Any] = dict.fromkeys(("obs", "action", "reward", "log_prob", "value", "value_target"), plain)
    fields |= dict.fromkeys(("start", "terminated", "truncated", "valid"), flags)
    fields |= {"state": torch.zeros(size, 0), "prev_action": None, "prev_reward": None}
    for each in orders:
        whole = Batch(**fields, advantage=each)
        chosen = batches.select(whole, index, None)
        assert chosen.advantage is not None and chosen.advantage.tolist() == [each.reshape(-1)[index].tolist()]


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


class Exploring(PPO):
    """Moves the value's head only, refuses every observation, and explores."""

    def check(self, observation_space: gymnasium.Space[Any]) -> None:
        raise SettingsError(f"not {observation_space}")

    def companion(self, observation_space: gymnasium.Space[Any], seed: int) -> nn.Module:
        return nn.Linear(2, 3)

    def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
        return (ParameterGroup("value_head.", updates * hyper["learning_rate"]),)

    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration:
        return Exploration(samples < 10, torch.full((len(environments), 1), 0.5))


def test_nothing_that_an_algorithm_overrides_is_lost_in_a_wrapper() -> None:
    head = PopArtHead(1, 1, PopArtConfig(rate=0.1))
    wrapped = PopArt(Exploring(PPOConfig()), head)
    assert wrapped.groups(3, {"learning_rate": 0.5}) == (ParameterGroup("value_head.", 1.5),)
    explored = wrapped.exploration(0.0, 10, range(4, 6), 8)
    assert explored is not None and not explored.random and explored.numbers.tolist() == [[0.5], [0.5]]
    assert wrapped.companion(spaces.Discrete(2), 1) is not None
    with pytest.raises(SettingsError, match="not Discrete"):
        wrapped.check(spaces.Discrete(2))
    common, own_space = (spaces.Box(0, 1, (size,)) for size in (3, 2))
    policies = {"one": Part(spaces.Dict({"x": own_space}), spaces.Discrete(2))}
    with pytest.raises(SettingsError, match=r"not .*\(2,\)"):  # what the policy observes
        Several(Exploring(PPOConfig()), PoliciesSpace({"x": common}, policies)).check(common)
    curious = RND(Exploring(PPOConfig()))
    curious.annealings = {"epsilon": float}
    explored = curious.exploration(0.0, 9, range(1), 1)
    assert explored is not None and explored.random and curious.inner.annealings == {"epsilon": float}
    # What the wrapped algorithm calls itself, what other methods compute, and what only replay has.
    own = {"loss", "auxiliary_loss", "with_auxiliary", "annealed", "follow"}
    methods = {name for name, x in {**vars(Algorithm), **vars(OnPolicy)}.items() if callable(x) or type(x) is property}
    assert {name for name in methods if not name.startswith("_")} - own <= vars(Wrapper).keys()


def test_a_wrapped_algorithm_brings_its_own_minibatches() -> None:
    class Bringing(PPO):
        def batches(self, agent: Any, slots: range, tree: Any) -> Any:
            return self, slots

    inner, head = Bringing(PPOConfig()), PopArtHead(1, 1, PopArtConfig(rate=0.1))
    agent: Any = SimpleNamespace(algorithm=PopArt(inner, head))
    found: Any = batches_for(agent, range(2), TreeSum(2, Group()))
    assert found == (inner, range(2))
    with pytest.raises(SettingsError, match=r"rnd\.coef=0\.5 .*Bringing brings its own minibatches"):
        with_curiosity(Bringing(PPOConfig(rnd=RNDConfig(coef=0.5))))


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
    assert main([*broken, "--on-nonfinite", "continue", "--json"]) == 1
    assert "loss/policy" in json.loads(capsys.readouterr().out)["diverged"]


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


@pytest.mark.parametrize(
    ("prefixes", "words"),
    [
        (["", "policy_head."], "'' and 'policy_head.' of Grouped share parameters, which a gradient step"),
        (["police."], "begin with 'police.', but no parameter has such a name. The model's parameters are, in order: "),
    ],
)
def test_groups_that_cannot_move_are_explained(prefixes: list[str], words: str) -> None:
    class Grouped(PPO):
        def groups(self, updates: int, hyper: dict[str, float]) -> tuple[ParameterGroup, ...]:
            return tuple(ParameterGroup(prefix, 0.1) for prefix in prefixes)

    agent = Agent(recipes.ppo_cartpole())
    agent.algorithm = Grouped(agent.algorithm.config)
    with pytest.raises(SettingsError, match=re.escape(words)):
        agent.check()
