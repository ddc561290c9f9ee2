"""Agents with a policy and critics, items that they learn from, and comparisons of their kernels with torch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from slices import by_autograd, by_kernel, same
from torch import Tensor

from lockstep.agent import Agent
from lockstep.core.transitions import Transitions
from lockstep.experiment import Experiment
from lockstep.models.arithmetic import portable_operations

OBSERVED = 5


def agent_for(
    recipe: Experiment,
    actions: gymnasium.Space[Any],
    prioritized: bool,
    algorithm: dict[str, Any],
    model: dict[str, Any],
) -> Agent:
    """A disturbed agent of a recipe in portable arithmetic that observes vectors.

    Args:
        algorithm, model: settings.
    """
    config: Any = recipe.algorithm
    config = replace(config, replay=replace(config.replay, prioritized=prioritized), **algorithm)
    like: Any = SimpleNamespace(observation_space=spaces.Box(-9, 9, (OBSERVED,)), action_space=actions)
    full = recipe.replace(precision="portable", algorithm=config, model=replace(recipe.model, **model))
    return disturbed(Agent(full, like=like))


def disturbed(agent: Agent) -> Agent:
    """The agent. Its networks and what its algorithm learns beside them are no longer what they began as."""
    draw = torch.Generator().manual_seed(1)
    for scale, vector in zip((0.1, 0.05), agent.vectors, strict=True):
        vector += scale * torch.randn(vector.shape, generator=draw)
    return agent


def items(agent: Agent, count: int) -> Transitions:
    """A slice of a minibatch, with the noise that the loss consumes."""
    draw, actions = torch.Generator().manual_seed(2), agent.action_space

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    observed, numbers = spaces.flatdim(agent.observation_space), agent.algorithm.noise_numbers(agent.model, count)  # type: ignore[attr-defined]
    return Transitions(
        obs=normal(1, count, observed),
        action=torch.randint(int(actions.n), (1, count), generator=draw)
        if isinstance(actions, spaces.Discrete)
        else normal(1, count, spaces.flatdim(actions)),
        reward=normal(1, count),
        discount=0.99 * (torch.rand(1, count, generator=draw) > 0.2),
        next_obs=normal(1, count, observed),
        weight=torch.rand(count, generator=draw) + 0.5,
        noise=torch.rand(numbers, generator=draw) if numbers else None,
        valid=torch.ones(1, count, dtype=torch.bool),
    )


def learn_alike(agent: Agent, count: int) -> dict[str, Tensor]:
    """Assert that gradients, metrics and priorities of the kernel have the bits of torch's replaced operations. Returns
    the gradient by parameter."""
    batch, hyper = items(agent, count), {**agent.algorithm.hyperparameters(0.0), "update": 1}
    found = by_autograd(agent, batch, hyper), by_kernel(agent, batch, hyper)
    for expected, computed in zip(*found, strict=True):
        assert same(expected, computed)
    return agent.flat.named(found[0][0][: agent.flat.vector.numel()])


def act_alike(agent: Agent, count: int) -> None:
    """Assert that a kernel acts with the bits of torch's replaced operations."""
    distribution, obs = agent.model.distribution, items(agent, count).obs
    start, state = torch.zeros(1, count, dtype=torch.bool), torch.zeros(count, 0)
    noise = torch.rand(1, count, distribution.noise_size, generator=torch.Generator().manual_seed(3))
    assert agent.kernels is not None
    inference = agent.kernels.inference(agent.model.for_acting())
    assert inference is not None
    with torch.no_grad(), portable_operations():
        expected = agent.model(obs, start, state)[0].policy
        chosen = distribution.sample(expected, noise)
    with inference.arithmetic():
        found = inference(obs, start, state, None, None)[0].policy
        assert same(found, expected) and same(distribution.sample(found, noise), chosen)
