"""The kernels of MPO have the bits of torch's replaced operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from actor_critics import act_alike, agent_for, learn_alike
from gymnasium import spaces
from replaced import compare_ledgers
from tiny import portable
from torch import Tensor

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import MPOKernels
from lockstep.envs.settings import EnvConfig
from lockstep.kernels.mpo_loss import weigh
from lockstep.models.normalize import NormalizeConfig


def agent_of(size: int = 3, *, prioritized: bool = False, actions: int = 20, **model: Any) -> Agent:
    """An agent with actions of this size.

    Args:
        actions: that are sampled for each item.
        model: settings.
    """
    model = {"hidden_sizes": (24, 17, 16), **model}
    return agent_for(recipes.mpo_mujoco(), spaces.Box(-1, 2, (size,)), prioritized, {"actions": actions}, model)


def compare(agent: Agent, count: int) -> dict[str, Tensor]:
    assert isinstance(agent.kernels, MPOKernels)
    return learn_alike(agent, count)


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"critics": 3},
        {"activation": "tanh", "critics": 2, "layer_norm": False},
        {"activation": "relu", "hidden_sizes": (16,)},
        {"layer_norm": False, "hidden_sizes": (9, 1, 4)},
        {"initial_std": 5.0},
        {"critic_sizes": (9, 5)},
    ],
)
def test_gradients_are_those_of_torch_bit_by_bit(model: dict[str, Any], prioritized: bool) -> None:
    assert all(bool(each.any()) for each in compare(agent_of(prioritized=prioritized, **model), 21).values())


@pytest.mark.parametrize("size", [1, 3, 11])
@pytest.mark.parametrize(("actions", "count"), [(2, 21), (20, 21), (20, 1), (3, 300)])
def test_so_are_those_of_other_numbers_of_items_actions_and_dimensions(size: int, actions: int, count: int) -> None:
    """Torch adds up what lies together in parts, and other numbers one by one."""
    compare(agent_of(size, actions=actions, critics=2), count)


def test_log_std_beyond_its_bounds_has_no_gradient() -> None:
    agent = agent_of(1)
    name = "actor.layers.biases.3"
    agent.flat.named()[name].copy_(torch.tensor([[[0.1, 5.0]]]))
    of_mean, of_log_std = compare(agent, 21)[name].flatten().tolist()
    assert of_mean != 0 and of_log_std == 0


def test_weights_by_hand() -> None:
    """Two actions whose values are log 3 apart, with a temperature of 1, have the weights 1/4 and 3/4. The dual is
    0.5 + log(1 + 3) - log 2, and its derivative by the temperature that minus the weighted value 3/4 log 3."""
    values, weights, dual = np.log(np.array([[1], [3]], np.float32)), np.empty((2, 1), np.float32), np.empty(1)
    dual = dual.astype(np.float32)
    variable, bounds = np.float32(np.log(np.expm1(1))), np.array([0.5, 0, 0, np.log(2)], np.float32)
    slope = weigh(values, variable, bounds, np.array([2], np.float32), weights, dual)
    np.testing.assert_allclose(weights, [[0.25], [0.75]], rtol=1e-6)
    np.testing.assert_allclose(dual, [0.5 + np.log(2)], rtol=1e-6)
    of_softplus = 1 - np.exp(-1)
    assert slope == pytest.approx(2 * (0.5 + np.log(2) - 0.75 * np.log(3)) * of_softplus, rel=1e-5)


@pytest.mark.parametrize("model", [{}, {"activation": "relu", "layer_norm": False}])
def test_a_kernel_acts_with_the_bits_of_torch(model: dict[str, Any]) -> None:
    act_alike(agent_of(**model), 21)


@pytest.mark.parametrize("change", [{"hidden_sizes": (1, 5)}, {"critic_sizes": (1, 5)}])
def test_other_models_have_no_kernels(change: dict[str, Any]) -> None:
    assert agent_of(**change).kernels is None


class Apart(gymnasium.ObservationWrapper[dict[str, Any], Any, Any]):
    """Pendulum whose angle and velocity are entries of a Dict."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))
        self.observation_space = spaces.Dict(velocity=spaces.Box(-8, 8, (1,)), angle=spaces.Box(-1, 1, (2,)))

    def observation(self, observation: Any) -> dict[str, Any]:
        return {"velocity": observation[2:], "angle": observation[:2]}


@pytest.mark.parametrize("critic_only", [None, (), ("angle",), ("velocity",)])
def test_runs_with_kernels_are_those_of_torchs_replaced_operations(
    critic_only: tuple[str, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = portable("mpo").replace(**{"algorithm.replay.prioritized": True, "model.critics": 2})
    if critic_only is not None:  # with a Dict
        env = EnvConfig.of(Apart, num_envs=4, reseed_every=24)
        experiment = experiment.replace(
            env=env, normalize=NormalizeConfig(observations=True), **{"model.critic_only": critic_only}
        )
    compare_ledgers(experiment, tmp_path, monkeypatch, MPOKernels)
