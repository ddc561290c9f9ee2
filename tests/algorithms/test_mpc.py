from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lockstep import recipes
from lockstep.algorithms.mpc import MPCConfig
from lockstep.algorithms.offpolicy import ReplayConfig
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Transitions
from lockstep.models import QModelConfig
from lockstep.models.dynamics import DynamicsConfig, DynamicsModel

CONFIG = DynamicsConfig(members=2, hidden_sizes=(32,), horizon=2, population=4, elites=2, rounds=1)


def make() -> DynamicsModel:
    observations = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    actions = spaces.Box(-2, 2, (1,), np.float32)
    return CONFIG.build(observations, actions, precision="fp32", normalize_observations=True, seed=1)


def transitions(seed: int, items: int = 64) -> Transitions:
    """A spring that is pushed."""
    draw = torch.Generator().manual_seed(seed)
    obs = torch.randn(1, items, 2, generator=draw)
    action = 2 * torch.rand(1, items, 1, generator=draw) - 1
    speed = obs[..., 1] - 0.5 * obs[..., 0] + action[..., 0]
    return Transitions(
        obs=obs,
        action=action,
        reward=-obs[..., 0].abs(),
        discount=torch.full((1, items), 0.99),
        next_obs=torch.stack([obs[..., 0] + 0.1 * speed, speed], -1),
        weight=torch.ones(items),
        valid=torch.ones(1, items, dtype=torch.bool),
        noise=None,
    )


def test_loss_agrees_with_the_density_of_normal_distributions() -> None:
    algorithm, model, batch = MPCConfig().build(), make(), transitions(0, 3)
    model.set_observation_statistics(torch.tensor([0.5, -0.5]), torch.tensor([2.0, 4.0]))
    batch = batch.replace(action=3 * batch.action)  # of which the environment clips a part
    loss = algorithm.loss(model, batch, {})
    total = 0.0
    for i in range(3):
        x = (batch.obs[0, i] - model.mean) / model.std
        wanted = torch.cat([(batch.next_obs[0, i] - batch.obs[0, i]) / model.std, batch.reward[0, i : i + 1]])
        mean, log_variance = model.predict(x.view(1, 1, 2), batch.action[0, i].clamp(-1, 1).view(1, 1, 1))
        for member in range(2):
            normal = torch.distributions.Normal(mean[member, 0], (0.5 * log_variance[member, 0]).exp())
            density = -2 * normal.log_prob(wanted) - math.log(2 * math.pi)
            total += float((normal.scale * density).sum().detach())
    assert float(loss.total.detach()) == pytest.approx(total / 2, rel=1e-4)
    assert tuple(loss.metrics) == algorithm.metric_names


@pytest.mark.slow
def test_learned_dynamics_predict_what_was_not_seen() -> None:
    algorithm, model = MPCConfig().build(), make()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    before = algorithm.loss(model, transitions(99), {}).metrics
    for step in range(400):
        optimizer.zero_grad()
        (algorithm.loss(model, transitions(step), {}).total / 64).backward()
        optimizer.step()
    after = algorithm.loss(model, transitions(99), {}).metrics
    for name in ("model/error", "model/reward_error"):
        assert float(after[name]) < 0.2 * float(before[name])


def test_exploration_is_random_first_and_then_noisy() -> None:
    algorithm = MPCConfig(warmup=100, noise_std=0.3).build()
    assert algorithm.exploration(0.0, 99, range(2), 4).random
    how = algorithm.exploration(0.5, 100, range(2), 4)
    assert not how.random and how.numbers.tolist() == [[pytest.approx(0.3)], [pytest.approx(0.3)]]


def test_settings_that_do_not_fit_are_refused() -> None:
    experiment = recipes.mpc_pendulum()
    with pytest.raises(SettingsError, match=r"--algorithm\.n-step 1 .*--algorithm\.replay\.no-prioritized"):
        MPCConfig(replay=ReplayConfig(prioritized=True)).validate(1, recurrent=False)
    with pytest.raises(SettingsError, match="noise_std"):
        dataclasses.replace(experiment.algorithm, noise_std=-1.0).validate(1, recurrent=False)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"algorithm=mpc .*DynamicsConfig"):
        experiment.replace(model=QModelConfig()).validate()
