"""The kernels of A2C, IMPALA, APPO and recurrent PPO have the bits of torch's replaced operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from replaced import compare_ledgers
from tiny import EXPERIMENTS, options
from torch import Tensor

from lockstep import train
from lockstep.agent import Agent
from lockstep.algorithms import A2CConfig, APPOConfig, IMPALAConfig, OnPolicyConfig, PPOConfig
from lockstep.algorithms.kernel_table import TABLE, LossKernels
from lockstep.algorithms.onpolicy import Batch
from lockstep.envs.compiled_shard import CompiledShard
from lockstep.kernels.on_policy import gradients_of
from lockstep.kernels.policies import CATEGORICAL, GAUSSIAN
from lockstep.kernels.sums import add_up, column_sums, row_sums
from lockstep.models import StandardModelConfig
from lockstep.models.arithmetic import portable_operations
from lockstep.models.kernel_policy import NetworkTable, with_kernels
from lockstep.models.parameters import FlatParameters
from lockstep.models.policy import StandardModel

SEEN, PICTURE = spaces.Box(-np.inf, np.inf, (7,), np.float32), spaces.Box(0, 255, (3, 10, 9), np.uint8)
MANY = spaces.Discrete(11)
"""More than a sum has parts."""
SEPARATE = {"separate_value_network": True, "core_size": 8}
PREVIOUS = {"model.core": "lstm", "model.previous_action_reward": True}
FLAT = {"model.encoder": "mlp", "model.hidden_sizes": (12,)}
"""Of images."""
SHARDS, STEPS, COLUMNS = 4, 5, 6
CONFIGS: dict[str, OnPolicyConfig] = {
    "a2c": A2CConfig(),
    "impala": IMPALAConfig(vtrace_lambda=0.9, rho_clip=1.5, c_clip=0.8),
    "appo": APPOConfig(clip=0.3),
    "appo with value clip": APPOConfig(clip=0.3, value_clip=0.4, vtrace_lambda=0.9),
    "appo with standardized advantages": APPOConfig(clip=0.3, standardize_advantages=True),
}
RECURRENT: dict[str, OnPolicyConfig] = {
    **CONFIGS,
    "ppo": PPOConfig(clip=0.3),
    "ppo with value clip": PPOConfig(clip=0.3, value_clip=0.4),
}
HYPER = {"discount": 0.97, "value_coef": 0.7, "entropy_coef": 0.03, "clip": 0.3}


def build(space: spaces.Space[Any], **settings: Any) -> StandardModel:
    config = StandardModelConfig(**{"encoder": "mlp", "hidden_sizes": (12, 9), **settings})
    seen = PICTURE if config.encoder == "minatar" else SEEN
    draw = torch.Generator().manual_seed(4)
    with portable_operations():
        model = config.build(seen, space, precision="fp32", normalize_observations=False, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
        if model.policy_head.log_std is not None and len(model.policy_head.log_std) > 1:
            model.policy_head.log_std[0] = 2.5  # beyond its bounds
    return model


def batches(model: StandardModel, config: OnPolicyConfig) -> list[Batch]:
    """By shard: a rollout under a policy that is a little or very different, with invalid slots and both ends."""
    draw = torch.Generator().manual_seed(5)
    size = model.state_size
    steps, columns = (STEPS, COLUMNS) if config.sequences or size else (1, STEPS * COLUMNS)
    rows, shape = steps + config.build().bootstrap_inputs, (steps, columns)

    def chance(p: float) -> Tensor:
        return torch.rand(shape, generator=draw) < p

    def made() -> Batch:
        obs = torch.randn(rows, columns, 7, generator=draw)
        if model.trunks[0].encoder.layout.images:  # type: ignore[union-attr]
            obs = torch.randint(256, (rows, columns, *PICTURE.shape), dtype=torch.uint8, generator=draw)
        start = torch.rand(rows, columns, generator=draw) < (0.3 if size else 0)
        state = torch.randn(columns, size, generator=draw)
        noise = torch.rand(*shape, model.distribution.noise_size, generator=draw)
        prev_action, prev_reward = None, None
        if model.uses_previous:
            prev_reward = torch.randn(rows, columns, generator=draw)
            prev_action = torch.randint(2, (rows, columns), generator=draw)
            if model.distribution.action_shape:
                prev_action = torch.randn(rows, columns, *model.distribution.action_shape, generator=draw)
        with torch.no_grad(), portable_operations():
            output, _ = model(obs, start, state, prev_action, prev_reward)
            policy = output.policy[:steps]
            action = model.distribution.sample(policy, noise)
            log_prob = model.distribution.log_prob(policy, action)
        difference = 0.3 * torch.randn(shape, generator=draw)
        difference[0, :3] = torch.tensor([100.0, -90.0, 0.0])  # a ratio that is cut, one that is 0, and one of 1
        difference = torch.where(chance(0.03), 2.0, difference)
        return Batch(
            obs=obs,
            start=start,
            prev_action=prev_action,
            prev_reward=prev_reward,
            state=state,
            action=action,
            reward=torch.randn(shape, generator=draw),
            log_prob=log_prob - difference,
            value=output.value[:steps] + 0.5 * torch.randn(shape, generator=draw),
            terminated=chance(0.15),
            truncated=chance(0.15),
            valid=chance(0.8),
            advantage=None if config.sequences else torch.randn(shape, generator=draw),
            value_target=None if config.sequences else torch.randn(shape, generator=draw),
        )

    return [made() for _ in range(SHARDS)]


def by_kernel(
    model: StandardModel,
    config: OnPolicyConfig,
    held: list[Batch],
    index: np.ndarray,
    flat: FlatParameters,
    strided: Sequence[bool] = (False,) * SHARDS,
) -> tuple[np.ndarray, np.ndarray]:
    """Each shard's gradient, count and sums of metrics; and the tree's sum of them."""
    kernel, network = TABLE[type(config)][-1], NetworkTable.of(model, flat, whole=True)
    assert isinstance(kernel, LossKernels)
    parameters = flat.vector.detach().numpy()
    discrete = not model.distribution.action_shape
    hyper = [HYPER["value_coef"], *kernel.hyper(config, HYPER), *([] if config.sequences else [0.1, 1.3])]

    def stacked(names: tuple[str, ...]) -> np.ndarray:
        return np.stack([np.stack([getattr(batch, name).numpy() for name in names]) for batch in held])

    obs = np.stack([batch.obs.flatten(2).float().numpy() for batch in held])
    action = np.stack([batch.action.numpy() for batch in held])
    items = (
        obs,
        np.zeros((*action.shape, 0), np.float32) if discrete else action,
        action if discrete else np.zeros(action.shape[:3], np.int64),
        stacked(kernel.numbers),
        stacked((*kernel.flags, "valid")),
        np.array(strided),
        np.stack([_extra(model, batch) for batch in held]),
        np.stack([batch.start.numpy() for batch in held]),
        np.stack([batch.state.numpy() for batch in held]),
    )
    tail = 1 + len(config.build().metric_names)
    out, joined = np.zeros((2, SHARDS, parameters.size + tail), np.float32)
    for to in (out, out, joined, joined):  # nothing of an earlier call remains
        gradients_of(kernel.loss, model.state_size > 0)(
            network.with_parameters(parameters),
            CATEGORICAL if discrete else GAUSSIAN,
            items,
            index,
            np.array(hyper, np.float32),
            np.float32(HYPER["entropy_coef"]),
            to is joined,
            to,
        )
    return out, joined[0]


def _extra(model: StandardModel, batch: Batch) -> np.ndarray:
    given = model.extra(batch.start, batch.prev_action, batch.prev_reward)
    return np.zeros((*batch.start.shape, 0), np.float32) if given is None else given.numpy()


def by_torch(
    model: StandardModel,
    config: OnPolicyConfig,
    held: list[Batch],
    index: np.ndarray | None,
    flat: FlatParameters,
) -> Iterator[np.ndarray]:
    """The same as the first, of these columns or, without an index, of all where they lie."""
    algorithm = config.build()
    for place, batch in enumerate(held):
        taken = batch if index is None else batch.columns(torch.from_numpy(index[place]))
        if taken.advantage is not None:
            taken = taken.replace(advantage=(taken.advantage - 0.1) / 1.3)
        with portable_operations():
            flat.forget_gradient()
            loss = algorithm.loss(model, taken, HYPER)
            loss.total.backward()
            metrics = [loss.metrics[name] for name in algorithm.metric_names]
            yield flat.gather_gradient([taken.valid.sum(dtype=torch.float32), *metrics]).detach().numpy()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("space", "settings"),
    [
        (spaces.Discrete(5), {"activation": "relu"}),
        (MANY, {"separate_value_network": True, "hidden_sizes": (17, 1)}),
        (spaces.Discrete(2), {"hidden_sizes": (8,)}),
        (spaces.Discrete(5), {"encoder": "minatar", "dense_size": 20}),
        (spaces.Discrete(3), {"encoder": "minatar", "dense_size": 7, "separate_value_network": True}),
        (spaces.Box(-1, 1, (3,), np.float32), {}),
        (spaces.Box(-1, 1, (1,), np.float32), {"separate_value_network": True}),
        (spaces.Box(-1, 1, (8,), np.float32), {"std": "state"}),
    ],
)
def test_gradients_and_metrics_are_those_of_torch_bit_by_bit(
    name: str, space: spaces.Space[Any], settings: dict[str, Any]
) -> None:
    config, model = CONFIGS[name], build(space, **settings)
    if "state" in settings.values():
        with torch.no_grad():
            model.policy_head.linear.bias[[8, 9, 10]] = torch.tensor([2.5, 2.1, 1.9])  # around the upper bound
    flat, held = FlatParameters(model, 1 + len(config.build().metric_names)), batches(model, config)
    columns = COLUMNS if config.sequences else STEPS * COLUMNS
    draw = np.random.default_rng(6)
    index = np.stack([draw.permutation(columns)[: 2 * columns // 3] for _ in range(SHARDS)])
    out, joined = by_kernel(model, config, held, index, flat)
    for found, expected in zip(out, by_torch(model, config, held, index, flat), strict=True):
        assert np.abs(expected[: flat.vector.numel()]).max() > 0.01
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
    add_up(out, 0, out.shape[1])
    np.testing.assert_array_equal(joined.view(np.int32), out[0].view(np.int32))


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize(
    ("space", "settings"),
    [
        # A GRU and discrete actions are in the fifth, too.
        pytest.param(spaces.Discrete(5), {"core": "gru", "core_size": 10}, marks=pytest.mark.full),
        (spaces.Box(-1, 1, (3,), np.float32), {"core": "lstm", "core_size": 40}),
        (MANY, {"core": "lstm", "core_size": 7, "separate_value_network": True, "hidden_sizes": (17, 1)}),
        (spaces.Box(-1, 1, (1,), np.float32), {"core": "gru", "core_size": 1, "separate_value_network": True}),
        (spaces.Discrete(3), {"core": "gru", "core_size": 6, "encoder": "minatar", "dense_size": 7}),
        (spaces.Discrete(2), {"core": "lstm", "core_size": 6, "previous_action_reward": True}),
        (spaces.Box(-1, 1, (2,), np.float32), {**SEPARATE, "core": "gru", "previous_action_reward": True}),
    ],
)
def test_gradients_through_time_are_those_of_torch_bit_by_bit(
    name: str, space: spaces.Space[Any], settings: dict[str, Any]
) -> None:
    config, model = RECURRENT[name], build(space, **settings)
    flat, held = FlatParameters(model, 1 + len(config.build().metric_names)), batches(model, config)
    draw = np.random.default_rng(6)
    index = np.stack([draw.permutation(COLUMNS)[:4] for _ in range(SHARDS)])
    out, joined = by_kernel(model, config, held, index, flat)
    for found, expected in zip(out, by_torch(model, config, held, index, flat), strict=True):
        assert np.abs(expected[: flat.vector.numel()]).max() > 0.01
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
    add_up(out, 0, out.shape[1])
    np.testing.assert_array_equal(joined.view(np.int32), out[0].view(np.int32))


@pytest.mark.parametrize("shards", [SHARDS, 2])
def test_observations_between_others_are_added_up_as_torch_does(shards: int) -> None:
    """Whole rollouts of several shards that act together are not copied, and torch adds a layer's bias last there."""
    config, model = CONFIGS["impala"], build(MANY, separate_value_network=True)
    flat, held = FlatParameters(model, 1 + len(config.build().metric_names)), batches(model, config)
    between = torch.stack([batch.obs for batch in held], 1)  # [R, S, C, D]
    held = [batch.replace(obs=between[:, s] if s < shards else batch.obs) for s, batch in enumerate(held)]
    every = np.arange(COLUMNS)[None].repeat(SHARDS, 0)
    out, joined = by_kernel(model, config, held, every, flat, tuple(s < shards for s in range(SHARDS)))
    expected = list(by_torch(model, config, held, None, flat))
    np.testing.assert_array_equal(out.view(np.int32), np.stack(expected).view(np.int32))
    add_up(out, 0, out.shape[1])
    np.testing.assert_array_equal(joined.view(np.int32), out[0].view(np.int32))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # Those of `make test-full` have algorithms, cores and models of the others, in other pairs.
        pytest.param("portable-cartpole-a2c", {}, marks=pytest.mark.full),
        ("portable-cartpole-a2c", {"algorithm.epochs": 2, "algorithm.minibatches": 2}),
        ("portable-minatar-impala-lag-1", {}),
        pytest.param("portable-pendulum-appo-lag-2", {}, marks=pytest.mark.full),
        ("portable-pendulum-appo-lag-2", {"algorithm.minibatches": 1, "scheme.acting_batch": 8}),
        pytest.param("memory-gru-lag-2", {}, marks=pytest.mark.full),
        ("portable-cartpole-lags", {"model.core": "lstm", "algorithm.target_kl": 1e-3}),
        ("portable-cartpole-a2c", {"model.core": "gru", "model.separate_value_network": True}),
        pytest.param("portable-minatar-impala-lag-1", {"model.core": "lstm"}, marks=pytest.mark.full),
        pytest.param(
            "portable-pendulum-appo-lag-2",
            {"model.core": "gru", "algorithm.minibatches": 1, "scheme.acting_batch": 8},
            marks=pytest.mark.full,
        ),
        ("memory-gru-lag-2", {"model.previous_action_reward": True}),
        ("portable-pendulum-appo-lag-2", {**PREVIOUS, "env.reward_clip": True}),
        pytest.param("portable-cartpole-a2c", {**PREVIOUS, "env.adapter": "gymnasium"}, marks=pytest.mark.full),
        pytest.param("portable-minatar-impala-lag-1", {**FLAT, "scheme.acting_batch": 8}, marks=pytest.mark.full),
        pytest.param("portable-minatar-ppo", {**FLAT, "model.separate_value_network": True}, marks=pytest.mark.full),
        ("portable-minatar-ppo", {**FLAT, "model.core": "gru", "model.core_size": 8}),
        ("a2c", FLAT),
    ],
)
def test_runs_with_kernels_are_those_of_torchs_replaced_operations(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = EXPERIMENTS[name]().replace(precision="portable", **changes)
    compare_ledgers(experiment, tmp_path, monkeypatch)


@pytest.mark.parametrize("core", ["none", "gru"])
def test_whole_pixels_are_acted_on_step_by_step_as_in_one_call(
    core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that are divided for them follow every version, and the states of cores every episode."""
    experiment = EXPERIMENTS["portable-minatar-impala-lag-1"]().replace(**{"model.core": core})
    at_once = train(experiment, options=options(tmp_path / "at-once"))
    monkeypatch.setattr(CompiledShard, "kernel", lambda _: None)
    assert train(experiment, options=options(tmp_path / "by-step")).digest == at_once.digest


class OwnConfig(A2CConfig):
    """Of a user, whose loss may be another one."""


@pytest.mark.parametrize("core", ["gru", "lstm"])
@pytest.mark.parametrize("separate", [False, True])
def test_acting_with_a_core_is_torchs_forward(core: str, separate: bool) -> None:
    """Also over several steps, with episodes that start inside."""
    model = build(spaces.Discrete(5), core=core, core_size=9, separate_value_network=separate)
    draw = torch.Generator().manual_seed(7)
    obs, start = torch.randn(4, 3, 7, generator=draw), torch.rand(4, 3, generator=draw) < 0.3
    state = torch.randn(3, model.state_size, generator=draw)
    before = state.clone()
    with torch.no_grad(), portable_operations():
        expected, expected_state = model(obs, start, state)
    found, found_state = with_kernels(model, spaces.Discrete(5), None).for_acting()(obs, start, state)
    assert torch.equal(found.policy, expected.policy)
    assert torch.equal(found.value, expected.value)
    assert torch.equal(found_state, expected_state)
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    ("initialization", "variance"), [("impala", 1.0), ("pytorch", 1 / 3), ("glorot", 2 * 36 / (36 + 144))]
)
def test_ppo_begins_with_the_weights_that_its_model_asks_for(
    initialization: str, variance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """variance: times the inputs, here 9 pixels of 4 channels."""
    experiment = EXPERIMENTS["portable-minatar-ppo"]().replace(**{"model.initialization": initialization})
    weights = dict(Agent(experiment).model.named_parameters())["trunks.0.encoder.images.0.convolutions.0.weight"]
    assert weights[0].numel() == 36 and float(weights.detach().std()) == pytest.approx(variance**0.5 / 6, rel=0.1)
    compare_ledgers(experiment, tmp_path, monkeypatch, LossKernels)


def test_what_has_other_bits_is_left_to_torch() -> None:
    """ELU's slope, sums over more than 8 numbers, subclasses, random network distillation, other cores."""
    full = EXPERIMENTS["portable-cartpole-a2c"]()
    assert Agent(full).kernels
    assert not Agent(full.replace(**{"model.activation": "elu"})).kernels
    assert not Agent(full.replace(algorithm=OwnConfig())).kernels
    assert not Agent(full.replace(**{"algorithm.rnd.coef": 0.5})).kernels
    assert not Agent(full.replace(**{"model.previous_action_reward": True})).kernels
    recurrent = EXPERIMENTS["memory-gru-lag-2"]().replace(precision="portable")
    assert Agent(recurrent).kernels
    assert not Agent(recurrent.replace(**{"model.activation": "elu"})).kernels
    assert not Agent(recurrent.replace(**{"algorithm.desired_kl": 0.01})).kernels
    for core in ("mingru", "transformer"):
        assert not Agent(recurrent.replace(**{"model.core": core})).kernels
    for size in (8, 9):
        model = full.build_model(SEEN, spaces.Box(-1, 1, (size,), np.float32))
        assert model.portable_operations is (size > 8)


def test_sums_have_eight_parts() -> None:
    """Number i belongs to part i mod 8: 1e8 and -1e8 meet before the ones that they would swallow."""
    x = np.zeros((2, 17), np.float32)
    x[0, [0, 8, 1, 2]] = 1e8, -1e8, 1, 1
    x[1, [0, 1, 8]] = 1e8, 1, -1e8
    found, columns = np.empty(2, np.float32), np.empty(2, np.float32)
    row_sums(x, found)
    column_sums(np.ascontiguousarray(x.T), columns)
    assert found.tolist() == columns.tolist() == [2, 1]
