"""PopArt against numbers worked out by hand, against the paper's moving averages, and against losses without it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tiny import EXPERIMENTS, options
from torch import Tensor

from lockstep import recipes, resume, train
from lockstep.agent import Agent
from lockstep.algorithms import A2CConfig, IMPALAConfig, OnPolicyConfig, PPOConfig
from lockstep.algorithms.onpolicy import Batch, Targets
from lockstep.algorithms.popart import PopArt, with_popart
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.envs.factory import resolve
from lockstep.envs.settings import EnvConfig
from lockstep.evaluation.policy import load_policy
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.models.observations import VALUE_TASK, ObservationLayout
from lockstep.models.popart import PopArtConfig, PopArtHead, tasks_in

T, B = 3, 4
SPACE = spaces.Dict({"x": spaces.Box(-1, 1, (5,)), VALUE_TASK: spaces.Box(0, 1, (2,))})


def head(rate: float = 0.1, **settings: float) -> PopArtHead:
    """Two tasks with means 0 and 10 and deviations 1 and 4; n = 2 x and 3 x + 1."""
    made = PopArtHead(1, 2, PopArtConfig(rate, **settings))
    with torch.no_grad():
        made.statistics[0].copy_(torch.tensor([[0.0, 10.0], [1.0, 16.0], [0.0, 0.0]]))
        made.linear.weight.copy_(torch.tensor([[2.0], [3.0]]))
        made.linear.bias.copy_(torch.tensor([0.0, 1.0]))
    return made


def both(x: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The same feature for both tasks: [1, 2, 1], and the observations that tell them apart."""
    return torch.full((1, 2, 1), x), {VALUE_TASK: torch.eye(2).unsqueeze(0)}


def test_values_are_those_of_their_task() -> None:
    made = head()
    assert made(*both(0.5)).tolist() == [[1.0, 10 + 4 * 2.5]]
    with made.in_deviations():
        assert made(*both(0.5)).tolist() == [[1.0, 5.0]], "the same divided by 1 and 4"
    assert made(*both(0.5)).tolist() == [[1.0, 20.0]]


def test_statistics_by_hand() -> None:
    """Targets of task 0: 1 and 3, so d = 2 and c = 5 with β = 0.1: the mean becomes 0.2 and the variance 0.9 + 0.5 -
    0.04. Task 1 has none. Values stay as they are."""
    made = head()
    before = made(*both(0.5)).tolist()
    made.follow(torch.tensor([[4.0, 0.0], [10.0, 0.0], [2.0, 0.0]]))
    mean, deviation = made.moments()
    assert mean.tolist() == pytest.approx([0.2, 10.0])
    assert deviation.tolist() == pytest.approx([math.sqrt(1.36), 4.0])
    assert made.linear.weight.flatten().tolist() == pytest.approx([2 / math.sqrt(1.36), 3.0])
    assert made.linear.bias.tolist() == pytest.approx([-0.2 / math.sqrt(1.36), 1.0])
    assert made(*both(0.5)).tolist()[0] == pytest.approx(before[0])
    assert made.statistics[0][2].tolist() == [0.0, 0.0]


def test_statistics_are_the_papers_moving_averages() -> None:
    """μ and ν move towards means of targets and of their squares (Hessel et al. 2019, section 3)."""
    made, random = head(rate=0.2), np.random.default_rng(0)
    mean, second = np.array([0.0, 10.0]), np.array([1.0, 16.0 + 100.0])
    values = made(*both(-0.7)).detach()
    for _ in range(30):
        targets = random.normal([3.0, -200.0], [0.5, 90.0], (7, 2))
        now, deviation = (x.double().numpy() for x in made.moments())
        z = (targets - now) / deviation
        sums = np.stack([z.sum(0), (z * z).sum(0), np.full(2, 7.0)])
        made.follow(torch.from_numpy(sums).float() / 28)  # a mean over other samples, too
        mean = 0.8 * mean + 0.2 * targets.mean(0)
        second = 0.8 * second + 0.2 * (targets**2).mean(0)
    found, deviation = made.moments()
    assert found.tolist() == pytest.approx(mean.tolist(), rel=1e-4)
    assert deviation.tolist() == pytest.approx(np.sqrt(second - mean**2).tolist(), rel=1e-4)
    assert torch.allclose(made(*both(-0.7)), values, rtol=1e-4, atol=1e-4)


def test_deviations_are_bounded() -> None:
    made = head(rate=0.99, smallest=0.5, largest=3.0)
    assert made.moments()[1].tolist() == [1.0, 3.0]
    before = made(*both(0.3)).tolist()
    for _ in range(5):
        made.follow(torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]))  # targets at the mean
    assert made.moments()[1].tolist() == [0.5, 3.0]
    assert made(*both(0.3)).tolist()[0] == pytest.approx(before[0])


