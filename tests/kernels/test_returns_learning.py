"""The kernels of DQN's extensions have the bits of torch's replaced operations."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replaced import compare_ledgers
from slices import by_autograd, by_kernel, same
from test_q_learning import CARTPOLE, ITEMS, MINATAR, agent_of, items
from tiny import EXPERIMENTS, options

from lockstep import resume, train
from lockstep.agent import Agent
from lockstep.algorithms.dqn import DQNConfig, project
from lockstep.algorithms.kernel_table import ReturnsKernels
from lockstep.core.transitions import Transitions
from lockstep.experiment import Experiment
from lockstep.kernels import returns_learning
from lockstep.kernels.dense import RELU, activations, backward, evaluate
from lockstep.models.arithmetic import portable_operations
from lockstep.models.encoders import ConvNet
from lockstep.models.layers import Conv2d, PixelConv2d

ATOMS = {"returns": "categorical", "numbers": 11, "v_min": -4.0, "v_max": 5.0}
QUANTILES = {"returns": "quantiles", "numbers": 11}
IMPLICIT = {"returns": "implicit", "numbers": 5, "cosines": 9}
STREAMS = {"dueling": True, "noisy": True, "stream_size": 8}
RAINBOW = {**STREAMS, **ATOMS}
PIXELS, NATURE = ("Pong", {"encoder": "der"}), ("Pong", {"encoder": "nature", "dense_size": 7})
OF_PIXELS: list[dict[str, Any]] = [
    {},
    {"dense_size": 7},
    RAINBOW,
    {"dense_size": 7, "layer_norm": True},
    {"dense_size": 7, **QUANTILES, **STREAMS},
    {"dense_size": 7, **IMPLICIT, "dueling": True},
]
OF_NATURE: list[dict[str, Any]] = [
    {},
    {"layer_norm": True, **RAINBOW},
    {**IMPLICIT, "dueling": True},
    {"dense_size": -1, **RAINBOW},
]
CHANGES: list[dict[str, Any]] = [
    {"dueling": True},
    {"stream_size": 9},
    {"noisy": True},
    {"noisy": True, "dueling": True, "stream_size": 9},
    ATOMS,
    RAINBOW,
    {"layer_norm": True},
    {"layer_norm": True, **RAINBOW},
    QUANTILES,
    {**QUANTILES, **STREAMS},
    IMPLICIT,
    {**IMPLICIT, "dueling": True},
    {**IMPLICIT, **STREAMS, "layer_norm": True},
]


def drawn_for(agent: Agent) -> Transitions:
    """A slice of a minibatch, with the noise that the loss consumes."""
    batch, numbers = items(agent), agent.algorithm.noise_numbers(agent.model, ITEMS)  # type: ignore[attr-defined]
    noise = torch.rand(numbers, generator=torch.Generator().manual_seed(3))
    return batch.replace(noise=noise) if numbers else batch


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    ("task", "change"),
    [
        *itertools.product([CARTPOLE, MINATAR], CHANGES),
        *itertools.product([PIXELS], OF_PIXELS),
        *itertools.product([NATURE], OF_NATURE),
    ],
)
def test_gradients_are_those_of_torch_bit_by_bit(
    task: tuple[str, dict[str, Any]], change: dict[str, Any], double: bool
) -> None:
    name, settings = task
    agent = agent_of((name, {**settings, **change}), prioritized=double, double=double)
    assert isinstance(agent.kernels, ReturnsKernels)
    batch, hyper = drawn_for(agent), {**agent.algorithm.hyperparameters(0.0), "update": 1}
    found = by_autograd(agent, batch, hyper), by_kernel(agent, batch, hyper)
    for expected, computed in zip(*found, strict=True):
        assert same(expected, computed)
    assert (found[0][0][: agent.flat.vector.numel()].abs() > 1e-3).sum() > 100
    size = math.log(ATOMS["numbers"]) if agent.model.atoms is not None else 1  # of uniform atoms
    assert found[0][1].min() < size < found[0][1].max()


@pytest.mark.parametrize("task", [CARTPOLE, MINATAR, PIXELS, NATURE])
@pytest.mark.parametrize("change", [{"dueling": True}, RAINBOW, QUANTILES, {**IMPLICIT, **STREAMS}])
def test_a_kernel_acts_with_the_bits_of_torch(task: tuple[str, dict[str, Any]], change: dict[str, Any]) -> None:
    name, settings = task
    agent = agent_of((name, {**settings, **change}))
    obs, start = items(agent).obs, torch.zeros(1, ITEMS, dtype=torch.bool)
    assert agent.kernels is not None
    inference = agent.kernels.inference(agent.model.for_acting())
    assert inference is not None
    for seed in (None, 1, 2):
        if agent.model.noise_numbers:
            draw = torch.Generator().manual_seed(seed or 0)
            noise = None if seed is None else torch.rand(agent.model.noise_numbers, generator=draw)
            with portable_operations():
                agent.model.set_noise(noise)
            inference.set_noise(noise)
        with torch.no_grad(), portable_operations():
            expected, _ = agent.model(obs, start, torch.zeros(ITEMS, 0))
        found, _ = inference(obs, start, torch.zeros(ITEMS, 0), None, None)
        assert same(found.policy, expected.policy) and same(found.value, expected.value)


def test_an_acting_copy_keeps_parameters_that_are_overwritten() -> None:
    """It reads those that last where they lie, which takes no copy."""
    agent = agent_of((CARTPOLE[0], {**CARTPOLE[1], **RAINBOW}))
    obs, start = items(agent).obs, torch.zeros(1, ITEMS, dtype=torch.bool)
    found = []
    for lasts in (True, False):
        assert agent.kernels is not None
        inference, vector = agent.kernels.inference(agent.model.for_acting()), agent.flat.vector.detach().clone()
        assert inference is not None and inference.load(vector, lasts=lasts)
        assert np.shares_memory(inference._parameters, vector.numpy()) == lasts  # type: ignore[union-attr]
        if not lasts:
            vector.zero_()
        inference.refresh()
        found.append(inference(obs, start, torch.zeros(ITEMS, 0), None, None)[0].policy)
    assert same(*found) and bool(found[0].any())


@pytest.mark.parametrize(
    "change",
    [
        {"model.dueling": True},
        {"model.noisy": True, "algorithm.double": True},
        {"model.returns": "quantiles", "model.dueling": True, "algorithm.replay.prioritized": True},
        {"model.returns": "implicit", "model.noisy": True, "algorithm.double": True},
    ],
)
def test_runs_with_kernels_are_those_of_torchs_replaced_operations(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_ledgers(EXPERIMENTS["portable-minatar-dqn"]().replace(**change), tmp_path, monkeypatch, ReturnsKernels)


@pytest.mark.parametrize(
    "change",
    [
        {},
        # returns are expected in DrQ, too
        pytest.param(
            {"model.returns": "expected", "model.noisy": False, "model.dense_size": 9}, marks=pytest.mark.full
        ),
        {"model.encoder": "mlp", "model.hidden_sizes": (9,)},
    ],
)
def test_so_are_those_of_data_efficient_rainbow(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_ledgers(EXPERIMENTS["der"]().replace(precision="portable", **change), tmp_path, monkeypatch, ReturnsKernels)


@pytest.mark.parametrize("change", [{}, {"model.dueling": True, "model.noisy": True}])
def test_so_are_those_with_a_goal_and_hindsight(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Observations are a Dict of vectors."""
    experiment = EXPERIMENTS["hindsight"]().replace(precision="portable", **change)
    compare_ledgers(experiment, tmp_path, monkeypatch, ReturnsKernels)


