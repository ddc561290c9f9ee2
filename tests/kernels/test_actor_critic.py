"""Kernels of SAC, TD3 and DDPG compute the gradients, metrics and priorities that autograd computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from actor_critics import disturbed, items
from gymnasium import spaces
from slices import by_autograd, by_kernel
from torch import Tensor

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import SACKernels, TD3Kernels
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment

ITEMS = 21


def agent_of(recipe: Callable[[], Experiment], model: dict[str, Any], prioritized: bool) -> Agent:
    """An agent whose networks are no longer what they began as."""
    full = recipe()
    algorithm: Any = full.algorithm
    algorithm = replace(algorithm, replay=replace(algorithm.replay, prioritized=prioritized))
    settings = {"hidden_sizes": (24, 17), **model}
    env = EnvConfig(id="Pendulum-v1", adapter="compiled", num_envs=4)
    return disturbed(
        Agent(full.replace(precision="portable", env=env, algorithm=algorithm, model=replace(full.model, **settings)))
    )


@pytest.mark.parametrize("update", [1, 2])
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"activation": "tanh", "critics": 1},
        {"activation": "elu", "critics": 3},
        {"layer_norm": True},
        {"critic_sizes": (9, 30, 8), "layer_norm": True},
    ],
)
@pytest.mark.parametrize("recipe", [recipes.sac_mujoco, recipes.td3_mujoco, recipes.ddpg_mujoco])
def test_gradients_are_those_of_autograd(
    recipe: Callable[[], Experiment], model: dict[str, Any], prioritized: bool, update: int
) -> None:
    agent = agent_of(recipe, model, prioritized)
    assert isinstance(agent.kernels, SACKernels if recipe is recipes.sac_mujoco else TD3Kernels)
    batch, hyper = items(agent, ITEMS), {**agent.algorithm.hyperparameters(0.0), "update": update}
    found = by_autograd(agent, batch, hyper), by_kernel(agent, batch, hyper)
    for expected, computed in zip(*found, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-5)
    assert found[0][0].count_nonzero() > 500


@pytest.mark.parametrize("hidden", ["angle", "velocity"])
@pytest.mark.parametrize("recipe", [recipes.sac_mujoco, recipes.td3_mujoco])
def test_so_are_those_of_critics_that_see_more(recipe: Callable[[], Experiment], hidden: str) -> None:
    plain = agent_of(recipe, {}, prioritized=False)
    seen = spaces.Dict(angle=spaces.Box(-1, 1, (2,)), velocity=spaces.Box(-8, 8, (1,)))
    like: Any = SimpleNamespace(observation_space=seen, action_space=plain.action_space)
    agent = Agent(plain.experiment.replace(**{"model.critic_only": (hidden,)}), like=like)
    assert agent.kernels is not None and agent.flat.vector.numel() < plain.flat.vector.numel()

    def entries(obs: Tensor) -> dict[str, Tensor]:
        return {"angle": obs[..., :2], "velocity": obs[..., 2:]}

    batch, hyper = items(plain, ITEMS), {**agent.algorithm.hyperparameters(0.0), "update": 2}
    batch = batch.replace(obs=entries(batch.obs), next_obs=entries(batch.next_obs))
    found = by_autograd(agent, batch, hyper), by_kernel(agent, batch, hyper)
    for expected, computed in zip(*found, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-5)
    gradient = agent.flat.named(found[0][0][: agent.flat.vector.numel()])
    assert gradient["actor.layers.weights.0"].count_nonzero() > 10
    acting = agent.kernels.inference(agent.model.for_acting())
    assert acting is not None
    start, state = torch.zeros(1, ITEMS, dtype=torch.bool), torch.zeros(ITEMS, 0)
    own = {key: x for key, x in batch.obs.items() if key != hidden}
    found, _ = acting(own, start, state, None, None)
    torch.testing.assert_close(found.policy, agent.model(batch.obs, start, state)[0].policy)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("recipe", [recipes.sac_mujoco, recipes.td3_mujoco])
def test_a_kernel_evaluates_the_policy(recipe: Callable[[], Experiment], layer_norm: bool) -> None:
    agent = agent_of(recipe, {"layer_norm": layer_norm}, prioritized=False)
    obs, start = items(agent, ITEMS).obs, torch.zeros(1, ITEMS, dtype=torch.bool)
    assert agent.kernels is not None
    inference = agent.kernels.inference(agent.model.for_acting())
    assert inference is not None
    found, _ = inference(obs, start, torch.zeros(ITEMS, 0), None, None)
    torch.testing.assert_close(found.policy, agent.model(obs, start, torch.zeros(ITEMS, 0))[0].policy)


def test_log_std_beyond_its_bounds_has_no_gradient() -> None:
    agent = agent_of(recipes.sac_mujoco, {}, prioritized=False)
    name = "actor.layers.biases.2"
    agent.flat.named()[name].copy_(torch.tensor([[[0.1, 5.0]]]))
    gradient, _ = by_kernel(agent, items(agent, ITEMS), {"update": 1})
    of_mean, of_log_std = agent.flat.named(gradient[: agent.flat.vector.numel()])[name].flatten().tolist()
    assert of_mean != 0 and of_log_std == 0


@pytest.mark.parametrize("change", [{"hidden_sizes": (1, 9)}, {"critic_sizes": (1, 9)}])
def test_other_models_have_no_kernels(change: dict[str, Any]) -> None:
    assert agent_of(recipes.sac_mujoco, {"layer_norm": True, **change}, prioritized=False).kernels is None
