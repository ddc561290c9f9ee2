"""R2D2's loss against one that walks through each sequence step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep import recipes
from lockstep.algorithms.offpolicy import ReplayConfig
from lockstep.algorithms.r2d2 import R2D2, R2D2Config, mixed_priority, rescale, unscale
from lockstep.config.settings import SettingsError
from lockstep.core.transitions import Sequences
from lockstep.models.base import Networks
from lockstep.models.q import QModel, QModelConfig

BURN_IN, UNROLL, N_STEP, ITEMS, ACTIONS, SIZE = 3, 5, 2, 4, 3, 6
LENGTH = BURN_IN + UNROLL + N_STEP


def test_rescaling_by_hand() -> None:
    x = torch.tensor([0.0, 3.0, -3.0, 8.0, -99.0])
    assert rescale(x, 1e-3).tolist() == pytest.approx([0, 1 + 0.003, -1 - 0.003, 2 + 0.008, -9 - 0.099])


@pytest.mark.parametrize("epsilon", [1e-3, 1e-2, 0.5])
def test_rescaling_has_its_inverse(epsilon: float) -> None:
    x = torch.logspace(-5, 6, 200)
    x = torch.cat([-x.flip(0), torch.zeros(1), x])
    assert torch.allclose(unscale(rescale(x, epsilon), epsilon), x, rtol=1e-5, atol=1e-7)
    assert torch.allclose(rescale(unscale(x[50:350], epsilon), epsilon), x[50:350], rtol=1e-5, atol=1e-7)


def test_mixed_priority_by_hand() -> None:
    error = torch.tensor([[1.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    valid = torch.tensor([[True, False, False], [True, True, False], [True, True, False]])
    wanted = [0.9 * 3 + 0.1 * 4 / 3, 0.9 * 2 + 0.1 * 1, 0.0]
    assert mixed_priority(error, valid, 0.9).tolist() == pytest.approx(wanted)


def network(seed: int, core: str = "lstm") -> QModel:
    config = QModelConfig(
        encoder="mlp",
        hidden_sizes=(8,),
        core=core,  # type: ignore[arg-type]
        core_size=SIZE,
        previous_action_reward=True,
        dueling=True,
    )
    space = spaces.Box(-1, 1, (2,), np.float32)
    return config.build(space, spaces.Discrete(ACTIONS), precision="fp32", normalize_observations=False, seed=seed)


def sequences() -> Sequences:
    """With episodes that begin and end anywhere."""
    torch.manual_seed(3)
    start = torch.rand(LENGTH, ITEMS) < 0.2
    return Sequences(
        obs=torch.randn(LENGTH, ITEMS, 2),
        start=start,
        prev_action=torch.randint(0, ACTIONS, (LENGTH, ITEMS)),
        prev_reward=torch.randn(LENGTH, ITEMS),
        state=torch.randn(ITEMS, 2 * SIZE),
        action=torch.randint(0, ACTIONS, (UNROLL, ITEMS)),
        reward=3 * torch.randn(UNROLL, ITEMS),
        discount=torch.where(torch.rand(UNROLL, ITEMS) < 0.2, 0.0, 0.9),
        ahead=torch.randint(1, N_STEP + 1, (UNROLL, ITEMS)),
        weight=torch.tensor([0.5, 1.0, 2.0, 0.1]),
        valid=torch.rand(UNROLL, ITEMS) < 0.8,
        noise=None,
    )


def step_by_step(model: QModel, batch: Sequences, item: int) -> Tensor:
    """Action values [M+N, A] after the burn-in, with the gradient that reaches back to its end."""

    def describe(steps: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        at = (steps, slice(item, item + 1))
        assert batch.prev_action is not None and batch.prev_reward is not None
        numbers, state = model.describe(
            batch.obs[at], batch.start[at], state, batch.prev_action[at], batch.prev_reward[at]
        )
        return numbers[:, 0, :, 0], state.detach()

    values, states = [], [batch.state[item : item + 1]]
    for t in range(LENGTH):
        each, state = describe(slice(t, t + 1), states[-1])
        values.append(each.detach())
        states.append(state)
    whole, _ = describe(slice(BURN_IN, None), states[BURN_IN])
    assert torch.allclose(whole, torch.cat(values[BURN_IN:]), atol=1e-6)
    return whole


@pytest.mark.parametrize("double", [True, False])
def test_loss_is_what_a_walk_through_the_sequences_gives(double: bool) -> None:
    config = R2D2Config(burn_in=BURN_IN, unroll=UNROLL, n_step=N_STEP, double=double)
    online, target, batch = network(1), network(2), sequences()
    out = R2D2(config).loss(Networks(online, target), batch, {})
    out.total.backward()
    gradients = {name: p.grad.clone() for name, p in online.named_parameters() if p.grad is not None}
    online.zero_grad()

    total = torch.zeros(())
    priorities = []
    for i in range(ITEMS):
        values, after = step_by_step(online, batch, i), step_by_step(target, batch, i)
        errors = []
        for t in range(UNROLL):
            then = t + int(batch.ahead[t, i])
            best = int((values if double else after)[then].argmax())
            q = float(after[then][best].detach())
            # The inverse of h by bisection.
            low, high = -1e4, 1e4
            for _ in range(100):
                middle = (low + high) / 2
                below = float(rescale(torch.tensor(middle, dtype=torch.float64), config.rescaling)) < q
                low, high = (middle, high) if below else (low, middle)
            wanted = float(batch.reward[t, i]) + float(batch.discount[t, i]) * low
            difference = rescale(torch.tensor(wanted), config.rescaling) - values[t][int(batch.action[t, i])]
            if batch.valid[t, i]:
                size = difference.abs()
                errors.append(float(size.detach()))
                total = total + batch.weight[i] * (0.5 * size**2 if size < 1 else size - 0.5)
        priorities.append(0.9 * max(errors) + 0.1 * float(np.mean(errors)))
    assert float(out.total.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    assert out.priorities is not None
    assert out.priorities.tolist() == pytest.approx(priorities, rel=1e-4)
    total.backward()
    for name, parameter in online.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5), name
    assert all(parameter.grad is None for parameter in target.parameters())


def test_no_gradient_flows_through_the_burn_in_but_its_observations_count() -> None:
    algorithm = R2D2(R2D2Config(burn_in=BURN_IN, unroll=UNROLL, n_step=N_STEP))
    networks, batch = Networks(network(1), network(2)), sequences()
    batch = batch.replace(start=torch.zeros_like(batch.start), obs=batch.obs.requires_grad_())
    out = algorithm.loss(networks, batch, {})
    out.total.backward()
    assert not batch.obs.grad[:BURN_IN].any()
    assert batch.obs.grad[BURN_IN : BURN_IN + UNROLL].any()
    changed = batch.obs.detach().clone()
    changed[:BURN_IN] += 1
    other = algorithm.loss(networks, batch.replace(obs=changed), {})
    assert float(other.total.detach()) != float(out.total.detach())
    begun = batch.start.clone()
    begun[BURN_IN] = True  # an episode that begins behind the burn-in knows nothing of it
    restarted = [batch.replace(obs=obs, start=begun) for obs in (changed, batch.obs)]
    losses = [float(algorithm.loss(networks, each, {}).total.detach()) for each in restarted]
    assert losses[0] == losses[1]


def test_exploration_is_spread_over_environments() -> None:
    """Equation 1 of Horgan et al. 2018: from 0.4 to 0.4 ** 8."""
    how = R2D2(R2D2Config()).exploration(0.0, 200_000, range(8), 8)
    assert how.numbers[:, 0].tolist() == pytest.approx([0.4 ** (1 + 7 * i / 7) for i in range(8)], rel=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "model", "words"),
    [
        ({"burn_in": -1}, {}, "burn_in=-1 must be at least 0"),
        ({"unroll": 0}, {}, "unroll=0 must be at least 1"),
        ({"rescaling": 0.0}, {}, "rescaling=0.0 must be positive"),
        ({"priority_max": 1.1}, {}, "priority_max=1.1 must be between 0 and 1"),
        ({"replay": ReplayConfig(recency=0.99)}, {}, "--algorithm.replay.recency 1"),
        ({"replay": ReplayConfig(hindsight=4)}, {}, "hindsight=4"),
        ({}, {"returns": "quantiles"}, "--model.returns expected"),
    ],
)
def test_mistakes_are_explained(algorithm: dict[str, Any], model: dict[str, Any], words: str) -> None:
    full = recipes.RECIPES["r2d2-memory"]()
    wrong = full.replace(
        algorithm=replace(full.algorithm, **algorithm),
        model=replace(full.model, **model),
    )
    with pytest.raises(SettingsError, match=words):
        wrong.validate()


def test_dqn_names_the_recipes_for_recurrent_cores() -> None:
    full = recipes.RECIPES["dqn-cartpole"]()
    with pytest.raises(SettingsError, match="r2d2-memory"):
        full.replace(model=replace(full.model, core="lstm")).validate()


def test_noisy_layers_are_disturbed_in_sequences_too() -> None:
    config = R2D2Config(burn_in=BURN_IN, unroll=UNROLL, n_step=N_STEP)
    space = spaces.Box(-1, 1, (2,), np.float32)
    noisy = QModelConfig(
        encoder="mlp", hidden_sizes=(8,), core="lstm", core_size=6, previous_action_reward=True, noisy=True
    )
    online, target = (
        noisy.build(space, spaces.Discrete(3), precision="fp32", normalize_observations=False, seed=s) for s in (1, 2)
    )
    algorithm, batch = R2D2(config), sequences()
    noise = torch.rand(algorithm.noise_numbers(online, 4))
    losses = set()
    for changed in (None, 0, online.noise_numbers):
        other = noise.clone()
        if changed is not None:
            other[changed] = 1 - other[changed]
        losses.add(float(algorithm.loss(Networks(online, target), batch.replace(noise=other), {}).total.detach()))
    assert len(losses) == 3
