"""A user's loss that is added to an algorithm's, without a second forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_actor import make_batch, make_model
from torch import Tensor

from lockstep.algorithms import A2CConfig, APPOConfig, Batch, IMPALAConfig, OnPolicyConfig, PPOConfig
from lockstep.algorithms.losses import masked_sum
from lockstep.algorithms.rnd import with_curiosity
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.models import ModelOutput, PolicyModel
from lockstep.models.rnd import RNDConfig

HYPER = {"discount": 0.9, "entropy_coef": 0.01, "value_coef": 0.5, "clip": 0.2}


def with_loss(config: OnPolicyConfig) -> Any:
    """The algorithm, and one like it whose features should equal the reward in their sum."""

    def auxiliary_loss(self: Any, model: PolicyModel, output: ModelOutput, batch: Batch) -> Tensor:
        assert output.features is not None
        weight = model.weight  # type: ignore[union-attr]
        error_t = (output.features @ weight[0])[: len(batch.reward)] - batch.reward  # type: ignore[index]
        return 3.0 * masked_sum(error_t.square(), batch.valid)

    plain = type(config.build())
    return plain(config), type("Own", (plain,), {"auxiliary_loss": auxiliary_loss})(config)


@pytest.mark.parametrize("config", [PPOConfig(), A2CConfig(), IMPALAConfig(), APPOConfig()])
def test_it_is_added_to_the_loss_and_its_gradient(config: OnPolicyConfig) -> None:
    plain, own = with_loss(config)
    model, batch = make_model(), make_batch(plain)
    calls: list[Any] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    losses = [each.loss(model, batch, HYPER) for each in (plain, own)]
    assert len(calls) == 2, "no second forward pass"
    gradients = [torch.autograd.grad(loss.total, model.weight)[0] for loss in losses]
    steps = len(batch.reward)
    # By hand: d/dw of 3 (x w - r)^2 is 6 (x w - r) x, summed over valid samples.
    x, valid = batch.obs[:steps], batch.valid.unsqueeze(-1)
    error = x @ model.weight[0].detach() - batch.reward
    by_hand = torch.zeros_like(model.weight)
    by_hand[0] = (6 * error.unsqueeze(-1) * x * valid).sum((0, 1))
    torch.testing.assert_close(gradients[1] - gradients[0], by_hand)
    expected = 3 * (error.square() * batch.valid).sum()
    assert float(losses[1].metrics["loss/auxiliary"]) == pytest.approx(float(expected))
    assert {**losses[0].metrics, "loss/auxiliary": 0}.keys() == losses[1].metrics.keys()
    assert set(own.metric_names) == {*plain.metric_names, "loss/auxiliary"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [(0.0, "returned a float"), (torch.zeros(1, 4), r"a Tensor of shape \[1, 4\]"), ((), "a tuple")],
)
def test_what_is_no_scalar_is_refused_by_name(answer: Any, words: str) -> None:
    own: Any = type("Own", (type(A2CConfig().build()),), {"auxiliary_loss": lambda *_: answer})(A2CConfig())
    with pytest.raises(SettingsError, match=f"Own.auxiliary_loss .*{words}"):
        own.loss(make_model(), make_batch(own), HYPER)


def test_none_adds_nothing() -> None:
    plain = A2CConfig().build()
    own: Any = type("Own", (type(plain),), {"auxiliary_loss": lambda *_: None})(A2CConfig())
    model, batch = make_model(), make_batch(plain)
    losses = [each.loss(model, batch, HYPER) for each in (plain, own)]
    assert losses[0].total == losses[1].total and losses[1].metrics["loss/auxiliary"] == 0


def test_its_metric_is_listed_beside_those_of_settings() -> None:
    _, own = with_loss(PPOConfig(desired_kl=0.01))
    assert {"loss/auxiliary", "policy/kl"} < set(own.metric_names)


def test_networks_of_both_kinds_are_refused() -> None:
    config = load_object("examples/auxiliary_loss.py:PredictingConfig")(rnd=RNDConfig(coef=0.5))
    with pytest.raises(SettingsError, match=r"rnd.coef=0.5 needs the model's companion"):
        with_curiosity(config.build())