@pytest.mark.parametrize("change", [{}, {"model.noisy": True, "algorithm.pad": 0}])
def test_so_are_those_of_drq(change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_ledgers(drq(**change), tmp_path, monkeypatch, ReturnsKernels)


def drq(**change: Any) -> Experiment:
    one = {"algorithm.copies": 1, "algorithm.target_copies": 1, "model.dense_size": 9}
    return EXPERIMENTS["drq"]().replace(precision="portable", **one, **change)


def test_no_layout_changes_drqs_digest_and_several_copies_have_no_kernels(tmp_path: Path) -> None:
    digests = {
        train(drq(), layout, options(tmp_path / f"run-{place}")).digest
        for place, layout in enumerate(("inline", "processes:2"))
    }
    assert len(digests) == 1
    assert not Agent(drq().replace(**{"algorithm.target_copies": 2})).kernels


@pytest.mark.parametrize(
    ("precision", "change"),
    [  # `make test` tries each precision and each change
        ("fp32", {}),
        pytest.param("portable", {}, marks=pytest.mark.full),
        pytest.param("fp32", {"model.noisy": True}, marks=pytest.mark.full),
        ("portable", {"model.noisy": True}),
        pytest.param("fp32", {"algorithm.target_rate": 0.5}, marks=pytest.mark.full),
        ("portable", {"algorithm.target_rate": 0.5}),
    ],
)
def test_a_target_network_that_is_a_copy_chooses_actions_itself(
    change: dict[str, Any], precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = drq(**{"algorithm.target_period": 1, **change}).replace(precision=precision)
    assert isinstance(experiment.algorithm, DQNConfig) and experiment.algorithm.double
    found = train(experiment, "inline", options(tmp_path / "run")).digest
    monkeypatch.setattr(DQNConfig, "compares", lambda self, online: True)
    assert train(experiment, "inline", options(tmp_path / "compared")).digest == found
    monkeypatch.setattr(DQNConfig, "compares", lambda self, online: False)
    alike = train(experiment, "inline", options(tmp_path / "alike")).digest == found
    assert alike == (change == {})


def test_what_has_other_bits_is_left_to_torch() -> None:
    """ELU's slope, cores, other networks of images."""
    full = EXPERIMENTS["rainbow-lag-1"]().replace(precision="portable")
    assert Agent(full).kernels
    for change in ({"activation": "elu"}, {"core": "gru"}):
        assert not Agent(full.replace(model=replace(full.model, **change))).kernels
    der = EXPERIMENTS["der"]().replace(precision="portable")
    assert Agent(der).kernels
    assert not Agent(der.replace(**{"model.encoder": "convnet_simple"})).kernels


@pytest.mark.parametrize("change", [QUANTILES, {**IMPLICIT, "noisy": True}])
def test_quantiles_are_the_same_in_two_processes_and_resumed(change: dict[str, Any], tmp_path: Path) -> None:
    full = EXPERIMENTS["portable-minatar-dqn"]()
    full = full.replace(model=replace(full.model, **change), **{"algorithm.replay.prioritized": True})
    assert isinstance(Agent(full).kernels, ReturnsKernels)
    expected = train(full, options=options(tmp_path / "inline")).digest
    stopped = train(full, "processes:2", options(tmp_path / "stopped"), stop_after=2)
    assert stopped.digest != expected
    assert resume(tmp_path / "stopped").digest == expected


@pytest.mark.parametrize(("sizes", "samples"), [((5, 1), (11, 9)), ((5, 1), (1, 1)), ((5, 6), (1, 9))])
@pytest.mark.parametrize("numbers", [1, 11])
def test_sums_of_single_numbers_are_those_of_torch_bit_by_bit(
    sizes: tuple[int, ...], samples: tuple[int, int], numbers: int
) -> None:
    """Torch adds up what lies together in parts, and other numbers one by one."""
    network = {"hidden_sizes": sizes, "returns": "implicit", "numbers": numbers, "cosines": 1, "dueling": True}
    agent = agent_of((CARTPOLE[0], {**network, "stream_size": 1}), samples=samples)
    batch, hyper = drawn_for(agent), {**agent.algorithm.hyperparameters(0.0), "update": 1}
    found = by_autograd(agent, batch, hyper), by_kernel(agent, batch, hyper)
    for expected, computed in zip(*found, strict=True):
        assert same(expected, computed)
    parts = "trunk", "head.embedding", "head.head.value", "head.head.advantage"
    assert all(bool(found[0][0][agent.flat.span(f"{part}.")].any()) for part in parts)


def test_quantile_regression_by_hand() -> None:
    """One quantile, 0, of the fraction 1/4, and two samples. That at 2 is far above it: |1/4| (2 - 1/2) = 3/8, with the
    gradient -1/4. That at -1/2 is below: |1/4 - 1| / 8 = 3/32, with the gradient 3/4 * 1/2 = 3/8."""
    value, target, tau = (np.array([x], np.float32) for x in ([0.0], [2.0, -0.5], [0.25]))
    by_numbers, terms, priority = np.empty((1, 1), np.float32), np.empty((4, 1), np.float32), np.empty(1, np.float32)
    returns_learning.learn_quantiles(value, target, tau, np.array([2.0], np.float32), by_numbers, terms, priority)
    assert by_numbers.tolist() == [[2 * (3 / 8 - 1 / 4) / 2]]
    assert terms[:, 0].tolist() == [2 * (3 / 8 + 3 / 32) / 2, 0.0, 0.75, 0.75]
    assert priority.tolist() == [0.75]


def test_projections_are_those_of_torch_bit_by_bit() -> None:
    """Values between atoms, on them, and beyond the outermost."""
    draw = torch.Generator().manual_seed(1)
    atoms, p = torch.linspace(-4, 5, 11), torch.rand(9, 11, generator=draw)
    reward = torch.tensor([0.0, 0.9, -0.9, 100, -100, 0.3, 0, 0, 1])
    discount = torch.tensor([1.0, 1, 1, 1, 1, 0.9, 0, 0.5, 0.99])
    out = np.empty((9, 11), np.float32)
    returns_learning.project(p.numpy(), reward.numpy(), discount.numpy(), atoms.numpy(), out)
    with portable_operations():
        expected = project(p, reward.unsqueeze(-1) + discount.unsqueeze(-1) * atoms, atoms)
    assert same(out, expected)
    np.testing.assert_allclose(out[0], p[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "layers"),
    [
        ((13, 11), ((32, 3, 3), (32, 2, 2))),  # with a rest
        ((20, 28), ((32, 3, 3), (64, 3, 3))),
        ((12, 16), ((32, 4, 2), (32, 2, 1))),  # pixels in blocks, and patches that overlap
        ((40, 44), ((32, 8, 4), (64, 4, 2), (32, 3, 1))),
        ((37, 43), ((32, 8, 4), (64, 4, 2))),
    ],
)
def test_convolutions_are_those_of_torch_bit_by_bit(
    size: tuple[int, int], layers: tuple[tuple[int, int, int], ...]
) -> None:
    draw, samples = torch.Generator().manual_seed(1), 7
    images = torch.randint(256, (samples, 2, *size), dtype=torch.uint8, generator=draw)
    network, height, width, channels = ConvNet((2, *size), layers, 0, "relu"), *size, 2
    rows, place = list[list[int]](), 0
    for index, (convolution, (outputs, kernel, stride)) in enumerate(zip(network.convolutions, layers, strict=True)):
        assert isinstance(convolution, Conv2d | PixelConv2d)
        for parameter in convolution.parameters():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
        block = convolution.blocks_of(height, width) if isinstance(convolution, PixelConv2d) else 1
        shape = [kernel, stride, channels, height, width, block, 1 if index else 255]
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        patch, end = channels * kernel**2, place + convolution.weight.numel()
        rows.append([place, end, patch, outputs * height * width, RELU, index - 1, 0, *shape])
        channels, place = outputs, end + outputs
    table, last = np.array(rows, np.int64), len(rows) - 1
    by_y = torch.randn(samples, channels * height * width, generator=draw)
    with portable_operations():
        y = network(images, torch.float32)
        y.backward(by_y)
    flat = torch.cat([x.detach().flatten() for x in network.parameters()]).numpy()
    x = images.flatten(1).float().numpy()
    scratch = evaluate(table, flat, x)
    assert same(activations(scratch, table, samples, last), y.detach())
    gradients, gradient = np.empty_like(scratch), np.zeros((1, len(flat)), np.float32)
    activations(gradients, table, samples, last)[:] = by_y
    backward(flat, table, x, scratch, gradients, gradient, True, False, x[:0])
    for (begin, end, *_), convolution in zip(rows, network.convolutions, strict=True):
        assert same(gradient[0, begin:end], convolution.weight.grad.flatten())  # type: ignore[union-attr]


def test_gradients_are_added_to_earlier_ones() -> None:
    """Those by weights of convolutions, sample by sample, as if all had come at once."""
    draw, samples = np.random.default_rng(1), 6
    table = np.array([[0, 1024, 32, 32 * 12, RELU, -1, 0, 4, 2, 2, 8, 10, 2, 1]], np.int64)
    flat, x = draw.standard_normal(1056).astype(np.float32), draw.standard_normal((samples, 160)).astype(np.float32)
    scratch = evaluate(table, flat, x)
    by_y, found = draw.standard_normal(scratch.shape).astype(np.float32), list[np.ndarray]()
    for parts in ([0, samples], [0, 1, 4, samples]):
        gradient = np.zeros((1, len(flat)), np.float32)
        for begin, end in itertools.pairwise(parts):
            rows = slice(begin * 384, end * 384)
            of_part = by_y[rows].copy()
            backward(flat, table, x[begin:end], scratch[rows], of_part, gradient, begin == 0, False, x[:0])
        found.append(gradient)
    assert same(*found) and np.count_nonzero(found[0]) > 500
