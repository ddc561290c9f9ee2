"""The kernels of SAC with discrete actions have the bits of torch's replaced operations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gymnasium import spaces
from replaced import compare_ledgers
from slices import by_autograd, by_kernel
from test_returns_learning import same
from tiny import portable
from torch import Tensor

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import DiscreteSACKernels
from lockstep.core.transitions import Transitions
from lockstep.models.arithmetic import portable_operations

OBSERVED = 5


def agent_of(
    choices: int = 3, *, prioritized: bool = False, target_entropy: float | None = None, **model: Any
) -> Agent:
    """An agent whose networks and temperature are no longer what they began as.

    Args:
        choices: how many actions there are.
        model: settings.
    """
    full = recipes.sac_mujoco()
    algorithm: Any = full.algorithm
    memory = replace(algorithm.replay, prioritized=prioritized)
    algorithm = replace(algorithm, target_entropy=target_entropy, replay=memory)
    network = replace(full.model, **{"hidden_sizes": (24, 17), **model})
    like: Any = SimpleNamespace(observation_space=spaces.Box(-9, 9, (OBSERVED,)), action_space=spaces.Discrete(choices))
    agent = Agent(full.replace(precision="portable", algorithm=algorithm, model=network), like=like)
    draw = torch.Generator().manual_seed(1)
    for scale, vector in zip((0.1, 0.05), agent.vectors, strict=True):
        vector += scale * torch.randn(vector.shape, generator=draw)
    return agent


def items(choices: int, count: int) -> Transitions:
    draw = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    return Transitions(
        obs=normal(1, count, OBSERVED),
        action=torch.randint(choices, (1, count), generator=draw),
        reward=normal(1, count),
        discount=0.99 * (torch.rand(1, count, generator=draw) > 0.2),
        next_obs=normal(1, count, OBSERVED),
        weight=torch.rand(count, generator=draw) + 0.5,
        noise=None,
        valid=torch.ones(1, count, dtype=torch.bool),
    )


def compare(agent: Agent, choices: int, count: int) -> None:
    """Assert that gradients, metrics and priorities are the same."""
    assert isinstance(agent.kernels, DiscreteSACKernels)
    batch, hyper = items(choices, count), {**agent.algorithm.hyperparameters(0.0), "update": 1}
    found = by_autograd(agent, batch, hyper), by_kernel(agent, batch, hyper)
    for expected, computed in zip(*found, strict=True):
        assert same(expected, computed)
    gradient = found[0][0][: agent.flat.vector.numel()]
    assert all(bool(each.any()) for each in agent.flat.named(gradient).values())


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"critics": 1, "activation": "elu"},
        {"critics": 3, "layer_norm": True},
        {"activation": "tanh", "critic_sizes": (9, 1, 4)},
    ],
)
def test_gradients_are_those_of_torch_bit_by_bit(model: dict[str, Any], prioritized: bool) -> None:
    compare(agent_of(prioritized=prioritized, target_entropy=0.3, **model), 3, 21)


@pytest.mark.parametrize("choices", [2, 3, 11])
@pytest.mark.parametrize("count", [1, 21, 300])
def test_so_are_those_of_other_numbers_of_items_and_actions(choices: int, count: int) -> None:
    """Torch adds up what lies together in parts, and other numbers one by one."""
    compare(agent_of(choices), choices, count)


def test_a_kernel_acts_with_the_bits_of_torch() -> None:
    agent, obs = agent_of(), items(3, 21).obs
    start, noise = (
        torch.zeros(1, 21, dtype=torch.bool),
        torch.rand(1, 21, 3, generator=torch.Generator().manual_seed(3)),
    )
    assert agent.kernels is not None
    inference, distribution = agent.kernels.inference(agent.model.for_acting()), agent.model.distribution
    assert inference is not None
    with torch.no_grad(), portable_operations():
        expected = agent.model(obs, start, torch.zeros(21, 0))[0].policy
        chosen = distribution.sample(expected, noise)
    with inference.arithmetic():
        found = inference(obs, start, torch.zeros(21, 0), None, None)[0].policy
        assert same(found, expected) and torch.equal(distribution.sample(found, noise), chosen)


@pytest.mark.parametrize(
    ("name", "changes"), [("sac-discrete", {}), ("critic-only-sac", {"model.critic_only": ("observation",)})]
)
def test_runs_with_kernels_are_those_of_torchs_replaced_operations(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = portable(name).replace(**{"algorithm.replay.prioritized": True, **changes})
    compare_ledgers(experiment, tmp_path, monkeypatch, DiscreteSACKernels)


def test_a_policy_that_sees_numbers_with_others_between_them_has_no_kernels() -> None:
    assert Agent(portable("critic-only-sac")).kernels is None  # the desired goal lies in the middle
