from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gymnasium import spaces
from linear_actor import LinearActor
from torch.distributions import Categorical, Normal
from torch.distributions.kl import kl_divergence

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms import Batch, PPOConfig
from lockstep.algorithms.base import OptimizerConfig
from lockstep.algorithms.ppo import PPO
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.models.action_spaces import make_distribution

HYPER = {"discount": 0.9, "entropy_coef": 0.1, "value_coef": 0.5, "clip": 0.2}


def hand_batch(**changes: Any) -> Batch:
    """Four samples with π = 1/4 exactly, π/μ = 1.5, 0.5, 1.1 and 1.5, and an invalid fifth."""
    columns = {
        "log_prob": [math.log(0.25 / 1.5), math.log(0.5), math.log(0.25 / 1.1), math.log(0.25 / 1.5), 0.0],
        "advantage": [2.0, 2.0, 3.0, -1.0, 100.0],
        "value": [0.0, 0.0, 1.0, 0.0, 0.0],
        "value_target": [1.0, -1.0, 3.0, 0.0, 100.0],
    }
    tensors: dict[str, Any] = {name: torch.tensor([values], dtype=torch.float64) for name, values in columns.items()}
    nothing = torch.zeros(1, 5, dtype=torch.bool)
    return Batch(
        obs=torch.zeros(1, 5, 3, dtype=torch.float64),
        start=nothing,
        prev_action=None,
        prev_reward=None,
        state=torch.zeros(5, 0),
        action=torch.zeros(1, 5, dtype=torch.int64),
        reward=torch.zeros(1, 5),
        terminated=nothing,
        truncated=nothing,
        valid=torch.tensor([[True, True, True, True, False]]),
        **tensors,
    ).replace(**changes)


def zero_model() -> LinearActor:
    return LinearActor(torch.zeros(5, 3, dtype=torch.float64))


def test_loss_by_hand() -> None:
    loss = PPOConfig().build().loss(zero_model(), hand_batch(), HYPER)
    # min(3, 1.2 · 2) + min(1, 0.8 · 2) + 1.1 · 3 + min(-1.5, -1.2)
    surrogate = 2.4 + 1.0 + 3.3 - 1.5
    value_loss = 0.5 * (1 + 1 + 9 + 0)
    assert float(loss.metrics["loss/policy"]) == pytest.approx(-surrogate)
    assert float(loss.metrics["loss/value"]) == pytest.approx(value_loss)
    assert float(loss.metrics["policy/entropy"]) == pytest.approx(4 * math.log(4))
    assert float(loss.metrics["policy/clip_fraction"]) == 3
    k3 = 2 * (0.5 - math.log(1.5)) + (-0.5 - math.log(0.5)) + (0.1 - math.log(1.1))
    assert float(loss.metrics["policy/approx_kl"]) == pytest.approx(k3)
    assert float(loss.total.detach()) == pytest.approx(-surrogate + 0.5 * value_loss - 0.1 * 4 * math.log(4))


def test_value_clip_by_hand() -> None:
    loss = PPOConfig(value_clip=0.25).build().loss(zero_model(), hand_batch(), HYPER)
    # Only the third value moved, from 1 to 0; the clipped one is 0.75, and the worse of the two errors counts.
    assert float(loss.metrics["loss/value"]) == pytest.approx(0.5 * (1 + 1 + 9 + 0))
    nearer = hand_batch(value_target=torch.tensor([[1.0, -1.0, -1.0, 0.0, 0.0]], dtype=torch.float64))
    loss = PPOConfig(value_clip=0.25).build().loss(zero_model(), nearer, HYPER)
    assert float(loss.metrics["loss/value"]) == pytest.approx(0.5 * (1 + 1 + 1.75**2 + 0))


def test_targets_use_collected_values_and_given_rewards() -> None:
    def row(*values: float) -> torch.Tensor:
        return torch.tensor(values)[:, None]

    rollout = Rollout(
        obs=torch.zeros(3, 1, 3),
        start=torch.zeros(3, 1, dtype=torch.bool),
        action=torch.zeros(2, 1),
        reward=row(1000, 1000),
        log_prob=torch.zeros(2, 1),
        value=row(1, 2, 4),
        terminated=torch.zeros(2, 1, dtype=torch.bool),
        truncated=torch.zeros(2, 1, dtype=torch.bool),
        valid=torch.ones(2, 1, dtype=torch.bool),
        core_state=torch.zeros(1, 0),
        prev_action=None,
        prev_reward=None,
    )
    targets = PPOConfig(gae_lambda=0.5).build().targets(rollout, row(1, 1), {"discount": 0.5})
    # δ = (1 + 1 - 1, 1 + 2 - 2) = (1, 1)
    assert targets.advantage[:, 0].tolist() == [1.25, 1.0]
    assert targets.value_target[:, 0].tolist() == [2.25, 3.0]


def test_schedules_are_functions_of_progress() -> None:
    annealed = PPOConfig(learning_rate=0.4, clip=0.2, anneal_clip=True).build().hyperparameters(0.75)
    assert annealed["learning_rate"] == pytest.approx(0.1) and annealed["clip"] == pytest.approx(0.05)
    constant = PPOConfig(learning_rate=0.4, clip=0.2, anneal_learning_rate=False).build().hyperparameters(0.75)
    assert constant["learning_rate"] == 0.4 and constant["clip"] == 0.2


def test_target_kl_stops_only_beyond_it() -> None:
    algorithm = PPOConfig(target_kl=0.02).build()
    assert algorithm.stop_early({"policy/approx_kl": 0.021}) and not algorithm.stop_early({"policy/approx_kl": 0.019})
    assert not PPOConfig().build().stop_early({"policy/approx_kl": 100.0})


