"""What must hold for every loss: sums over valid samples, slices that add up, and the gradient of the formula."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from linear_actor import ACTIONS, make_batch, make_model
from torch import Tensor

from lockstep.algorithms import (
    A2C,
    APPO,
    IMPALA,
    PPO,
    A2CConfig,
    APPOConfig,
    Batch,
    IMPALAConfig,
    LossOutput,
    OnPolicy,
    PPOConfig,
)
from lockstep.algorithms.losses import (
    approximate_kl,
    explained_variance,
    log_ratio,
    masked_sum,
    standardized,
    value_metrics,
)
from lockstep.algorithms.returns import vtrace

ALGORITHMS: dict[str, OnPolicy[Any]] = {
    "a2c": A2CConfig().build(),
    "ppo": PPOConfig(clip=0.3).build(),
    "ppo with value clip": PPOConfig(clip=0.3, value_clip=0.2).build(),
    "impala": IMPALAConfig(vtrace_lambda=0.9, rho_clip=1.5).build(),
    "appo": APPOConfig(clip=0.3).build(),
    "appo with value clip": APPOConfig(clip=0.3, value_clip=0.2, vtrace_lambda=0.9).build(),
}
HYPER = {"discount": 0.9, "entropy_coef": 0.03, "value_coef": 0.7, "clip": 0.3}

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())


def gradient_of(algorithm: OnPolicy[Any], batch: Batch) -> tuple[LossOutput, Tensor]:
    model = make_model()
    loss = algorithm.loss(model, batch, HYPER)
    (gradient,) = torch.autograd.grad(loss.total, [model.weight])
    return loss, gradient


class SlowLoss:
    """The loss in plain Python, sample by sample; targets are fixed by the weights that it is made with."""

    def __init__(self, algorithm: OnPolicy[Any], batch: Batch, weight: np.ndarray) -> None:
        self.config, self.batch = algorithm.config, batch
        self.samples = np.argwhere(batch.valid.numpy()).tolist()
        if algorithm.needs_targets:
            assert batch.advantage is not None and batch.value_target is not None
            self.advantage, self.value_target = batch.advantage.numpy(), batch.value_target.numpy()
            return
        log_ratio_t = torch.zeros_like(batch.log_prob)
        for t, b in self.samples:
            log_ratio_t[t, b] = self.log_prob(weight, t, b) - float(batch.log_prob[t, b])
        trace = vtrace(
            log_ratio_t,
            batch.reward,
            batch.obs @ torch.from_numpy(weight[ACTIONS]),
            batch.terminated,
            batch.truncated,
            HYPER["discount"],
            lambda_=self.config.vtrace_lambda,
            rho_clip=self.config.rho_clip,
            c_clip=self.config.c_clip,
        )
        weighted = isinstance(algorithm, IMPALA)
        self.advantage = (trace.pg_advantage if weighted else trace.advantage).numpy()
        self.value_target = trace.vs.numpy()

    def probabilities(self, weight: np.ndarray, t: int, b: int) -> list[float]:
        logits = weight[:ACTIONS] @ self.batch.obs[t, b].numpy()
        exponentials = [math.exp(x) for x in logits]
        return [x / sum(exponentials) for x in exponentials]

    def log_prob(self, weight: np.ndarray, t: int, b: int) -> float:
        return math.log(self.probabilities(weight, t, b)[int(self.batch.action[t, b])])

    def __call__(self, weight: np.ndarray) -> float:
        total = 0.0
        for t, b in self.samples:
            log_prob, advantage = self.log_prob(weight, t, b), self.advantage[t, b]
            if isinstance(self.config, (PPOConfig, APPOConfig)):
                ratio, clip = math.exp(log_prob - float(self.batch.log_prob[t, b])), HYPER["clip"]
                low = 1 - clip if isinstance(self.config, PPOConfig) else 1 / (1 + clip)
                clipped = min(max(ratio, low), 1 + clip)
                total -= min(ratio * advantage, clipped * advantage)
            else:
                total -= log_prob * advantage
            value = float(weight[ACTIONS] @ self.batch.obs[t, b].numpy())
            errors = [(value - self.value_target[t, b]) ** 2]
            limit = getattr(self.config, "value_clip", 0.0)
            if limit:
                old = float(self.batch.value[t, b])
                errors.append((min(max(value, old - limit), old + limit) - self.value_target[t, b]) ** 2)
            total += HYPER["value_coef"] * 0.5 * max(errors)
            total += HYPER["entropy_coef"] * sum(p * math.log(p) for p in self.probabilities(weight, t, b))
        return total


@every_algorithm
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_formula(algorithm: OnPolicy[Any], seed: int) -> None:
    batch, weight = make_batch(algorithm, seed), make_model().weight.detach().numpy()
    loss, gradient = gradient_of(algorithm, batch)
    slow = SlowLoss(algorithm, batch, weight)
    assert float(loss.total.detach()) == pytest.approx(slow(weight), rel=1e-10)
    numeric, step = np.zeros_like(weight), 1e-6
    for index in np.ndindex(*weight.shape):
        shift = np.zeros_like(weight)
        shift[index] = step
        numeric[index] = (slow(weight + shift) - slow(weight - shift)) / (2 * step)
    np.testing.assert_allclose(gradient.numpy(), numeric, rtol=1e-6, atol=1e-7)


@every_algorithm
def test_invalid_slots_change_no_bit(algorithm: OnPolicy[Any]) -> None:
    batch = make_batch(algorithm)
    rng = np.random.default_rng(7)

    def with_garbage(leaf: Tensor | None) -> Tensor | None:
        if leaf is None:
            return None
        noise = torch.from_numpy(rng.normal(scale=1e4, size=leaf.shape))
        return torch.where(batch.valid, leaf, noise.to(leaf.dtype))

    spoiled = batch.replace(
        action=torch.where(batch.valid, batch.action, (batch.action + 1) % ACTIONS),
        **{name: with_garbage(getattr(batch, name)) for name in ("reward", "log_prob", "value")},
        **{name: with_garbage(getattr(batch, name)) for name in ("advantage", "value_target")},
    )
    loss, gradient = gradient_of(algorithm, batch)
    spoiled_loss, spoiled_gradient = gradient_of(algorithm, spoiled)
    assert torch.equal(loss.total, spoiled_loss.total)
    assert torch.equal(gradient, spoiled_gradient)
    assert all(torch.equal(loss.metrics[name], spoiled_loss.metrics[name]) for name in algorithm.metric_names)
    # The same garbage in valid slots does show.
    revealed, _ = gradient_of(algorithm, spoiled.replace(valid=torch.ones_like(batch.valid)))
    assert not torch.isclose(revealed.total, loss.total)


@every_algorithm
def test_slices_add_up_to_the_whole(algorithm: OnPolicy[Any]) -> None:
    batch = make_batch(algorithm)
    loss, gradient = gradient_of(algorithm, batch)
    whole = batch.replace(state=None)
    parts = [
        gradient_of(algorithm, whole[:, env].replace(state=batch.state[env])) for env in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(part.total for part, _ in parts), loss.total)
    torch.testing.assert_close(sum(part_gradient for _, part_gradient in parts), gradient)
    for name in algorithm.metric_names:
        torch.testing.assert_close(sum(part.metrics[name] for part, _ in parts), loss.metrics[name])


@every_algorithm
def test_metrics_are_detached_scalars_in_the_stated_order(algorithm: OnPolicy[Any]) -> None:
    loss, _ = gradient_of(algorithm, make_batch(algorithm))
    assert tuple(loss.metrics) == algorithm.metric_names
    assert all(metric.shape == () and not metric.requires_grad for metric in loss.metrics.values())
    summary = algorithm.summarize(dict.fromkeys(algorithm.metric_names, 1.0))
    assert {"loss/policy", "loss/value", "policy/entropy", "value/explained_variance"} <= summary.keys()


@every_algorithm
def test_all_invalid_is_a_loss_of_zero(algorithm: OnPolicy[Any]) -> None:
    batch = make_batch(algorithm)
    loss, gradient = gradient_of(algorithm, batch.replace(valid=torch.zeros_like(batch.valid)))
    assert float(loss.total.detach()) == 0.0 and not gradient.any()
    assert not any(loss.metrics.values())


def test_masked_sum_lets_no_infinity_through() -> None:
    x = torch.tensor([[1.0, torch.inf], [torch.nan, 2.0]], requires_grad=True)
    total = masked_sum(x, torch.tensor([[True, False], [False, True]]))
    total.backward()
    assert float(total.detach()) == 3.0
    assert x.grad is not None and x.grad.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_standardized_by_hand() -> None:
    valid_t = torch.tensor([[True, True], [False, True]])
    of_valid_t = standardized(torch.tensor([[1.0, 4.0], [math.nan, 7.0]]), valid_t)[valid_t]
    assert of_valid_t.tolist() == [-1.0, 0.0, 1.0]  # a mean of 4, a sample deviation of 3
    for none_or_one in (0, 1):
        valid_t = torch.arange(2)[:, None] < none_or_one
        assert standardized(torch.tensor([[5.0], [9.0]]), valid_t)[valid_t].tolist() == [0.0] * none_or_one


def test_log_ratio_of_a_meaningless_action_is_zero() -> None:
    ratio = log_ratio(torch.tensor([[-1.0, 0.0]]), torch.tensor([[-3.0, -1e30]]), torch.tensor([[True, False]]))
    assert ratio.tolist() == [[2.0, 0.0]]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_action_that_became_likely_beyond_measure_leaves_gradients_finite(advantage: float) -> None:
    """Clipped, the ratio's gradient is 0, which times an infinite ratio would be none."""
    log_prob = torch.tensor([[100.0]], requires_grad=True)
    ratio = log_ratio(log_prob, torch.tensor([[0.0]]), torch.tensor([[True]])).exp()
    torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum().backward()
    assert log_prob.grad is not None and float(log_prob.grad) == 0.0


