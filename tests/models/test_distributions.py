from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution
from torch.distributions import Categorical as TorchCategorical

from lockstep.config.settings import SettingsError
from lockstep.models import Distribution, make_distribution
from lockstep.models.gaussian import bounded_log_std

MIXED = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,)), spaces.MultiDiscrete([2, 4])])


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(shape))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_categorical_by_hand() -> None:
    distribution = make_distribution(spaces.Discrete(3))
    params = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log() + 7
    assert distribution.log_prob(params, torch.tensor(2)).item() == pytest.approx(math.log(5 / 8))
    assert distribution.entropy(params).item() == pytest.approx(0.900256, abs=1e-6)
    assert distribution.mode(params).item() == 2
    assert distribution.action_shape == () and distribution.action_dtype == torch.int64


def test_categorical_equals_torch() -> None:
    distribution, params = make_distribution(spaces.Discrete(6)), 3 * normal(4, 5, 6)
    reference = TorchCategorical(logits=params)
    action = distribution.sample(params, uniform(4, 5, 6))
    assert action.shape == (4, 5)
    torch.testing.assert_close(distribution.log_prob(params, action), reference.log_prob(action))
    torch.testing.assert_close(distribution.entropy(params), reference.entropy())


def test_categorical_samples_with_its_probabilities() -> None:
    distribution, p = make_distribution(spaces.Discrete(4)), np.array([0.05, 0.15, 0.3, 0.5])
    params = torch.tensor(p).log().expand(20_000, 4)
    counts = np.bincount(distribution.sample(params, uniform(20_000, 4)).numpy(), minlength=4)
    assert chi_square(counts, p) < 16.27, "99.9% of fair samples of 4 cells stay below"


def test_gaussian_by_hand() -> None:
    distribution = make_distribution(spaces.Box(-np.inf, np.inf, (2,)))
    params = torch.tensor([1.0, 0.0, math.log(2), 0.0], dtype=torch.float64)
    log_prob = distribution.log_prob(params, torch.tensor([2.0, 0.0], dtype=torch.float64)).item()
    assert log_prob == pytest.approx((-0.125 - 0.693147 - 0.918939) + (-0.918939), abs=1e-6)
    assert distribution.entropy(params).item() == pytest.approx((1.418939 + 0.693147) + 1.418939, abs=1e-6)
    assert distribution.mode(params).tolist() == [1, 0]


def test_gaussian_equals_torch_and_samples_its_quantiles() -> None:
    distribution = make_distribution(spaces.Box(-1, 1, (3,)))
    params = normal(7, 6)
    reference = Normal(params[:, :3], params[:, 3:].exp())
    action = distribution.sample(params, uniform(7, 3))
    torch.testing.assert_close(distribution.log_prob(params, action), reference.log_prob(action).sum(-1))
    torch.testing.assert_close(distribution.entropy(params), reference.entropy().sum(-1))
    torch.testing.assert_close(reference.cdf(action), uniform(7, 3))


def test_unsquashed_actions_are_stored_unclipped_and_sent_clipped() -> None:
    distribution = make_distribution(
        spaces.Box(np.array([[-1.0, 0.0]], np.float32), np.array([[1.0, 2.0]], np.float32))
    )
    params = torch.tensor([9.0, 1.0, 0.0, 0.0])
    action = distribution.mode(params)
    assert action.tolist() == [9, 1]
    sent = distribution.to_env(action[None].numpy())
    assert sent.dtype == np.float32 and sent.tolist() == [[[1.0, 1.0]]]


def squashed() -> tuple[Distribution, Normal, TransformedDistribution, Tensor]:
    low, high = np.array([-3.0, 0.0]), np.array([5.0, 0.5])
    distribution = make_distribution(spaces.Box(low, high, dtype=np.float64), squash=True)
    params = torch.tensor([0.3, -1.0, -0.2, 0.5], dtype=torch.float64)
    base = Normal(params[:2], params[2:].exp())
    affine = AffineTransform(torch.tensor((low + high) / 2), torch.tensor((high - low) / 2))
    return distribution, base, TransformedDistribution(base, [TanhTransform(), affine]), params


def test_a_dimension_of_one_value_cannot_be_squashed_into() -> None:
    with pytest.raises(SettingsError, match=r"squash .*--model\.no-squash"):
        make_distribution(spaces.Box(np.array([0.0, 1.0]), np.array([2.0, 1.0]), dtype=np.float64), squash=True)