def test_normalization_is_the_configs_choice() -> None:
    assert PPOConfig().build().normalize_advantages
    assert not PPOConfig(normalize_advantages=False).build().normalize_advantages


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (PPOConfig(clip=0.0), "clip"),
        (PPOConfig(gae_lambda=1.5), "gae_lambda"),
        (PPOConfig(value_clip=-1.0), "value_clip"),
        (PPOConfig(target_kl=-0.1), "target_kl"),
        (PPOConfig(rollout=0), "rollout"),
        (PPOConfig(rollout=10, minibatches=7), "minibatches"),
        (PPOConfig(learning_rate=0.0), "learning_rate"),
        (PPOConfig(learning_rate=math.nan), "learning_rate"),
        (PPOConfig(learning_rate=9e-6, desired_kl=0.01), "learning_rate"),
        (PPOConfig(learning_rate=0.02, desired_kl=0.01), "learning_rate"),
        (PPOConfig(max_grad_norm=0.0), "max_grad_norm"),
        (PPOConfig(discount=1.01), "discount"),
        (PPOConfig(discount=-0.1), "discount"),
        (PPOConfig(entropy_coef=-0.01), "entropy_coef"),
        (PPOConfig(value_coef=-0.5), "value_coef"),
        (PPOConfig(optimizer=OptimizerConfig(eps=0.0)), "optimizer.eps"),
        (PPOConfig(optimizer=OptimizerConfig("rmsprop", decay=1.0)), "optimizer.decay"),
        (PPOConfig(optimizer=OptimizerConfig(betas=(0.9, 1.0))), "optimizer.betas"),
    ],
)
def test_settings_out_of_range_are_named(config: PPOConfig, setting: str) -> None:
    with pytest.raises(SettingsError, match=rf"algorithm\.{setting}="):
        config.validate(4, recurrent=False)


def test_recurrent_minibatches_hold_whole_sequences() -> None:
    config = PPOConfig(rollout=8, minibatches=4)
    config.validate(2, recurrent=False)
    with pytest.raises(SettingsError, match=r"algorithm\.minibatches=4 .*sequences"):
        config.validate(2, recurrent=True)


@pytest.mark.parametrize(
    ("kl", "before", "after"),
    [
        (0.0201, 3e-4, 2e-4),
        (0.02, 3e-4, 3e-4),
        (0.005, 3e-4, 3e-4),
        (0.0049, 2e-4, 3e-4),
        (0.0, 3e-4, 3e-4),  # an unchanged policy says nothing
        (1.0, 1.2e-5, 1e-5),
        (0.001, 9e-3, 1e-2),
    ],
)
def test_the_learning_rate_follows_the_divergence(kl: float, before: float, after: float) -> None:
    algorithm = PPOConfig(desired_kl=0.01).build()
    assert algorithm.adapt({"learning_rate": before}, {"policy/kl": kl}) == {"learning_rate": pytest.approx(after)}
    assert PPOConfig().build().adapt({"learning_rate": before}, {}) == {}
    assert "policy/kl" in algorithm.metric_names and "policy/kl" not in PPO.metric_names


def test_the_divergence_by_hand() -> None:
    """KL((1/2, 1/4, 1/8, 1/8) ‖ uniform) is 2 - 1.75 bits, in each of the four valid samples."""
    p = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    batch = hand_batch(policy=p.log().expand(1, 5, 4))
    model: Any = zero_model()
    model.distribution = make_distribution(spaces.Discrete(4))
    loss = PPOConfig(desired_kl=0.01).build().loss(model, batch, HYPER)
    assert float(loss.metrics["policy/kl"]) == pytest.approx(4 * 0.25 * math.log(2))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4),
        spaces.MultiDiscrete([3, 2]),
        spaces.Box(-1, 1, (2,)),
        spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
    ],
)
def test_divergences_are_torch_s(space: spaces.Space[Any]) -> None:
    distribution: Any = make_distribution(space)
    p, q = 0.5 * torch.randn(2, 6, distribution.num_params, generator=torch.Generator().manual_seed(1))

    def of(params: torch.Tensor) -> list[Any]:
        if isinstance(space, spaces.Box):
            return [Normal(params[:, :2], params[:, 2:].exp())]
        if isinstance(space, spaces.Discrete):
            return [Categorical(logits=params)]
        if isinstance(space, spaces.MultiDiscrete):
            return [Categorical(logits=params[:, :3]), Categorical(logits=params[:, 3:])]
        return [Categorical(logits=params[:, :3]), Normal(params[:, 3:5], params[:, 5:].exp())]

    wanted = [kl_divergence(a, b) for a, b in zip(of(p), of(q), strict=True)]
    total = sum(each.sum(-1) if each.dim() > 1 else each for each in wanted)
    torch.testing.assert_close(distribution.kl(p, q), total)
    assert not distribution.kl(p, p).abs().max() > 1e-6


def test_what_does_not_go_with_desired_kl_is_refused() -> None:
    experiment = recipes.ppo_cartpole().replace(**{"algorithm.desired_kl": 0.01})
    assert not Agent(experiment.replace(precision="portable")).kernels
    both = experiment.replace(**{"algorithm.anneal": {"learning_rate": "cosine"}})
    for wrong, word in ((both, "anneal"), (experiment.replace(**{"scheme.gradient_lag": 1}), "gradient_lag")):
        with pytest.raises(SettingsError, match=f"desired_kl=0.01.*{word}"):
            wrong.validate()
