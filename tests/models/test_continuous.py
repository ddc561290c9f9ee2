"""Scaled actions: their densities, bounds and exploration; and noise that drifts."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from lockstep.algorithms.offpolicy import drifting
from lockstep.config.settings import SettingsError
from lockstep.models import ActorCritic, ActorCriticConfig
from lockstep.models.action_spaces import make_distribution
from lockstep.models.arithmetic import portable_operations
from lockstep.models.base import Exploring
from lockstep.models.capture import Inference
from lockstep.models.continuous import Deterministic, DiagonalGaussian, SquashedGaussian
from lockstep.models.distributions import Categorical
from lockstep.portable.numbers import portable_numbers

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
KINDS = (Deterministic, DiagonalGaussian, SquashedGaussian)


@pytest.mark.parametrize("kind", KINDS)
def test_actions_become_the_environments(kind: type[Deterministic]) -> None:
    distribution = kind(BOX)
    sent = distribution.to_env(np.array([[-1, -1], [0, 0], [1, 1], [-9, 9]], np.float32))
    np.testing.assert_allclose(sent, [[-2, 0], [0, 0.5], [2, 1], [-2, 1]])
    assert sent.dtype == np.float32 and all(BOX.contains(row) for row in sent)


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_is_uniform_within_bounds(kind: type[Deterministic]) -> None:
    distribution = kind(BOX)
    assert isinstance(distribution, Exploring)
    noise = (torch.arange(1000) + 0.5).div(1000).unsqueeze(-1).expand(-1, 2)
    action = distribution.uniform(torch.zeros(1000, distribution.num_params), noise)
    torch.testing.assert_close(action.sort(0).values, (2 * noise - 1))


def test_uniform_discrete_actions_are_equally_likely() -> None:
    noise = torch.rand(30_000, 3, generator=torch.Generator().manual_seed(1))
    shares = Categorical(spaces.Discrete(3)).uniform(torch.zeros(len(noise), 3), noise).bincount() / len(noise)
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3), rtol=0, atol=0.01)


def test_squashed_densities_are_torchs() -> None:
    distribution = SquashedGaussian(BOX)
    params = distribution.bound(torch.randn(500, 4, generator=torch.Generator().manual_seed(2)))
    noise = torch.rand(500, 2, generator=torch.Generator().manual_seed(3))
    action, log_prob = distribution.sample_with_log_prob(params, noise)
    mean, std = params[:, :2].double(), params[:, 2:].double().exp()
    u = mean + std * torch.special.ndtri(noise.double())
    slope = torch.log1p(-torch.tanh(u).square())
    torch.testing.assert_close(action.double(), torch.tanh(u), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(log_prob.double(), (Normal(mean, std).log_prob(u) - slope).sum(-1), rtol=1e-3, atol=1e-3)
    inner = action.abs().amax(-1) < 0.99
    torch.testing.assert_close(distribution.log_prob(params, action)[inner], log_prob[inner], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(distribution.sample(params, noise), action)
    torch.testing.assert_close(distribution.mode(params), torch.tanh(params[:, :2]))


@pytest.mark.parametrize("kind", KINDS)
def test_acting_has_the_bits_of_portable_operations_without_them(kind: type[Deterministic]) -> None:
    distribution = kind(BOX)
    draw = torch.Generator().manual_seed(5)
    params = distribution.bound(torch.randn(500, distribution.num_params, generator=draw))
    noise = torch.rand(500, 2, generator=draw)

    def act() -> list[torch.Tensor]:
        return [distribution.sample(params, noise), distribution.mode(params), distribution.uniform(params, noise)]

    with portable_operations():
        expected = act()
    with portable_numbers() if distribution.exact else portable_operations():
        found = act()
    assert all(map(torch.equal, found, expected))


def test_samples_of_a_squashed_distribution_have_gradients() -> None:
    params = torch.tensor([0.3, -0.2, -0.5, 0.1], requires_grad=True)
    noise = torch.tensor([0.2, 0.7])
    for context in (contextlib.nullcontext(), portable_operations()):
        with context:
            found, _ = SquashedGaussian(BOX).sample_with_log_prob(params, noise)
            (expected,) = torch.autograd.grad(found.sum(), params)
            (gradient,) = torch.autograd.grad(SquashedGaussian(BOX).sample(params, noise).sum(), params)
        torch.testing.assert_close(gradient, expected)


def test_entropies_are_mean_surprises() -> None:
    params = torch.tensor([0.3, -0.2, -0.5, 0.1])
    noise = torch.rand(100_000, 2, generator=torch.Generator().manual_seed(4))
    for distribution in (SquashedGaussian(BOX), DiagonalGaussian(BOX)):
        many = params.expand(len(noise), -1)
        log_prob = distribution.log_prob(many, distribution.sample(many, noise))
        assert float(distribution.entropy(params)) == pytest.approx(-float(log_prob.mean()), abs=0.02)
    normal = Normal(params[:2], params[2:].exp())
    assert float(DiagonalGaussian(BOX).entropy(params)) == pytest.approx(float(normal.entropy().sum()))
    squashed = TransformedDistribution(normal, [TanhTransform()])
    action = torch.tensor([0.5, -0.7])
    expected = float(squashed.log_prob(action).sum())
    assert float(SquashedGaussian(BOX).log_prob(params, action)) == pytest.approx(expected, abs=1e-4)


def test_squashed_entropy_is_right_at_the_widest() -> None:
    gaussian = make_distribution(BOX, squash=True)
    params = torch.tensor([0.3, -2.0, 2.0, 2.0])
    assert float(SquashedGaussian(BOX).entropy(params)) == pytest.approx(float(gaussian.entropy(params)), abs=1e-4)


def test_deterministic_actions_explore_by_noise_within_bounds() -> None:
    distribution, generator = Deterministic(BOX), torch.Generator().manual_seed(5)
    params, noise = torch.full((20_000, 2), 0.3), torch.rand(20_000, 2, generator=generator)
    explored = distribution.explore(params, noise, torch.full((20_000, 1), 0.1))
    assert float(explored.mean()) == pytest.approx(0.3, abs=0.01)
    assert float(explored.std()) == pytest.approx(0.1, abs=0.01)
    assert torch.equal(distribution.sample(params, noise), params) and torch.equal(distribution.mode(params), params)
    assert distribution.explore(params, noise, torch.full((20_000, 1), 5.0)).abs().max() == 1.0


def test_noise_that_drifts_is_an_ornstein_uhlenbeck_process() -> None:
    theta, steps = 0.15, 20_000
    noise = torch.from_numpy(np.random.default_rng(6).random((steps, 1, 2), np.float32))
    drifted, last = drifting(noise, torch.zeros(1, 2), theta)
    x, expected = 0.0, []
    for t in range(steps):
        x = (1 - theta) * x + math.sqrt(1 - (1 - theta) ** 2) * float(torch.special.ndtri(noise[t, 0, 0].double()))
        expected.append(x)
    normal = torch.special.ndtri(drifted[:, 0, 0].double())
    torch.testing.assert_close(normal, torch.tensor(expected, dtype=torch.float64), rtol=1e-3, atol=1e-3)
    assert float(last[0, 0]) == pytest.approx(expected[-1], abs=1e-4)
    assert float(normal.std()) == pytest.approx(1.0, abs=0.05), "one step by itself is standard normal"
    assert float((normal[1:] * normal[:-1]).mean()) == pytest.approx(1 - theta, abs=0.05)
    halves = drifting(noise[:9], torch.zeros(1, 2), theta)
    rest, end = drifting(noise[9:30], halves[1], theta)
    assert torch.equal(torch.cat([halves[0], rest]), drifting(noise[:30], torch.zeros(1, 2), theta)[0])
    assert torch.equal(end, drifting(noise[:30], torch.zeros(1, 2), theta)[1])


def build(config: ActorCriticConfig, observations: Any, actions: Any = BOX, **settings: Any) -> ActorCritic:
    arguments = {"precision": "fp32", "normalize_observations": False, "seed": 1, **settings}
    return config.build(observations, actions, **arguments)


@pytest.mark.parametrize("std", [0.3, 1.0])
def test_a_normal_policy_begins_with_the_deviation_that_is_asked_for_in_every_state(std: float) -> None:
    config = ActorCriticConfig(policy="gaussian", initial_std=std, layer_norm=True, activation="elu")
    model, obs = build(config, spaces.Box(-9, 9, (5,))), 3 * torch.randn(1, 500, 5)
    mean, log_std = DiagonalGaussian(BOX, std).split(model.actor(obs))
    torch.testing.assert_close(log_std.exp(), torch.full((1, 500, 2), std), rtol=0.03, atol=0)
    torch.testing.assert_close(mean, torch.zeros(1, 500, 2), rtol=0, atol=0.03)


def test_a_squashed_policy_begins_like_any_other_layers() -> None:
    model = build(ActorCriticConfig(), spaces.Box(-9, 9, (5,)))
    bound = 256**-0.5
    assert 0.99 * bound < model.actor.layers.weights[-1].detach().abs().max().item() <= bound


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_acting_copies_give_the_models_bits_without_critics(precision: str) -> None:
    observations = spaces.Dict({"image": spaces.Box(0, 255, (1, 40, 40), np.uint8), "speed": spaces.Box(-1, 1, (3,))})
    config = ActorCriticConfig(hidden_sizes=(16,), dense_size=8)
    model = build(config, observations, precision=precision, normalize_observations=True)
    model.set_observation_statistics(torch.full((3,), 0.5), torch.full((3,), 2.0))
    obs = {"image": torch.randint(0, 256, (1, 4, 1, 40, 40), dtype=torch.uint8), "speed": torch.randn(1, 4, 3)}
    acting = model.for_acting()
    assert not any(name.startswith("critics") for name, _ in acting.named_parameters())
    start, state = torch.zeros(1, 4, dtype=torch.bool), torch.zeros(4, 0)
    with torch.inference_mode():
        expected, _ = model(obs, start, state)
        out, _ = Inference(acting)(obs, start, state, None, None)
    assert torch.equal(out.policy, expected.policy) and out.policy.dtype == torch.float32
    assert not torch.equal(out.policy, model(obs | {"speed": obs["speed"] + 1}, start, state)[0].policy), (
        "vectors are seen"
    )
    values = model.q(obs, torch.rand(1, 4, 2))
    assert values.shape == (2, 1, 4) and values.dtype == torch.float32
    assert not torch.equal(values[0], values[1]), "critics differ"


def test_many_actions_of_one_state() -> None:
    model = build(ActorCriticConfig(hidden_sizes=(16,)), spaces.Box(-1, 1, (3,)))
    obs, actions = torch.randn(1, 4, 3), torch.rand(6, 4, 2)
    together = model.q(obs, actions)
    assert together.shape == (2, 6, 4)
    for each, action in enumerate(actions):
        torch.testing.assert_close(together[:, each : each + 1], model.q(obs, action.unsqueeze(0)))


@pytest.mark.parametrize(
    ("config", "actions", "hint"),
    [
        (ActorCriticConfig(), spaces.Box(-np.inf, np.inf, (2,)), "no bounds"),
        (ActorCriticConfig(policy="deterministic"), spaces.Discrete(3), "only squashed"),
        (ActorCriticConfig(), spaces.MultiDiscrete([2, 3]), "Use PPO, which supports others"),
        (ActorCriticConfig(), spaces.Box(-1, 1, (0,)), "nothing to choose"),
        (ActorCriticConfig(critics=0), BOX, "critics"),
        (ActorCriticConfig(initial_std=0.001), BOX, "between 0.01 and 5"),
        (ActorCriticConfig(initial_std=100.0), BOX, "between 0.01 and 5"),
    ],
)
def test_what_it_cannot_do_is_refused(config: ActorCriticConfig, actions: Any, hint: str) -> None:
    with pytest.raises(SettingsError, match=hint):
        build(config, spaces.Box(-1, 1, (3,)), actions)