def test_squashed_log_prob_is_the_density_of_the_sent_action() -> None:
    distribution, base, reference, params = squashed()
    u = torch.tensor([[0.4, -1.3], [-0.9, 0.6]], dtype=torch.float64)
    h = 1e-6
    slope = (distribution.to_env((u + h).numpy()) - distribution.to_env((u - h).numpy())) / (2 * h)
    numeric = base.log_prob(u).sum(-1) - torch.from_numpy(np.log(slope)).sum(-1)
    log_prob = distribution.log_prob(params.expand(2, 4), u)
    torch.testing.assert_close(log_prob, numeric, rtol=1e-7, atol=1e-7)
    sent = torch.from_numpy(distribution.to_env(u.numpy()))
    torch.testing.assert_close(log_prob, reference.log_prob(sent).sum(-1), rtol=1e-7, atol=1e-7)


def test_squashed_log_prob_is_finite_far_out() -> None:
    distribution, _, _, params = squashed()
    far = torch.tensor([40.0, -40.0], dtype=torch.float64)
    assert torch.isfinite(distribution.log_prob(params, far))
    assert distribution.to_env(far[None].numpy()).tolist() == [[5.0, 0.0]]


def test_squashed_entropy_equals_the_integral() -> None:
    distribution, base, reference, params = squashed()
    u = torch.linspace(-12, 12, 20_001, dtype=torch.float64)[:, None].expand(-1, 2)
    sent = torch.from_numpy(distribution.to_env(u.numpy()))
    inside = (sent > torch.tensor([-3.0, 0.0])) & (sent < torch.tensor([5.0, 0.5]))
    density = torch.where(inside, base.log_prob(u).exp(), 0.0)
    log_prob = torch.where(inside, reference.log_prob(sent.clamp(-2.999999999, 4.999999999)), 0.0)
    integral = -(density * log_prob).sum() * (24 / 20_000)
    assert distribution.entropy(params).item() == pytest.approx(integral.item(), abs=1e-3)


@pytest.mark.parametrize("mean", [-5.0, 0.0, 0.37])
@pytest.mark.parametrize("log_std", [-20.0, -1.0, 2.0])
def test_squashed_entropy_is_as_good_in_the_widest_and_narrowest_distributions(mean: float, log_std: float) -> None:
    distribution = make_distribution(spaces.Box(-1, 1, (1,)), squash=True)
    z, step = np.linspace(-9, 9, 100_001, retstep=True)
    u = mean + math.exp(log_std) * z
    log_slope = 2 * (math.log(2) - u - np.logaddexp(0, -2 * u))
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    expected = log_std + 0.5 + 0.5 * math.log(2 * math.pi) + float((density * log_slope).sum() * step)
    entropy = distribution.entropy(torch.tensor([mean, log_std], dtype=torch.float64))
    assert entropy.item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("space", [spaces.Discrete(4), spaces.Box(-1, 1, (2,)), MIXED])
def test_extreme_noise_gives_finite_actions(space: spaces.Space, noise: float) -> None:
    distribution = make_distribution(space)
    params = torch.zeros(3, distribution.num_params)
    action = distribution.sample(params, torch.full((3, distribution.noise_size), noise))
    assert torch.isfinite(action.float()).all()
    assert torch.isfinite(distribution.log_prob(params, action)).all()


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize(("low", "high"), [(-100.0, 100.0), (10.0, 20.0), (0.0, 1.0)])
def test_actions_at_random_come_from_all_of_a_space_alike(low: float, high: float, squash: bool) -> None:
    distribution = make_distribution(spaces.Box(low, high, (2,)), squash=squash)
    sent = distribution.to_env(distribution.at_random(uniform(4000, 2)).numpy())
    quantiles = np.quantile((sent - low) / (high - low), [0.01, 0.25, 0.5, 0.75, 0.99], axis=0)
    assert np.abs(quantiles - np.array([[0.01], [0.25], [0.5], [0.75], [0.99]])).max() < 0.03