def test_approximate_kl_by_hand_and_in_expectation() -> None:
    valid = torch.tensor([[True, True, False]])
    kl = approximate_kl(torch.tensor([[0.0, math.log(2.0), 5.0]]), valid)
    assert float(kl) == pytest.approx(2 - 1 - math.log(2))
    # Under μ the estimator's mean is KL(μ ‖ π) exactly.
    mu, pi = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    terms = [approximate_kl((pi / mu).log()[None, i : i + 1], valid[:, :1]) for i in range(3)]
    expected = (mu * (mu / pi).log()).sum()
    torch.testing.assert_close(sum(p * term for p, term in zip(mu, terms, strict=True)), expected)


def test_explained_variance_is_that_of_the_samples() -> None:
    rng = np.random.default_rng(3)
    target, error = rng.normal(2.0, 3.0, size=(5, 8)), rng.normal(0.5, 1.0, size=(5, 8))
    valid = rng.random((5, 8)) < 0.8
    sums = value_metrics(*(torch.from_numpy(x) for x in (target - error, target, valid)))
    means = {name: float(value) / valid.sum() for name, value in sums.items()}
    summary = explained_variance({"loss/value": 7.0, **means})
    assert summary["value/explained_variance"] == pytest.approx(1 - error[valid].var() / target[valid].var())
    assert summary["value/target"] == pytest.approx(target[valid].mean())
    assert set(summary) == {"loss/value", "value/target", "value/explained_variance"}


def test_explained_variance_of_constant_targets_is_zero() -> None:
    ones = torch.ones(2, 2)
    sums = value_metrics(torch.zeros(2, 2), ones, ones.bool())
    assert explained_variance({name: float(value) / 4 for name, value in sums.items()})["value/explained_variance"] == 0


def test_every_config_builds_its_algorithm_and_is_frozen() -> None:
    for config, kind in ((A2CConfig(), A2C), (PPOConfig(), PPO), (IMPALAConfig(), IMPALA), (APPOConfig(), APPO)):
        algorithm = config.build()
        assert type(algorithm) is kind and algorithm.config is config and config.name == kind.__name__.lower()
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.rollout = 3  # type: ignore[misc]
