"""The kernels of R2D2 have the bits of torch's replaced operations."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slices import by_autograd, by_kernel
from tiny import EXPERIMENTS, options
from torch import Tensor

from lockstep import recipes, resume, train
from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import SequenceKernels
from lockstep.algorithms.r2d2 import R2D2Config
from lockstep.algorithms.r2d2 import rescale as torch_rescale
from lockstep.algorithms.r2d2 import unscale as torch_unscale
from lockstep.core.transitions import Sequences
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.kernels.sequence_learning import rescale, unscale
from lockstep.models import QModelConfig
from lockstep.models.arithmetic import portable_operations

BURN_IN, LEARNED, N_STEP = 3, 4, 2
STEPS = BURN_IN + LEARNED + N_STEP
CARTPOLE = {"env.id": "CartPole-v1", "model.hidden_sizes": (24, 17)}
MINATAR = {"env.id": "MinAtar/Breakout-v1", "model.encoder": "minatar", "model.dense_size": 9}
PIXELS = {"env.id": "Pong", "env.adapter": "auto", "model.encoder": "der"}
DUELING = {"model.dueling": True, "model.previous_action_reward": True}
NOISY = {"model.noisy": True, "model.dueling": True, "model.stream_size": 9, "model.layer_norm": True}


def agent_of(change: dict[str, Any]) -> Agent:
    """An agent whose networks are no longer what they began as."""
    full = recipes.r2d2_memory()
    full = full.replace(
        env=EnvConfig(id="CartPole-v1", adapter="compiled", num_envs=4),
        model=QModelConfig(core="lstm", core_size=13),
        algorithm=R2D2Config(burn_in=BURN_IN, unroll=LEARNED, n_step=N_STEP, rollout=8, warmup=100),
        precision="portable",
    )
    agent = Agent(full.replace(**change))
    draw = torch.Generator().manual_seed(1)
    for vector in agent.vectors:
        vector += 0.05 * torch.randn(vector.shape, generator=draw)
    return agent


def seen(agent: Agent, draw: torch.Generator, *leading: int) -> Tensor:
    shape = agent.observation_space.shape
    assert shape is not None
    if len(shape) == 3:
        return 255 * (torch.rand(*leading, *shape, generator=draw) < 0.2).to(torch.uint8)
    return torch.randn(*leading, *shape, generator=draw)


def sequences(agent: Agent, count: int) -> Sequences:
    """Sequences with resets in every part, invalid steps, returns that end early, and errors small and large."""
    draw, config, model = torch.Generator().manual_seed(2), agent.experiment.algorithm, agent.model
    assert isinstance(config, R2D2Config)
    actions, steps = agent.action_space.n, config.burn_in + LEARNED + N_STEP  # type: ignore[attr-defined]
    numbers = agent.algorithm.noise_numbers(model, count)  # type: ignore[attr-defined]
    shape = (LEARNED, count)
    return Sequences(
        obs=seen(agent, draw, steps, count),
        start=torch.rand(steps, count, generator=draw) < 0.3,
        prev_action=torch.randint(actions, (steps, count), generator=draw) if model.uses_previous else None,
        prev_reward=torch.randn(steps, count, generator=draw) if model.uses_previous else None,
        state=torch.randn(count, model.state_size, generator=draw),
        action=torch.randint(actions, shape, generator=draw),
        reward=torch.linspace(9, 0, count) * torch.randn(shape, generator=draw),
        discount=0.99 * (torch.rand(shape, generator=draw) > 0.2),
        ahead=torch.randint(1, N_STEP + 1, shape, generator=draw),
        weight=torch.rand(count, generator=draw) + 0.5,
        valid=torch.rand(shape, generator=draw) < 0.8,
        noise=torch.rand(numbers, generator=draw) if numbers else None,
    )


def same(a: Any, b: Any) -> bool:
    """Whether two arrays of float32 have identical bits."""
    return np.array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


@pytest.mark.parametrize(
    "change",
    [
        *({"model.core": core, **each} for core, each in itertools.product(("lstm", "gru"), (CARTPOLE, MINATAR))),
        {**CARTPOLE, **DUELING},
        {**MINATAR, **DUELING, "model.core": "gru"},
        {**CARTPOLE, **NOISY},
        {**MINATAR, **NOISY, "model.core": "gru"},
        {**PIXELS, **DUELING},
        {**PIXELS, **DUELING, "model.encoder": "nature", "model.dense_size": 9},
        {**CARTPOLE, "algorithm.burn_in": 0},
        {**CARTPOLE, "algorithm.huber_delta": 0.4},
        {**CARTPOLE, **DUELING, "algorithm.huber_delta": 1e9},
        {**CARTPOLE, **DUELING, "algorithm.double": False, "algorithm.replay.prioritized": True},
        {**MINATAR, "algorithm.priority_max": 0.3, "algorithm.rescaling": 0.01, "algorithm.replay.prioritized": True},
    ],
)
@pytest.mark.parametrize("count", [1, 11])
def test_gradients_metrics_and_priorities_are_those_of_torch_bit_by_bit(change: dict[str, Any], count: int) -> None:
    """Also of a single sequence, whose steps lie together, so that torch adds them up in parts."""
    agent = agent_of(change)
    assert isinstance(agent.kernels, SequenceKernels)
    batch, hyper = sequences(agent, count), {**agent.algorithm.hyperparameters(0.0), "update": 1}
    found = by_autograd(agent, batch, hyper), by_kernel(agent, batch, hyper)
    for expected, computed in zip(*found, strict=True):
        assert same(expected, computed)
    gradient, priorities = found[0]
    assert (gradient[: agent.flat.vector.numel()].abs() > 1e-4).sum() > 100
    assert count == 1 or priorities.min() < 1 < priorities.max()


@pytest.mark.parametrize("change", [{**CARTPOLE, **NOISY, "model.core": "gru"}, {**MINATAR, **DUELING}])
def test_a_kernel_acts_with_the_bits_of_torch(change: dict[str, Any]) -> None:
    """Step by step, with a state that restarts, and after the weights have changed."""
    agent, environments = agent_of(change), 6
    model, draw = agent.model, torch.Generator().manual_seed(3)
    batch = sequences(agent, environments)
    assert agent.kernels is not None
    inference = agent.kernels.inference(model.for_acting())
    assert inference is not None
    states = [batch.state.clone(), batch.state.clone()]
    for t in range(STEPS):
        if model.noise_numbers:
            noise = torch.rand(model.noise_numbers, generator=draw)
            with portable_operations():
                model.set_noise(noise)
            inference.set_noise(noise)
        if t == 2:
            vector, _ = agent.vectors
            vector += 0.1
            assert inference.load(vector, lasts=False)
            inference.refresh()
        at = slice(t, t + 1)
        previous = [None if x is None else x[at] for x in (batch.prev_action, batch.prev_reward)]
        given, before = (batch.obs[at], batch.start[at]), states[1].clone()
        with torch.no_grad(), portable_operations():
            expected, states[0] = model(*given, states[0], *previous)
        found, after = inference(*given, states[1], *previous)
        assert torch.equal(states[1], before), "what was given is not overwritten"
        states[1] = after
        assert same(found.policy, expected.policy) and same(found.value, expected.value)
        assert same(states[0], states[1])


def test_values_are_rescaled_as_by_hand_and_as_by_torch() -> None:
    """h(3) = sqrt(4) - 1 + 3ε; the inverse leads back."""
    assert rescale(np.float32(3), 0.5) == 2.5
    assert rescale(np.float32(-8), 0.25) == -4
    x = 30 * torch.randn(500, generator=torch.Generator().manual_seed(1))
    x[:2] = torch.tensor([0.0, -0.0])
    for epsilon in (1e-3, 1e-2):
        with portable_operations():
            expected = torch_rescale(x, epsilon), torch_unscale(x, epsilon)
        for function, of_torch in zip((rescale, unscale), expected, strict=True):
            assert same(np.array([function(each, epsilon) for each in x.numpy()], np.float32), of_torch)
        back = [unscale(rescale(each, epsilon), epsilon) for each in x.numpy()]
        np.testing.assert_allclose(back, x, rtol=1e-4, atol=1e-5)


def experiment_of(name: str, **change: Any) -> Experiment:
    return EXPERIMENTS[name]().replace(precision="portable", **change)


GRID = {
    **{"env.id": "MinAtar/Breakout-v1", "env.adapter": "compiled"},
    **{"model.encoder": "minatar", "model.core": "lstm", "model.previous_action_reward": True},
    **{"algorithm.burn_in": 2, "algorithm.unroll": 4, "algorithm.replay.prioritized": True},
}


@pytest.mark.parametrize("change", [{"model.noisy": True}, {**GRID, "model.dueling": True, "scheme.lag": 0}])
def test_runs_with_kernels_are_those_of_torchs_replaced_operations(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other layouts and after a resumption, too."""
    experiment = experiment_of("r2d2-uniform-lag-1", **change)
    assert isinstance(Agent(experiment).kernels, SequenceKernels)
    layouts = {"inline": "inline", "together": "processes:2", "split": "cpu:a1-l1"}
    for run, layout in layouts.items():
        train(experiment, layout, options(tmp_path / run))
    train(experiment, options=options(tmp_path / "resumed"), stop_after=2)
    resume(tmp_path / "resumed")
    monkeypatch.setattr(Experiment, "kernels", lambda *_: None)
    train(experiment, options=options(tmp_path / "torch"))
    ledgers = {(tmp_path / run / "ledger.jsonl").read_bytes() for run in (*layouts, "resumed", "torch")}
    assert len(ledgers) == 1


def test_what_has_other_bits_or_no_core_is_left_to_torch() -> None:
    full = experiment_of("r2d2-uniform-lag-1")
    assert Agent(full).kernels
    for change in ({"activation": "elu"}, {"core": "mingru"}, {"core": "none"}):
        assert not Agent(full.replace(model=replace(full.model, **change))).kernels
    frames = experiment_of("r2d2-prioritized-frames")
    assert Agent(frames).kernels
    assert not Agent(frames.replace(**{"model.encoder": "convnet_simple"})).kernels
