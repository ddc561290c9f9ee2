from __future__ import annotations

import math

import pytest
import torch
from linear_actor import LinearActor

from lockstep.algorithms import A2CConfig, Batch
from lockstep.core.rollout import Rollout


def test_targets_are_n_step_returns_and_their_distance_from_the_value() -> None:
    never = torch.zeros(2, 1, dtype=torch.bool)
    rollout = Rollout(
        obs=torch.zeros(3, 1, 3),
        start=torch.zeros(3, 1, dtype=torch.bool),
        action=torch.zeros(2, 1),
        reward=torch.full((2, 1), 1000.0),
        log_prob=torch.zeros(2, 1),
        value=torch.tensor([[1.0], [2.0], [4.0]]),
        terminated=never,
        truncated=never,
        valid=~never,
        core_state=torch.zeros(1, 0),
        prev_action=None,
        prev_reward=None,
    )
    targets = A2CConfig().build().targets(rollout, torch.ones(2, 1), {"discount": 0.5})
    assert targets.value_target[:, 0].tolist() == [1 + 0.5 * 3, 1 + 2]
    assert targets.advantage[:, 0].tolist() == [1.5, 1.0]


def test_loss_by_hand() -> None:
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    batch = Batch(
        obs=torch.zeros(1, 3, 3, dtype=torch.float64),
        start=nothing,
        prev_action=None,
        prev_reward=None,
        state=torch.zeros(3, 0),
        action=torch.zeros(1, 3, dtype=torch.int64),
        reward=torch.zeros(1, 3),
        log_prob=torch.zeros(1, 3),
        value=torch.zeros(1, 3),
        terminated=nothing,
        truncated=nothing,
        valid=torch.tensor([[True, True, False]]),
        advantage=torch.tensor([[2.0, -0.5, 9.0]]),
        value_target=torch.tensor([[1.0, 3.0, 9.0]]),
    )
    model = LinearActor(torch.zeros(5, 3, dtype=torch.float64))
    hyper = {"discount": 0.9, "entropy_coef": 0.1, "value_coef": 0.25}
    loss = A2CConfig().build().loss(model, batch, hyper)
    assert float(loss.metrics["loss/policy"]) == pytest.approx(1.5 * math.log(4))
    assert float(loss.metrics["loss/value"]) == pytest.approx(0.5 * (1 + 9))
    expected = 1.5 * math.log(4) + 0.25 * 5 - 0.1 * 2 * math.log(4)
    assert float(loss.total.detach()) == pytest.approx(expected)


def test_defaults_are_those_of_baselines() -> None:
    config = A2CConfig()
    assert (config.rollout, config.epochs, config.minibatches, config.learning_rate) == (5, 1, 1, 7e-4)
    assert (config.optimizer.name, config.optimizer.decay, config.optimizer.eps) == ("rmsprop_tf", 0.99, 1e-5)
    assert config.value_coef * 0.5 == 0.5  # of the squared error: the value loss has the half already
    assert not config.build().normalize_advantages
    assert A2CConfig(normalize_advantages=True).build().normalize_advantages