class Case:
    """A model with PopArt in which the tasks have unlike statistics, and a batch of both tasks."""

    def __init__(self, config: OnPolicyConfig, *, rate: float = 0.1) -> None:
        torch.manual_seed(0)
        model = StandardModelConfig(hidden_sizes=(6,), popart=PopArtConfig(rate))
        built = model.build(SPACE, spaces.Discrete(3), precision="fp32", normalize_observations=False, seed=1)
        assert isinstance(built.value_head, PopArtHead)
        self.model, self.head = built, built.value_head
        with torch.no_grad():
            self.head.statistics[0][:2] = torch.tensor([[2.0, -300.0], [4.0, 2500.0]])
        self.inner = config.build()
        algorithm = with_popart(self.inner, built)
        assert isinstance(algorithm, PopArt)
        self.algorithm, self.hyper = algorithm, algorithm.hyperparameters(0.0)
        self.task = torch.eye(2)[[0, 0, 1, 1]].expand(T + 1, B, 2)
        self.unit = torch.tensor([2.0, 2.0, 50.0, 50.0])
        steps = T + 1 if algorithm.bootstrap_inputs else T
        scale = torch.tensor([1.0, 1.0, 40.0, 40.0])
        self.batch = Batch(
            obs={"x": torch.randn(steps, B, 5), VALUE_TASK: self.task[:steps]},
            start=torch.zeros(steps, B, dtype=torch.bool),
            prev_action=None,
            prev_reward=None,
            state=torch.zeros(B, 0),
            action=torch.randint(3, (T, B)),
            reward=torch.randn(T, B) * scale,
            log_prob=-torch.rand(T, B) - 0.5,
            value=torch.randn(T, B) * scale,
            terminated=torch.rand(T, B) < 0.2,
            truncated=torch.zeros(T, B, dtype=torch.bool),
            valid=torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 0]]).bool(),
            advantage=None if algorithm.bootstrap_inputs else torch.randn(T, B),
            value_target=None if algorithm.bootstrap_inputs else torch.randn(T, B) * scale,
        )


def test_losses_are_in_units_of_the_task() -> None:
    """PPO's value loss is that of n against (G - μ) / σ, and its gradient for the statistics sums over targets."""
    case = Case(PPOConfig())
    batch, made = case.batch, case.head
    loss = case.algorithm.loss(case.model, batch, case.hyper)
    output, _ = case.model(batch.obs, batch.start, batch.state)
    mean = torch.tensor([2.0, 2.0, -300.0, -300.0])
    assert batch.value_target is not None
    z = (batch.value_target - mean) / case.unit
    n = (output.value - mean) / case.unit
    expected = 0.5 * ((n - z).square() * batch.valid).sum().detach()
    assert float(loss.metrics["loss/value"]) == pytest.approx(float(expected), rel=1e-4)
    loss.total.backward()
    valid = batch.valid.float()
    by_task = [[(x * valid)[:, rows].sum() for rows in (slice(2), slice(2, 4))] for x in (z, z * z, valid)]
    gradient = made.statistics[0].grad
    assert gradient is not None and torch.allclose(gradient, torch.tensor(by_task), rtol=1e-4)
    assert gradient[2].tolist() == [5.0, 5.0]
    samples = float(valid.sum())
    told = [float(loss.metrics[f"popart/{what}_{k}"]) / samples for what in ("mean", "deviation") for k in (0, 1)]
    assert told == pytest.approx([2.0, -300.0, 2.0, 50.0])


def test_vtrace_is_in_units_of_the_task() -> None:
    """Each task alone, with rewards and values divided by hand, has the same loss as IMPALA without PopArt."""
    case = Case(IMPALAConfig())
    batch = case.batch
    whole = case.algorithm.loss(case.model, batch, case.hyper)
    parts = []
    for rows, unit in ((torch.tensor([0, 1]), 2.0), (torch.tensor([2, 3]), 50.0)):
        own = batch.columns(rows)
        with case.head.in_deviations():
            parts.append(case.inner.loss(case.model, own.replace(reward=own.reward / unit), case.hyper))
    for name in ("loss/policy", "loss/value", "policy/rho"):
        assert float(whole.metrics[name]) == pytest.approx(sum(float(x.metrics[name]) for x in parts), rel=1e-4)
    (alone,) = {name for name in whole.metrics if name == "popart/mean_1"}
    assert alone in case.algorithm.metric_names


def test_advantages_are_scaled_by_the_deviation_of_their_task() -> None:
    case = Case(A2CConfig())
    rollout = _rollout(case)
    scaled = case.algorithm.targets(rollout, rollout.reward, case.hyper)
    plain: Targets = case.inner.targets(rollout, rollout.reward, case.hyper)
    assert torch.equal(scaled.value_target, plain.value_target)
    assert torch.allclose(scaled.advantage, plain.advantage / case.unit)


