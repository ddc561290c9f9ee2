"""The kernels of normalized layers and of PQN have the bits of torch's replaced operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replaced import compare_ledgers
from tiny import EXPERIMENTS
from torch import Tensor
from torch.nn import functional as F

from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import ValueKernels
from lockstep.algorithms.onpolicy import Batch
from lockstep.experiment import Experiment
from lockstep.kernels.norms import normalize_rows, normalize_rows_back
from lockstep.kernels.sums import add_up
from lockstep.kernels.value_learning import value_gradients
from lockstep.models.arithmetic import portable_operations
from lockstep.models.layer_tables import encoder_of, observed, q_network
from lockstep.models.q import QModel

SHARDS, COLUMNS, TAKEN = 4, 30, 20
EPS = np.float32(1e-6)
VECTORS = {"env.id": "CartPole-v1", "model.encoder": "mlp", "model.hidden_sizes": (17, 24)}
CHANGES: list[dict[str, Any]] = [
    {},
    VECTORS,
    {**VECTORS, "model.activation": "tanh", "model.dueling": True, "model.stream_size": 9},
    {**VECTORS, "model.layer_norm": False},
    {"model.layer_norm": False, "model.dueling": True},
    {"env.id": "MinAtar/Seaquest-v1", "model.dense_size": 9},
]


def experiment_of(change: dict[str, Any]) -> Experiment:
    return EXPERIMENTS["pqn"]().replace(precision="portable", **change)


def agent_of(change: dict[str, Any]) -> Agent:
    """An agent whose network is no longer what it began as."""
    agent = Agent(experiment_of(change))
    (vector,) = agent.vectors
    vector += 0.1 * torch.randn(vector.shape, generator=torch.Generator().manual_seed(1))
    return agent


def seen(agent: Agent, draw: torch.Generator, rows: int = COLUMNS) -> Tensor:
    shape = agent.observation_space.shape
    assert shape is not None
    if len(shape) == 3:
        return (torch.rand(1, rows, *shape, generator=draw) < 0.15).to(torch.uint8)
    return torch.randn(1, rows, *shape, generator=draw)


def bits(x: Any) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.int32)


def test_two_numbers_are_normalized_as_by_hand() -> None:
    """The mean of 1 and 5 is 3 and their variance 4, so they become -1 and 1, but for what is added to the variance."""
    unit, y = np.float32(1) / np.sqrt(np.float32(4) + EPS), np.empty((1, 2), np.float32)
    x, scale, shift = np.array([[1, 5]], np.float32), np.array([3, 10], np.float32), np.array([1, 2], np.float32)
    normalize_rows(x, EPS, scale, shift, False, y)
    np.testing.assert_array_equal(y, [[1 - 2 * unit * 3, 2 + 2 * unit * 10]])
    np.testing.assert_allclose(y, [[-2, 12]], rtol=1e-6)
    normalize_rows(x, EPS, scale, shift, True, y)
    np.testing.assert_allclose(y, [[0, 12]], rtol=1e-6)
    by_scale, by_shift, by_x = np.ones(2, np.float32), np.ones(2, np.float32), np.empty((1, 2), np.float32)
    normalize_rows_back(x, EPS, scale, np.array([[7, 2]], np.float32), by_scale, by_shift, by_x)
    np.testing.assert_allclose(by_scale, [1 - 7, 1 + 2], rtol=1e-6)
    np.testing.assert_allclose(by_shift, [1 + 7, 1 + 2])
    # Two normalized numbers are -1 and 1 whatever x is: 21 - 20.5 - 0.5 and 20 - 20.5 + 0.5.
    np.testing.assert_allclose(by_x, [[0, 0]], atol=1e-5)


@pytest.mark.parametrize("inverse_eps", [10**6, 10**5])
@pytest.mark.parametrize(("rows", "count"), [(300, 16), (7, 128), (5, 21), (9, 3), (3, 8)])
def test_norms_are_those_of_torch_bit_by_bit(rows: int, count: int, inverse_eps: int) -> None:
    eps = np.float32(1) / np.float32(inverse_eps)
    draw = np.random.default_rng(count)
    x, by_y = draw.standard_normal((2, rows, count)).astype(np.float32)
    scale, shift = draw.standard_normal((2, count)).astype(np.float32)
    given = [torch.from_numpy(each).requires_grad_() for each in (x, scale, shift)]
    with portable_operations():
        expected = F.layer_norm(given[0], [count], given[1], given[2], 1 / inverse_eps)
        expected.backward(torch.from_numpy(by_y))
    y, by_x = np.empty_like(x), np.empty_like(x)
    by_scale, by_shift = np.zeros(count, np.float32), np.zeros(count, np.float32)
    normalize_rows(x, eps, scale, shift, False, y)
    normalize_rows_back(x, eps, scale, by_y, by_scale, by_shift, by_x)
    wanted = expected.detach(), *(each.grad for each in given)
    for found, of_torch in zip((y, by_x, by_scale, by_shift), wanted, strict=True):
        np.testing.assert_array_equal(bits(found), bits(of_torch))
    far = x - x.mean(1, keepdims=True)
    np.testing.assert_allclose(y, far / np.sqrt((far**2).mean(1, keepdims=True) + eps) * scale + shift, atol=1e-5)
    normalize_rows(x, eps, scale, shift, True, y)
    np.testing.assert_array_equal(bits(y), bits(expected.detach().relu() + 0))


@pytest.mark.parametrize(
    ("change", "between"),
    [(change, between) for change in CHANGES for between in (False, True) if "model.encoder" in change or not between],
)
def test_gradients_and_metrics_are_those_of_torch_bit_by_bit(change: dict[str, Any], between: bool) -> None:
    """Also where observations lie between those of other shards, whose first layer torch adds up in another order."""
    agent, draw = agent_of(change), torch.Generator().manual_seed(2)
    model, size = agent.model, agent.flat.vector.numel()
    encoder = encoder_of(model)
    assert isinstance(model, QModel)
    obs = [seen(agent, draw) for _ in range(SHARDS)]
    choices = torch.randint(agent.action_space.n, (SHARDS, COLUMNS), generator=draw)  # type: ignore[attr-defined]
    target = torch.randn(SHARDS, COLUMNS, generator=draw)
    valid = torch.rand(SHARDS, COLUMNS, generator=draw) < 0.8
    index = torch.stack([torch.randperm(COLUMNS, generator=draw)[:TAKEN] for _ in range(SHARDS)])
    if between:
        index, together = torch.arange(COLUMNS).expand(SHARDS, -1), torch.stack(obs, 2)
        obs = [together[:, :, s] for s in range(SHARDS)]
    expected = []
    for s in range(SHARDS):
        batch = Batch(
            obs=obs[s] if between else obs[s][:, index[s]],
            start=torch.zeros(1, index.shape[1], dtype=torch.bool),
            prev_action=None,
            prev_reward=None,
            state=torch.zeros(index.shape[1], 0),
            action=choices[s, index[s]][None],
            reward=target[:1],
            log_prob=target[:1],
            value=target[:1],
            terminated=valid[:1],
            truncated=valid[:1],
            valid=valid[s, index[s]][None],
            advantage=None,
            value_target=target[s, index[s]][None],
        )
        with portable_operations():
            agent.flat.forget_gradient()
            loss = agent.algorithm.loss(model, batch, {})  # type: ignore[arg-type]
            loss.total.backward()
            metrics = [loss.metrics[name] for name in agent.algorithm.metric_names]
            numbers = [batch.valid.sum(dtype=torch.float32), *metrics]
            expected.append(agent.flat.gather_gradient(numbers).detach().numpy().copy())
    out, joined = np.zeros((2, *np.shape(expected)), np.float32)
    parameters = agent.flat.vector.detach().numpy()
    for to in (out, out, joined, joined):  # nothing of an earlier call remains
        value_gradients(
            q_network(model, agent.flat),
            parameters,
            np.stack([observed(encoder, x, whole=True) for x in obs]),
            choices.numpy(),
            target.numpy(),
            valid.numpy(),
            np.full(SHARDS, between),
            np.ascontiguousarray(index),
            to is joined,
            np.zeros_like(parameters),
            to,
        )
    np.testing.assert_array_equal(bits(out), bits(np.stack(expected)))
    assert (np.abs(out[0, :size]) > 1e-3).sum() > 100
    add_up(out, 0, out.shape[1])
    np.testing.assert_array_equal(bits(joined[0]), bits(out[0]))


@pytest.mark.parametrize("change", CHANGES)
def test_a_kernel_acts_with_the_bits_of_torch(change: dict[str, Any]) -> None:
    agent = agent_of(change)
    obs, start = seen(agent, torch.Generator().manual_seed(3)), torch.zeros(1, COLUMNS, dtype=torch.bool)
    assert agent.kernels is not None
    inference = agent.kernels.inference(agent.model.for_acting())
    assert inference is not None
    inference.refresh()
    with torch.no_grad(), portable_operations():
        expected, _ = agent.model(obs, start, torch.zeros(COLUMNS, 0))
    found, _ = inference(obs, start, torch.zeros(COLUMNS, 0), None, None)
    np.testing.assert_array_equal(bits(found.policy), bits(expected.policy))
    np.testing.assert_array_equal(bits(found.value), bits(expected.value))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"scheme.lag": 1, "model.dueling": True},
        {**VECTORS, "env.adapter": "compiled"},
        {**VECTORS, "algorithm.epochs": 1, "algorithm.minibatches": 1, "scheme.acting_batch": 8},
        {**VECTORS, "model.layer_norm": False, "normalize.observations": True},
    ],
)
def test_runs_with_kernels_are_those_of_torchs_replaced_operations(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = experiment_of(change)
    compare_ledgers(experiment, tmp_path, monkeypatch, ValueKernels)


@pytest.mark.parametrize("change", [{"model.core": "gru"}, {"model.activation": "elu"}, {"model.hidden_sizes": (8, 1)}])
def test_what_has_other_bits_is_left_to_torch(change: dict[str, Any]) -> None:
    """Cores, ELU, and a layer that normalizes a single number."""
    assert not Agent(experiment_of({**VECTORS, **change})).kernels
    assert Agent(experiment_of(VECTORS)).kernels