def test_joint_actions_at_random_are_those_of_their_parts() -> None:
    space = spaces.Tuple((spaces.Discrete(3, start=2), spaces.Box(5, 6, (2,)), spaces.MultiBinary(2)))
    distribution = make_distribution(space)
    allowed = torch.tensor([True, False, True, *[True] * 4]).expand(500, 7)
    discrete, box, binary = distribution.to_env(
        distribution.at_random(uniform(500, distribution.noise_size), allowed).numpy()
    )
    assert set(discrete.tolist()) == {2, 4} and set(binary.ravel().tolist()) == {0, 1}
    assert box.min() < 5.05 and box.max() > 5.95
    unbounded = make_distribution(spaces.Box(-np.inf, np.inf, (1,)))
    assert unbounded.at_random(uniform(4000, 1)).std() == pytest.approx(1, abs=0.05)


def test_masked_actions_are_impossible_in_every_respect() -> None:
    distribution = make_distribution(spaces.Discrete(4))
    params = normal(2000, 4).requires_grad_()
    allowed = torch.tensor([True, False, True, False])
    masked = distribution.mask(params, allowed.expand(2000, 4))
    action = distribution.sample(masked, uniform(2000, 4))
    assert set(action.tolist()) == {0, 2}
    reference = TorchCategorical(logits=params[:, [0, 2]])
    torch.testing.assert_close(distribution.log_prob(masked, action), reference.log_prob(action // 2))
    torch.testing.assert_close(distribution.entropy(masked), reference.entropy())
    (distribution.log_prob(masked, action).sum() + distribution.entropy(masked).sum()).backward()
    assert params.grad is not None and not params.grad[:, ~allowed].any() and params.grad[:, allowed].any()


@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete([3, 2]), spaces.MultiDiscrete(np.array([[2, 3], [4, 2]])), MIXED]
)
def test_joint_log_probs_and_entropies_add(space: spaces.Space) -> None:
    distribution, noise_used = make_distribution(space), 0
    params = normal(5, distribution.num_params)
    noise = uniform(5, distribution.noise_size)
    action = distribution.sample(params, noise)
    assert action.shape == (5, *distribution.action_shape) and action.dtype == distribution.action_dtype
    sizes = [3, 2] if space is MIXED else space.nvec.reshape(-1).tolist()  # type: ignore[attr-defined]
    log_prob, entropy, column, offset = torch.zeros(5), torch.zeros(5), 0, 0
    parts = ["discrete", "box", "discrete", "discrete"] if space is MIXED else ["discrete"] * len(sizes)
    for kind, size in zip(parts, [3, 2, 2, 4] if space is MIXED else sizes, strict=True):
        if kind == "box":
            reference, width = Normal(params[:, offset : offset + 2], params[:, offset + 2 : offset + 4].exp()), 2
            part = action[:, column : column + 2]
            log_prob, entropy = log_prob + reference.log_prob(part).sum(-1), entropy + reference.entropy().sum(-1)
            offset += 4
        else:
            reference, width = TorchCategorical(logits=params[:, offset : offset + size]), 1
            log_prob, entropy = log_prob + reference.log_prob(action[:, column]), entropy + reference.entropy()
            offset += size
        column, noise_used = column + width, noise_used + size
    assert (column, offset, noise_used) == (action.shape[1], params.shape[1], noise.shape[1])
    torch.testing.assert_close(distribution.log_prob(params, action), log_prob.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(distribution.entropy(params), entropy.double(), rtol=1e-5, atol=1e-5)


def test_tuple_actions_become_a_tuple_of_batches() -> None:
    distribution = make_distribution(MIXED)
    sent = distribution.to_env(np.array([[2, 0.5, -7.0, 1, 3], [0, 0.1, 0.2, 0, 2]], np.float32))
    assert [part.tolist() for part in sent] == [
        [2, 0],
        [[0.5, -1], [pytest.approx(0.1), pytest.approx(0.2)]],
        [[1, 3], [0, 2]],
    ]
    assert MIXED.contains(tuple(part[0] for part in sent))
    assert distribution.mask(torch.zeros(13), torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1]).bool()).nonzero().tolist() == [
        [2],
        [9],
    ]
    assert distribution.log_std_columns == (5, 6)


