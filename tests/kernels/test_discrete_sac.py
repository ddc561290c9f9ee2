"""The kernels of SAC with discrete actions have the bits of torch's replaced operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from actor_critics import act_alike, agent_for, learn_alike
from gymnasium import spaces
from replaced import compare_ledgers
from tiny import portable

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import DiscreteSACKernels


def agent_of(choices: int = 3, *, prioritized: bool = False, **model: Any) -> Agent:
    """An agent with so many actions.

    Args:
        model: settings.
    """
    model = {"hidden_sizes": (24, 17), **model}
    return agent_for(recipes.sac_mujoco(), spaces.Discrete(choices), prioritized, {"target_entropy": 0.3}, model)


def compare(agent: Agent, count: int) -> None:
    assert isinstance(agent.kernels, DiscreteSACKernels)
    assert all(bool(each.any()) for each in learn_alike(agent, count).values())


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
    compare(agent_of(prioritized=prioritized, **model), 21)


@pytest.mark.parametrize("choices", [2, 3, 11])
@pytest.mark.parametrize("count", [1, 21, 300])
def test_so_are_those_of_other_numbers_of_items_and_actions(choices: int, count: int) -> None:
    """Torch adds up what lies together in parts, and other numbers one by one."""
    compare(agent_of(choices), count)


def test_a_kernel_acts_with_the_bits_of_torch() -> None:
    act_alike(agent_of(), 21)


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
