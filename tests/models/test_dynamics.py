from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep.config.settings import SettingsError
from lockstep.models.dynamics import DynamicsConfig, DynamicsModel

OBSERVATIONS = spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTIONS = spaces.Box(-2, 2, (1,), np.float32)
SMALL = DynamicsConfig(members=3, hidden_sizes=(8,), horizon=5, population=64, elites=8, rounds=3)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make(**changes: Any) -> DynamicsModel:
    return dataclasses.replace(SMALL, **changes).build(
        OBSERVATIONS, ACTIONS, precision="fp32", normalize_observations=True, seed=1
    )


class Point(DynamicsModel):
    """A point at x_0 that actions push, best at 0.6: dynamics that are known exactly."""

    def predict(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        reward = -(x[..., :1] + action - 0.6).square()
        change = torch.cat([action, torch.zeros_like(action), reward], -1)
        return change, torch.zeros_like(change)


def point(**changes: Any) -> Point:
    model = make(**changes)
    model.__class__ = Point
    assert isinstance(model, Point)
    return model


def test_returns_agree_with_one_plan_member_and_step_at_a_time() -> None:
    model = make()
    x, plans = torch.randn(2, 2), 2 * torch.rand(2, 4, 5, 1) - 1
    found = model.returns(x, plans)
    for b in range(2):
        for p in range(4):
            totals = []
            for member in range(3):
                at, total = x[b], 0.0
                for h in range(5):
                    change, _ = model.predict(at.expand(1, 1, 2), plans[b, p, h].expand(1, 1, 1))
                    at, total = at + change[member, 0, :2], total + 0.99**h * float(change[member, 0, 2])
                totals.append(total)
            assert float(found[b, p]) == pytest.approx(sum(totals) / 3, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("changes", [{"rounds": 6}, {"rounds": 6, "planner": "mppi", "temperature": 0.02}])
def test_planners_find_the_best_plan_of_known_dynamics(changes: dict[str, Any]) -> None:
    model = point(population=256, horizon=2, **changes)
    output, state = model(
        torch.tensor([[[0.1, 0.0], [0.9, 0.0]]]), torch.ones(1, 2, dtype=torch.bool), torch.full((2, 2), 9.0)
    )
    # one step to the best place, then none: what is left of the plan
    torch.testing.assert_close(output.policy[0, :, 0], torch.tensor([0.5, -0.3]), atol=0.08, rtol=0)
    assert state.shape == (2, 2) and state[:, -1].tolist() == [0.0, 0.0]
    assert float(state.abs().max()) < 0.2
    assert float(output.value.abs().max()) < 0.1


def test_cem_refits_to_its_elites_by_hand() -> None:
    model = point(rounds=1, horizon=1, population=8, elites=2)
    x = torch.tensor([[0.1, 0.0]])
    candidates = (0.5 * torch.special.ndtri(model.points.clamp(1e-7, 1 - 1e-7))).clamp(-1, 1).squeeze(-1)
    best = (candidates - 0.5).abs().argsort()[:2]
    mean, value = model.plan(x, torch.zeros(1, 1))
    assert float(mean) == pytest.approx(float(candidates[best].mean()), abs=1e-6)
    assert float(value) == pytest.approx(-(float((candidates - 0.5).abs().min()) ** 2), abs=1e-6)


def test_mppi_weighs_all_plans_by_hand() -> None:
    model = point(rounds=1, horizon=1, population=8, planner="mppi", temperature=0.5)
    candidates = (0.5 * torch.special.ndtri(model.points.clamp(1e-7, 1 - 1e-7))).clamp(-1, 1).squeeze(-1)
    weight = torch.exp(-(candidates - 0.5).square() / 0.5)
    mean, _ = model.plan(torch.tensor([[0.1, 0.0]]), torch.zeros(1, 1))
    assert float(mean) == pytest.approx(float((weight * candidates).sum() / weight.sum()), abs=1e-5)


def test_plans_go_on_unless_an_episode_starts() -> None:
    model, kept = make(rounds=1), torch.linspace(-1, 1, 10).view(2, 5)
    obs = torch.zeros(1, 2, 2)
    fresh, _ = model(obs, torch.ones(1, 2, dtype=torch.bool), kept)
    again, _ = model(obs, torch.ones(1, 2, dtype=torch.bool), torch.zeros(2, 5))
    warm, _ = model(obs, torch.zeros(1, 2, dtype=torch.bool), kept)
    assert torch.equal(fresh.policy, again.policy)
    assert not torch.equal(fresh.policy, warm.policy)


def test_noise_moves_the_candidates_and_nothing_else_does() -> None:
    model = make()
    arguments = torch.zeros(1, 1, 2), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 5)
    plain = model(*arguments)[0].policy
    assert torch.equal(plain, model(*arguments)[0].policy)
    model.set_noise(torch.full((model.noise_numbers,), 0.3))
    assert not torch.equal(plain, model(*arguments)[0].policy)
    model.set_noise(None)
    assert torch.equal(plain, model(*arguments)[0].policy)


def test_observations_are_normalised() -> None:
    model = make()
    model.set_observation_statistics(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    assert model.normalize(torch.tensor([[[3.0, 10.0]]])).tolist() == [[[1.0, 2.0]]]


@pytest.mark.parametrize(
    "wrong", [{"members": 0}, {"elites": 65}, {"temperature": 0.0}, {"discount": 0.0}, {"core": "gru"}]
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"model.{next(iter(wrong))}"):
        make(**wrong)


def test_only_cem_needs_its_elites_among_the_plans() -> None:
    assert make(planner="mppi", population=SMALL.elites - 1)


def test_what_cannot_be_predicted_is_refused() -> None:
    pixels = spaces.Box(0, 255, (3, 40, 40), np.uint8)
    for observations, actions in ((pixels, ACTIONS), (OBSERVATIONS, spaces.Discrete(2))):
        with pytest.raises(SettingsError, match=re.escape(f"{observations} and actions {actions}")):
            SMALL.build(observations, actions, precision="fp32", normalize_observations=True, seed=1)
    with pytest.raises(SettingsError, match="nothing to choose"):
        SMALL.build(OBSERVATIONS, spaces.Box(-1, 1, (0,)), precision="fp32", normalize_observations=True, seed=1)
    with pytest.raises(SettingsError, match=r"Use --model\.horizon 21201 or less"):
        make(horizon=21202)
    with pytest.raises(SettingsError, match="precision fp32"):
        SMALL.build(OBSERVATIONS, ACTIONS, precision="bf16", normalize_observations=True, seed=1)