def test_encoded_actions() -> None:
    encoded = make_distribution(MIXED).encode(torch.tensor([2, 0.5, -7.0, 1, 3]))
    assert encoded.tolist() == [0, 0, 1, 0.5, -7, 0, 1, 0, 0, 0, 1]
    squash = make_distribution(spaces.Box(-1, 1, (1,)), squash=True)
    assert squash.encode(torch.tensor([50.0])).tolist() == [1]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=5),
        spaces.MultiDiscrete(np.array([[2, 3], [4, 2]])),
        spaces.MultiBinary(3),
        spaces.MultiBinary([2, 2]),
        spaces.Box(-1, 2, (2, 2), np.float64),
        MIXED,
    ],
)
def test_actions_are_members_of_their_space(space: spaces.Space) -> None:
    distribution = make_distribution(space)
    params = 3 * normal(50, distribution.num_params).float()
    sent = distribution.to_env(distribution.sample(params, uniform(50, distribution.noise_size).float()).numpy())
    for index in range(50):
        assert space.contains(tuple(part[index] for part in sent) if isinstance(sent, tuple) else sent[index])


@pytest.mark.parametrize(
    ("space", "squash", "text"),
    [
        (spaces.Text(5), False, "no action distribution"),
        (spaces.Box(0, 9, (2,), np.int64), False, "no action distribution"),
        (spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2))), False, "flat Tuple or Dict"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Tuple([spaces.Discrete(2)])]), False, "flat Tuple"),
        (spaces.Box(-np.inf, np.inf, (2,)), True, "no bounds"),
        (spaces.Box(-1, 1, (0,)), False, "nothing to choose"),
        (spaces.MultiDiscrete([]), False, "nothing to choose"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2, 0))]), False, "nothing to choose"),
    ],
)
def test_unsupported_spaces_are_named(space: spaces.Space, squash: bool, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        make_distribution(space, squash=squash)


@pytest.mark.parametrize(
    ("log_std", "gradient", "passed"),
    [
        (2.5, 1.0, 1.0),  # a step down leads back
        (2.5, -1.0, 0.0),  # a step up leads further out
        (-21.0, -1.0, -1.0),
        (-21.0, 1.0, 0.0),
        (2.0, -1.0, -1.0),
        (0.3, 0.7, 0.7),
        (0.3, -0.7, -0.7),
    ],
)
def test_beyond_their_bounds_log_deviations_get_only_gradients_that_lead_back(
    log_std: float, gradient: float, passed: float
) -> None:
    x = torch.tensor([log_std], requires_grad=True)
    bounded = bounded_log_std(x)
    assert float(bounded.detach()) == pytest.approx(min(max(log_std, -20.0), 2.0))
    bounded.backward(torch.tensor([gradient]))
    assert x.grad is not None and float(x.grad) == pytest.approx(passed)


def test_a_gaussian_pulls_its_deviation_back_into_the_bounds_by_the_gradient_of_its_density() -> None:
    distribution = make_distribution(spaces.Box(-np.inf, np.inf, (1,)))
    params = torch.tensor([0.5, 2.5], requires_grad=True)
    # log p = -z² / 2 - log σ - …, so d/d(log σ) is z² - 1, which lies below 0 for an action near the mean.
    near, far = torch.tensor([1.0]), torch.tensor([0.5 + 2 * math.exp(2)])
    (-distribution.log_prob(params, near)).backward()
    assert params.grad is not None
    assert float(params.grad[1]) == pytest.approx(1 - (0.5 * math.exp(-2)) ** 2, abs=1e-6)
    params.grad = None
    (-distribution.log_prob(params, far)).backward()
    assert params.grad is not None and float(params.grad[1]) == 0, "z = 2: this one leads further out"


@pytest.mark.parametrize(
    ("bounds", "std", "squash", "told"),
    [
        (2000, 1.0, False, "2,000 times as wide.*--model.squash"),
        (0.01, 1.0, False, "100 times as narrow.*--model.squash"),
        (2000, 1.0, True, ""),
        (0.4, 0.6, False, ""),
        (2, 1.0, False, ""),
        (np.inf, 1.0, False, ""),
        (np.finfo(np.float32).max, 1.0, False, ""),
    ],
)
def test_bounds_out_of_proportion_to_the_first_deviation_are_told(
    bounds: float, std: float, squash: bool, told: str
) -> None:
    box = spaces.Box(-bounds, bounds, (2,))
    for space in (box, spaces.Tuple([spaces.Discrete(2), box])):
        warning = make_distribution(space, squash=squash).warning_at_start(std)
        assert re.search(told, warning) if told else not warning