def _rollout(case: Case) -> Rollout:
    batch = case.batch
    return Rollout(
        obs={"x": torch.randn(T + 1, B, 5), VALUE_TASK: case.task},
        start=torch.zeros(T + 1, B, dtype=torch.bool),
        action=batch.action,
        reward=batch.reward,
        prev_action=None,
        prev_reward=None,
        log_prob=batch.log_prob,
        value=torch.randn(T + 1, B),
        terminated=batch.terminated,
        truncated=batch.truncated,
        valid=batch.valid,
        core_state=batch.state,
    )


def test_the_optimizer_leaves_statistics_alone() -> None:
    case = Case(PPOConfig())
    assert case.algorithm.sees_gradients
    gradient = {"statistics.value": torch.tensor([[3.0, 0.0], [9.0, 0.0], [1.0, 0.0]])}
    case.algorithm.before_step(case.model, gradient)
    assert not gradient["statistics.value"].any()
    assert case.head.moments()[0].tolist() == pytest.approx([2.0 + 0.1 * 2.0 * 3.0, -300.0])


def test_a_single_task_needs_no_entry() -> None:
    agent = Agent(recipes.ppo_cartpole().replace(**{"model.popart.rate": 0.01}))
    assert isinstance(agent.algorithm, PopArt) and agent.algorithm.head.tasks == 1
    assert agent.kernels is None, "torch's replaced operations compute it"
    assert tasks_in(agent.observation_space) == 1 and tasks_in(SPACE) == 2


def test_models_do_not_observe_the_task_of_values() -> None:
    assert ObservationLayout.of(SPACE).vectors == (("x", 5),)
    case = Case(PPOConfig())
    config = StandardModelConfig(popart=PopArtConfig(0.1))
    assert list(config.policy_space(SPACE).spaces) == ["x"]  # type: ignore[attr-defined]
    playing = case.model.for_playing()
    output, _ = playing({"x": case.batch.obs["x"]}, case.batch.start, case.batch.state)
    expected, _ = case.model(case.batch.obs, case.batch.start, case.batch.state)
    assert torch.equal(output.policy, expected.policy) and not playing.has_value


def _experiment(**changes: Any) -> Experiment:
    return recipes.ppo_cartpole().replace(**{"model.popart.rate": 0.01, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.popart.rate": 1.0}, r"popart\.rate=1\.0 must be at least 0 and below 1"),
        ({"model.popart.smallest": 2.0, "model.popart.largest": 1.0}, r"popart\.smallest=2\.0 must be above 0"),
        ({"algorithm.rnd.coef": 0.5}, r"advantages of novelty"),
        ({"scheme.gradient_lag": 1}, r"gradients in earlier units"),
        ({"env.id": "mixed/Breakout+Pong", "env.adapter": "auto"}, r"--env\.options task_input=value"),
    ],
)
def test_what_does_not_fit_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        _experiment(**changes).validate()


def test_a_task_that_no_value_reads_is_warned_of() -> None:
    space = spaces.Dict(observation=spaces.Box(-1, 1, (3,)), value_task=spaces.Box(0, 1, (2,)))
    ppo, dqn = recipes.ppo_cartpole().model, recipes.dqn_cartpole().model
    for model, advice in ((ppo, "--model.popart.rate 1e-2"), (dqn, "task_input=true")):
        (warning,) = model.warnings(space, spaces.Discrete(2))
        assert "task_input=value" in warning and advice in warning
        assert not model.warnings(space["observation"], spaces.Discrete(2))
    assert "popart.rate" not in dqn.warnings(space, spaces.Discrete(2))[0], "which it does not have"
    assert not _experiment().model.warnings(space, spaces.Discrete(2))


def test_algorithms_without_a_value_have_no_such_setting() -> None:
    for recipe in (recipes.dqn_cartpole, recipes.sac_mujoco, recipes.pqn_cartpole):
        with pytest.raises(SettingsError, match="popart"):
            recipe().replace(**{"model.popart.rate": 0.01})


def test_raw_rewards_under_a_protocol() -> None:
    config = EnvConfig("Breakout", protocol="machado")
    assert resolve(config).reward_clip
    raw = EnvConfig("Breakout", protocol="machado", raw_rewards=True)
    assert not resolve(raw).reward_clip
    with pytest.raises(SettingsError, match=r"env\.raw_rewards .*env\.reward_clip"):
        EnvConfig("Breakout", raw_rewards=True, reward_clip=True).validate()


def test_a_resumed_run_has_the_same_statistics(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["popart-lag-1"]()
    whole = train(experiment, "inline", options(tmp_path / "whole"))
    train(experiment, "inline", options(tmp_path / "cut"), stop_after=2)
    resumed = resume(tmp_path / "cut", "processes:2")
    assert resumed.digest == whole.digest
    mean, variance, count = load_policy(resumed.run).model.get_parameter("statistics.value").tolist()
    assert 0 not in mean and 1 not in variance, "both tasks have moved them"
    assert count == [0, 0]
