from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from linear_actor import LinearActor

from lockstep.algorithms import APPOConfig, Batch, IMPALAConfig
from lockstep.config.settings import SettingsError

HYPER = {"discount": 0.5, "entropy_coef": 0.1, "value_coef": 0.5, "clip": 0.25}


def hand_case() -> tuple[LinearActor, Batch]:
    """Two steps of one environment: π = 1/4, π/μ = (2, 0.5), rewards (1, 2), learned values (1, 2, 4)."""
    nothing = torch.zeros(2, 1, dtype=torch.bool)
    weight = torch.zeros(5, 3, dtype=torch.float64)
    weight[4, 0] = 1.0
    obs = torch.zeros(3, 1, 3, dtype=torch.float64)
    obs[:, 0, 0] = torch.tensor([1.0, 2.0, 4.0])
    batch = Batch(
        obs=obs,
        start=torch.zeros(3, 1, dtype=torch.bool),
        prev_action=None,
        prev_reward=None,
        state=torch.zeros(1, 0),
        action=torch.zeros(2, 1, dtype=torch.int64),
        reward=torch.tensor([[1.0], [2.0]], dtype=torch.float64),
        log_prob=torch.tensor([[math.log(0.125)], [math.log(0.5)]], dtype=torch.float64),
        value=torch.full((2, 1), 50.0, dtype=torch.float64),
        terminated=nothing,
        truncated=nothing,
        valid=~nothing,
        advantage=None,
        value_target=None,
    )
    return LinearActor(weight), batch


def test_impala_loss_by_hand() -> None:
    model, batch = hand_case()
    loss = IMPALAConfig().build().loss(model, batch, HYPER)
    # test_returns.py: vs = (2.5, 3), policy gradient advantages (1.5, 1). The collected values of 50 play no part.
    assert float(loss.metrics["loss/policy"]) == pytest.approx(math.log(4) * (1.5 + 1.0))
    assert float(loss.metrics["loss/value"]) == pytest.approx(0.5 * (1.5**2 + 1.0))
    assert float(loss.metrics["policy/rho"]) == pytest.approx(1.5)
    expected = math.log(4) * 2.5 + 0.5 * 0.5 * 3.25 - 0.1 * 2 * math.log(4)
    assert float(loss.total.detach()) == pytest.approx(expected)


def test_appo_loss_by_hand() -> None:
    model, batch = hand_case()
    loss = APPOConfig().build().loss(model, batch, HYPER)
    # Unweighted advantages (1.5, 2); ratios (2, 0.5) are clipped to [0.8, 1.25].
    assert float(loss.metrics["loss/policy"]) == pytest.approx(-(1.25 * 1.5 + 0.5 * 2))
    assert float(loss.metrics["policy/clip_fraction"]) == 2
    assert float(loss.metrics["loss/value"]) == pytest.approx(0.5 * (1.5**2 + 1.0))
    assert float(loss.metrics["policy/approx_kl"]) == pytest.approx((1 - math.log(2)) + (-0.5 + math.log(2)))


def test_appo_standardizes_advantages_by_hand() -> None:
    model, batch = hand_case()
    loss = APPOConfig(standardize_advantages=True).build().loss(model, batch, HYPER)
    # (1.5, 2) have a mean of 1.75 and a sample deviation of √(2 · 0.25²); ratios are (2, 0.5), clipped to [0.8, 1.25].
    low, high = -math.sqrt(0.5), math.sqrt(0.5)
    assert float(loss.metrics["loss/policy"]) == pytest.approx(-(2 * low + 0.5 * high))


def test_appo_value_clip_by_hand() -> None:
    model, batch = hand_case()
    loss = APPOConfig(value_clip=1.0).build().loss(model, batch, HYPER)
    # Values may move from 50 to 49 only, which is farther from the targets (2.5, 3) than (1, 2) are.
    assert float(loss.metrics["loss/value"]) == pytest.approx(0.5 * (46.5**2 + 46**2))


def test_impala_sums_and_appo_averages() -> None:
    assert not IMPALAConfig().build().mean_loss
    assert APPOConfig().build().mean_loss
    assert IMPALAConfig().build().bootstrap_inputs and APPOConfig().build().bootstrap_inputs


def test_impala_defaults_are_those_of_cleanba() -> None:
    config = IMPALAConfig()
    assert (config.rollout, config.minibatches, config.learning_rate, config.max_grad_norm) == (20, 4, 6e-4, 40.0)
    assert (config.optimizer.name, config.optimizer.decay, config.optimizer.eps) == ("rmsprop", 0.99, 0.01)
    assert (config.vtrace_lambda, config.rho_clip, config.c_clip) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
def test_settings_out_of_range_are_named(kind: type[IMPALAConfig] | type[APPOConfig]) -> None:
    for wrong, setting in (
        (kind(vtrace_lambda=-0.1), "vtrace_lambda"),
        (kind(rho_clip=0.5, c_clip=1.0), "c_clip"),
        (kind(c_clip=0.0), "c_clip"),
        (kind(minibatches=3), "minibatches"),
    ):
        with pytest.raises(SettingsError, match=rf"algorithm\.{setting}="):
            wrong.validate(4, recurrent=False)


def test_appo_clip_settings_out_of_range_are_named() -> None:
    for wrong, setting in ((APPOConfig(clip=-0.1), "clip"), (APPOConfig(value_clip=-0.1), "value_clip")):
        with pytest.raises(SettingsError, match=rf"algorithm\.{setting}="):
            wrong.validate(4, recurrent=False)


def test_a_single_sample_cannot_be_standardized() -> None:
    alone = APPOConfig(rollout=1, minibatches=4)
    alone.validate(4, recurrent=False)
    alone.validate(8, recurrent=False)
    dataclasses.replace(alone, standardize_advantages=True).validate(8, recurrent=False)
    with pytest.raises(SettingsError, match=r"algorithm\.standardize_advantages .*rollout=1 .*always 0"):
        dataclasses.replace(alone, standardize_advantages=True).validate(4, recurrent=False)


def test_sequences_stay_whole_without_a_recurrent_core() -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.minibatches=4 .*sequences"):
        IMPALAConfig(minibatches=4).validate(2, recurrent=False)


def test_advantages_from_outside_are_weighted_as_the_algorithms_own() -> None:
    outside = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    model, batch = hand_case()
    batch = batch.replace(advantage=outside)
    loss = IMPALAConfig().build().loss(model, batch, HYPER)
    assert float(loss.metrics["loss/policy"]) == pytest.approx(math.log(4) * (1.5 + 1.0 + 1.0 * 1 + 0.5 * 3))
    loss = APPOConfig().build().loss(model, batch, HYPER)
    assert float(loss.metrics["loss/policy"]) == pytest.approx(-(1.25 * (1.5 + 1) + 0.5 * (2 + 3)))
