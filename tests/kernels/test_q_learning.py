"""The kernel of DQN computes the gradients, metrics and priorities that autograd computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from slices import by_autograd, by_kernel
from torch import Tensor

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms.dqn import DQNConfig
from lockstep.algorithms.kernel_table import DQNKernels
from lockstep.core.transitions import Transitions
from lockstep.envs.settings import EnvConfig
from lockstep.models import QModelConfig

ITEMS = 21
CARTPOLE, MINATAR = ("CartPole-v1", {"hidden_sizes": (24, 17)}), ("MinAtar/Breakout-v1", {"encoder": "minatar"})


def agent_of(
    task: tuple[str, dict[str, Any]],
    *,
    prioritized: bool = False,
    double: bool = False,
    samples: tuple[int, int] = (3, 4),
    delta: float = 1.0,
) -> Agent:
    """An agent whose networks are no longer what they began as. samples: implicit quantiles of items and targets;
    delta: of the Huber loss."""
    full, (name, settings) = recipes.dqn_minatar(), task
    algorithm = full.algorithm
    assert isinstance(algorithm, DQNConfig)
    algorithm = replace(algorithm, double=double, replay=replace(algorithm.replay, prioritized=prioritized))
    algorithm = replace(algorithm, samples=samples[0], target_samples=samples[1], huber_delta=delta)
    env = EnvConfig(id=name, adapter="auto" if name == "Pong" else "compiled", num_envs=4)
    agent = Agent(full.replace(precision="portable", env=env, algorithm=algorithm, model=QModelConfig(**settings)))
    draw = torch.Generator().manual_seed(1)
    for vector in agent.vectors:
        vector += 0.05 * torch.randn(vector.shape, generator=draw)
    return agent


def items(agent: Agent) -> Transitions:
    draw, space = torch.Generator().manual_seed(2), agent.observation_space

    def obs() -> Tensor:
        assert space.shape is not None
        shape = (1, ITEMS, *space.shape)
        if len(space.shape) == 3:
            return 255 * (torch.rand(shape, generator=draw) < 0.2).to(torch.uint8)
        return torch.randn(shape, generator=draw)

    return Transitions(
        obs=obs(),
        action=torch.randint(agent.action_space.n, (1, ITEMS), generator=draw),  # type: ignore[attr-defined]
        reward=2 * torch.randn(1, ITEMS, generator=draw),
        discount=0.99 * (torch.rand(1, ITEMS, generator=draw) > 0.2),
        next_obs=obs(),
        weight=torch.rand(ITEMS, generator=draw) + 0.5,
        noise=None,
        valid=torch.ones(1, ITEMS, dtype=torch.bool),
    )


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("task", [CARTPOLE, MINATAR])
def test_gradients_are_those_of_autograd(task: tuple[str, dict[str, Any]], double: bool, prioritized: bool) -> None:
    agent = agent_of(task, prioritized=prioritized, double=double)
    assert isinstance(agent.kernels, DQNKernels)
    batch, hyper = items(agent), {**agent.algorithm.hyperparameters(0.0), "update": 1}
    found = by_autograd(agent, batch, hyper), by_kernel(agent, batch, hyper)
    for expected, computed in zip(*found, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-5)
    assert found[0][0].count_nonzero() > 300
    errors = found[0][1]
    assert (errors < 1).any() and (errors > 1).any(), "both parts of the Huber loss are compared"


@pytest.mark.parametrize("delta", [0.4, 1e9])
@pytest.mark.parametrize("streams", [{}, {"dueling": True}])
def test_gradients_of_other_huber_losses_are_those_of_autograd(streams: dict[str, Any], delta: float) -> None:
    name, settings = CARTPOLE
    agent, usual = agent_of((name, {**settings, **streams}), delta=delta), agent_of((name, {**settings, **streams}))
    batch, hyper = items(agent), {**agent.algorithm.hyperparameters(0.0), "update": 1}
    expected, computed = by_autograd(agent, batch, hyper), by_kernel(agent, batch, hyper)
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected[0], by_autograd(usual, batch, hyper)[0], rtol=1e-2)


@pytest.mark.parametrize("task", [CARTPOLE, MINATAR])
def test_a_kernel_evaluates_the_network(task: tuple[str, dict[str, Any]]) -> None:
    agent = agent_of(task)
    obs, start = items(agent).obs, torch.zeros(1, ITEMS, dtype=torch.bool)
    assert agent.kernels is not None
    inference = agent.kernels.inference(agent.model.for_acting())
    assert inference is not None
    found, _ = inference(obs, start, torch.zeros(ITEMS, 0), None, None)
    expected, _ = agent.model(obs, start, torch.zeros(ITEMS, 0))
    torch.testing.assert_close(found.policy, expected.policy)
    torch.testing.assert_close(found.value, expected.value)
