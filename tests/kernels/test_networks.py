"""Kernels compute what torch computes, up to rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.optim.adam import Adam
from torch.optim.rmsprop import RMSprop

from lockstep.algorithms.onpolicy import Batch
from lockstep.algorithms.ppo import PPOConfig
from lockstep.algorithms.returns import gae
from lockstep.distributed.groups import Group
from lockstep.distributed.tree import TreeSum
from lockstep.kernels import optimizers, returns
from lockstep.kernels.initialize import orthogonal
from lockstep.kernels.ppo import ppo_gradients
from lockstep.kernels.sums import add_up
from lockstep.models import StandardModelConfig
from lockstep.models.distributions import Categorical
from lockstep.models.gaussian import Gaussian
from lockstep.models.kernel_policy import KernelCategorical, KernelGaussian, KernelModel, NetworkTable, with_kernels
from lockstep.models.normalize import batch_sums, discounted_returns
from lockstep.models.parameters import FlatParameters

BOX, DISCRETE = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(5)
SEEN = spaces.Box(-np.inf, np.inf, (7,), np.float32)
ENTRIES = spaces.Dict({key: spaces.Box(-np.inf, np.inf, shape) for key, shape in {"a": (3,), "b": (2, 2)}.items()})
"""The same seven numbers, of which a critic alone may see some."""
PICTURE = spaces.Box(0, 255, (3, 10, 9), np.uint8)
SHARDS, ITEMS = 2, 30
HYPER = {"clip": 0.2, "value_coef": 0.7, "entropy_coef": 0.03}
TAIL = 1 + len(PPOConfig().build().metric_names)


def build(space: spaces.Space[Any], *, trained: bool = True, **settings: Any) -> KernelModel:
    config = StandardModelConfig(**{"encoder": "mlp", "hidden_sizes": (12, 9), **settings})
    seen = PICTURE if config.encoder == "minatar" else ENTRIES if config.critic_only else SEEN
    model = config.build(seen, space, precision="fp32", normalize_observations=False, seed=1)
    made = with_kernels(model, space, seed=3)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters() if trained else ():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return made


def observed(model: KernelModel, obs: Tensor) -> Any:
    """Seven numbers [T, B, 7] in the form that the model takes."""
    return obs if model.policy_columns is None else {"a": obs[..., :3], "b": obs[..., 3:].unflatten(-1, (2, 2))}


def items(space: spaces.Space[Any], model: KernelModel) -> tuple[np.ndarray, ...]:
    """Rollouts of actions that the model would take, some of them under another policy."""
    draw = torch.Generator().manual_seed(5)
    pictured = model.trunks[0].encoder.layout.images  # type: ignore[union-attr]
    if pictured:
        obs = torch.randint(256, (SHARDS, ITEMS, *PICTURE.shape), dtype=torch.uint8, generator=draw)
    else:
        obs = torch.randn(SHARDS, ITEMS, 7, generator=draw)
    noise = torch.rand(SHARDS, ITEMS, model.distribution.noise_size, generator=draw)
    with torch.no_grad():
        out, _ = model(observed(model, obs), torch.zeros(SHARDS, ITEMS, dtype=torch.bool), torch.zeros(ITEMS, 0))
    action = model.distribution.sample(out.policy, noise)
    old = model.distribution.log_prob(out.policy, action) + 0.3 * torch.randn(SHARDS, ITEMS, generator=draw)
    numbers = [torch.randn(SHARDS, ITEMS, generator=draw) for _ in range(3)]
    valid = torch.rand(SHARDS, ITEMS, generator=draw) > 0.2
    discrete = space is DISCRETE
    actions = torch.zeros(SHARDS, ITEMS, 0) if discrete else action
    choices = action if discrete else torch.zeros(SHARDS, ITEMS, dtype=torch.int64)
    if pictured:
        obs = obs.flatten(2) / 255
    return tuple(x.numpy() for x in (obs, actions, choices, old, *numbers, valid))


@pytest.mark.parametrize("value_clip", [0.0, 0.4])
@pytest.mark.parametrize("space", [DISCRETE, BOX])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"separate_value_network": True, "activation": "relu"},
        {"activation": "elu", "std": "state", "hidden_sizes": (8,)},
        {"separate_value_network": True, "hidden_sizes": (17, 16, 5)},
        {"encoder": "minatar", "dense_size": 20},
        {"encoder": "minatar", "dense_size": 7, "separate_value_network": True},
        {"critic_only": ("a",)},
        {"critic_only": ("b",), "hidden_sizes": (17, 16, 5), "activation": "relu"},
    ],
)
def test_gradients_of_ppo_are_those_of_autograd(
    settings: dict[str, Any], space: spaces.Space[Any], value_clip: float
) -> None:
    if space is DISCRETE:
        settings = {**settings, "std": "free"}
    draw = np.random.default_rng(6)
    check_ppo(
        build(space, **settings), space, np.stack([draw.permutation(ITEMS)[:11] for _ in range(SHARDS)]), value_clip
    )


def test_gradients_of_ppo_add_up_items_that_do_not_fit_in_the_cache_together() -> None:
    index = np.random.default_rng(7).integers(ITEMS, size=(SHARDS, 300))
    check_ppo(build(DISCRETE, encoder="minatar", dense_size=20, std="free"), DISCRETE, index)


def check_ppo(model: KernelModel, space: spaces.Space[Any], index: np.ndarray, value_clip: float = 0.0) -> None:
    """Compare the gradients of slices with torch's, and their sum with the tree's.

    Args:
        index: int64 [S, n]: the items of each slice.
    """
    flat, algorithm = FlatParameters(model, TAIL), dataclasses.replace(PPOConfig(), value_clip=value_clip).build()
    network, parameters = NetworkTable.of(model, flat), flat.vector.detach().numpy()
    held = items(space, model)
    out, joined = np.zeros((2, SHARDS, parameters.size + TAIL), np.float32)
    numbers = tuple(map(np.float32, (HYPER["clip"], value_clip, HYPER["value_coef"], HYPER["entropy_coef"])))
    for to in (out, out, joined, joined):  # nothing of an earlier call remains
        ppo_gradients(
            network.with_parameters(parameters),
            model.kernel_distribution.kind,
            held,
            index,
            (np.float32(0.1), np.float32(1.3)),
            numbers,
            to is joined,
            to,
        )
    for found, expected in zip(out, expected_gradients(model, flat, algorithm, held, index), strict=True):
        assert expected[:-TAIL].abs().max() > 0.1
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=2e-4, atol=2e-6 * index.shape[1])
    add_up(out, 0, out.shape[1])
    np.testing.assert_array_equal(joined[0], out[0])


def expected_gradients(
    model: KernelModel, flat: FlatParameters, algorithm: Any, held: tuple[np.ndarray, ...], index: np.ndarray
) -> Iterator[Tensor]:
    """The same by torch: its distributions, its loss, its derivatives."""
    kind = Categorical if model.kernel_distribution.kind == KernelCategorical.kind else Gaussian
    model.distribution = kind(DISCRETE if kind is Categorical else BOX)  # type: ignore[arg-type]
    for shard, taken in enumerate(index):
        obs, action, choice, old, value, advantage, target, valid = (torch.from_numpy(x[shard][taken]) for x in held)
        if model.trunks[0].encoder.layout.images:  # type: ignore[union-attr]
            obs = (255 * obs).round().to(torch.uint8).view(-1, *PICTURE.shape)
        batch = Batch(
            obs=observed(model, obs[None]),
            start=torch.zeros(1, len(taken), dtype=torch.bool),
            prev_action=None,
            prev_reward=None,
            state=torch.zeros(len(taken), 0),
            action=(choice if kind is Categorical else action)[None],
            reward=old[None],
            log_prob=old[None],
            value=value[None],
            terminated=valid[None],
            truncated=valid[None],
            valid=valid[None],
            advantage=(advantage[None] - 0.1) / 1.3,
            value_target=target[None],
        )
        flat.forget_gradient()
        loss = algorithm.loss(model, batch, HYPER)
        loss.total.backward()
        metrics = [loss.metrics[name] for name in algorithm.metric_names]
        yield flat.gather_gradient([valid.sum(dtype=torch.float32), *metrics]).detach()


def test_log_std_beyond_its_bounds_is_led_back() -> None:
    model = build(BOX)
    assert model.policy_head.log_std is not None
    model.policy_head.log_std.data = torch.tensor([2.5, 2.5, 0.1])
    flat = FlatParameters(model, TAIL)
    network, parameters = NetworkTable.of(model, flat), flat.vector.detach().numpy()
    held = items(BOX, model)
    out = np.zeros((SHARDS, parameters.size + TAIL), np.float32)
    numbers = tuple(map(np.float32, (0.2, 0.0, 0.5, 0.0)))
    index = np.stack([np.arange(ITEMS)] * SHARDS)
    one, none = np.float32(1), np.float32(0)
    whole, kind = network.with_parameters(parameters), KernelGaussian.kind
    ppo_gradients(whole, kind, held, index, (none, one), numbers, False, out)
    begin = flat.offset("policy_head.log_std")
    outside = out[:, begin : begin + 2]
    assert (outside >= 0).all() and (outside > 0).any() and (outside == 0).any(), "lowers it, or leaves it"


@pytest.mark.parametrize("space", [DISCRETE, BOX])
@pytest.mark.parametrize(
    "settings", [{}, {"separate_value_network": True}, {"critic_only": ("a",)}, {"critic_only": ("b",)}]
)
def test_acting_is_torchs_forward(space: spaces.Space[Any], settings: dict[str, Any]) -> None:
    model = build(space, **settings)
    acting = model.for_acting()
    obs = observed(model, torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(11)))
    start, state = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(5, 0)
    for _ in range(2):
        with torch.inference_mode():
            (expected, _), (found, _) = model(obs, start, state), acting(obs, start, state)
        torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for one, other in zip(model.parameters(), acting.parameters(), strict=True):
                other.copy_(one.mul_(1.1))
        acting.weights_changed()


@pytest.mark.parametrize("hidden", ["a", "b"])
def test_a_policy_plays_without_what_its_critic_saw(hidden: str) -> None:
    model = build(BOX, critic_only=(hidden,))
    playing, obs = model.for_playing(), observed(model, torch.randn(2, 5, 7))
    start, state = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(5, 0)
    with torch.inference_mode():
        expected, _ = model.for_acting()(obs, start, state)
        del obs[hidden]
        found, _ = playing(obs, start, state)
    assert torch.equal(found.policy, expected.policy) and not found.value.any() and expected.value.all()
    assert not playing.has_value and model.has_value and model.for_acting().has_value


@pytest.mark.parametrize(
    ("mine", "torchs"),
    [(KernelCategorical(DISCRETE), Categorical(DISCRETE)), (KernelGaussian(BOX), Gaussian(BOX))],
)
def test_distributions_are_torchs(mine: Any, torchs: Any) -> None:
    draw = torch.Generator().manual_seed(10)
    params = torch.randn(3, 4, mine.num_params, generator=draw).clamp(max=2.0)  # log deviations are within their bounds
    noise = torch.rand(3, 4, mine.noise_size, generator=draw)
    action = mine.sample(params, noise)
    assert action.dtype == mine.action_dtype
    torch.testing.assert_close(action, torchs.sample(params, noise), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.log_prob(params, action), torchs.log_prob(params, action), rtol=1e-5, atol=1e-5)


def test_rewards_become_torchs_advantages_and_statistics() -> None:
    draw = torch.Generator().manual_seed(7)
    reward, value = torch.randn(20, 3, generator=draw), torch.randn(21, 3, generator=draw)
    terminated, truncated, valid = (torch.rand(20, 3, generator=draw) < p for p in (0.1, 0.1, 0.8))
    advantage, target = np.empty((20, 3), np.float32), np.empty((20, 3), np.float32)
    ends = terminated.numpy(), truncated.numpy()
    returns.gae(reward.numpy(), value.numpy(), *ends, 0.97, 0.9, advantage, target)
    for found, expected in zip((advantage, target), gae(reward, value, terminated, truncated, 0.97, 0.9), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6)

    carry, found = torch.randn(3, generator=draw), np.empty((20, 3), np.float32)
    expected, carried = discounted_returns(reward, terminated | truncated, carry, 0.97)
    returns.discounted_returns(reward.numpy(), (terminated | truncated).numpy(), carry.numpy(), 0.97, found)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(carry, carried, rtol=1e-5, atol=1e-6)

    sums, x = np.empty(9), torch.randn(20, 3, 4, generator=draw)
    returns.batch_sums(x.numpy(), valid.numpy(), sums)
    torch.testing.assert_close(torch.from_numpy(sums), batch_sums(x, valid))

    index, sums = np.array([[0, 5, 6], [7, 1, 2]]), np.empty((2, 3))
    flat, counts = advantage.reshape(-1), valid.reshape(-1).numpy()
    returns.slice_sums(flat, counts, index, sums)
    for (count, total, squares), taken in zip(sums, index, strict=True):
        kept = flat[taken][counts[taken]].astype(np.float64)
        assert (count, total, squares) == pytest.approx((len(kept), kept.sum(), (kept**2).sum()))


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_optimizers_are_torchs(name: str) -> None:
    draw = torch.Generator().manual_seed(8)
    x = torch.nn.Parameter(torch.randn(83, generator=draw))
    mine, first, second = x.detach().clone().numpy(), np.zeros(83, np.float32), np.zeros(83, np.float32)
    torchs = Adam([x], 0.01, (0.8, 0.99), 1e-5) if name == "adam" else RMSprop([x], 0.01, 0.9, 1e-5)
    for step in range(1, 40):
        gradient = torch.randn(83, generator=draw) * step
        x.grad, own = gradient.clone(), gradient.numpy() * (4 if name == "adam" else 1)
        norm = torch.nn.utils.clip_grad_norm_([x], 30.0)
        torchs.step()
        if name == "adam":
            scale = np.float32(0.25), np.float32(1)
            found = optimizers.adam(mine, own, *scale, 30.0, first, second, step, 0.01, 0.8, 0.99, 1e-5)
        else:
            found = optimizers.rmsprop(mine, own, 30.0, second, 0.01, 0.9, 1e-5, False)
        assert found == pytest.approx(float(norm), rel=1e-5)
    torch.testing.assert_close(torch.from_numpy(mine), x.detach(), rtol=1e-4, atol=1e-5)


def test_rmsprop_tf_rounds_each_operation_to_float32() -> None:
    """As NumPy, whose operations are rounded as IEEE 754 says; the mean of squares is below 2**-126 for some."""
    draw = np.random.default_rng(9)
    x, gradient = (draw.standard_normal(83).astype(np.float32) for _ in range(2))
    second = np.where(draw.random(83) < 0.2, 1e-40, draw.random(83)).astype(np.float32)
    gradient[:40] *= second[:40] > 1e-30  # so that small means stay small
    r, d, c, e = (np.float32(number) for number in (0.02, 0.9, 1.0 - 0.9, 1e-5))
    mean = d * second + c * (gradient * gradient)
    wanted = x - r * (gradient / np.sqrt(mean + e))
    assert optimizers.rmsprop(x, gradient, 1e9, second, 0.02, 0.9, 1e-5, True) == optimizers.norm(gradient)
    np.testing.assert_array_equal(second, mean)
    np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize(("factor", "divisor"), [(0.3, 1), (1, 3.7), (0.3, 3.7)])
def test_a_gradient_is_multiplied_and_divided_while_its_norm_is_summed(factor: float, divisor: float) -> None:
    gradient = np.random.default_rng(8).standard_normal(2500).astype(np.float32)
    scale = np.float32(factor), np.float32(divisor)
    product, lanes, total = gradient * scale[0] / scale[1], np.zeros(64), 0.0
    for i, x in enumerate(product):  # one by one, each to its part
        lanes[i % 64] += float(x) ** 2
    for lane in lanes:
        total += lane
    assert optimizers.clip(gradient, *scale, np.inf) == np.sqrt(total) == optimizers.norm(product)
    np.testing.assert_array_equal(gradient, product)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_a_kernel_adds_up_shards_as_the_tree_does(shards: int) -> None:
    draw = np.random.default_rng(3)
    values = (draw.standard_normal((shards, 101)) * 10.0 ** draw.integers(-4, 5, (shards, 101))).astype(np.float32)
    expected = TreeSum(shards, Group()).sum({s: torch.from_numpy(values[s].copy()) for s in range(shards)})
    add_up(values, 0, 101)
    np.testing.assert_array_equal(values[0], expected.numpy())


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (7, 7), (1, 6)])
def test_first_weights_are_orthogonal(shape: tuple[int, int]) -> None:
    weight = orthogonal(np.random.default_rng(9).random(shape, np.float32), 1.5).astype(np.float64)
    few = weight if shape[0] <= shape[1] else weight.T
    np.testing.assert_allclose(few @ few.T, 2.25 * np.eye(min(shape)), atol=1e-5)


def test_models_begin_with_the_gains_of_the_standard_model() -> None:
    named = dict(build(BOX, trained=False).named_parameters())
    norms = {name: float(x.detach().norm(dim=1)[0]) for name, x in named.items() if name.endswith("weight")}
    assert norms["policy_head.linear.weight"] == pytest.approx(0.01, rel=1e-4)
    assert norms["value_head.linear.weight"] == pytest.approx(1.0, rel=1e-4)
    assert all(not x.any() for name, x in named.items() if name.endswith("bias"))
