"""The optimizer: what it does with groups of parameters."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep import recipes
from lockstep.algorithms.base import OptimizerConfig, ParameterGroup
from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError
from lockstep.learners.optimizer import Optimizer, PortableOptimizer
from lockstep.models.parameters import FlatParameters


def test_an_update_of_no_group_moves_nothing() -> None:
    flat = FlatParameters(nn.Linear(3, 2))
    before = flat.vector.detach().clone()
    optimizer = Optimizer(recipes.ppo_cartpole(), flat)
    assert optimizer.step(torch.ones_like(before), ()) == 0.0
    assert torch.equal(flat.vector.detach(), before)


def test_adamw_is_torch_s() -> None:
    """A step of networks that learn; a variable and a fixed network stay as they would with Adam."""
    torch.manual_seed(0)
    model: Any = nn.Module()
    model.net, model.fixed = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), nn.Linear(2, 1).requires_grad_(False)
    model.variables = nn.ParameterDict({"log_temperature": torch.tensor(2.0)})
    alone, kept = copy.deepcopy(model.net), model.fixed.weight.clone()
    moved: list[torch.Tensor] = []
    wanted = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.5, eps=1e-5)
    flat = FlatParameters(model)
    changes: dict[str, Any] = {"algorithm.optimizer.name": "adamw", "algorithm.optimizer.weight_decay": 0.5}
    experiment = recipes.ppo_cartpole().replace(**changes | {"algorithm.max_grad_norm": 1e9})
    for kind in (PortableOptimizer, Optimizer):
        optimizer, before = kind(experiment, flat), flat.vector.detach().clone()
        gradient = torch.zeros_like(flat.vector)
        for name, parameter in alone.named_parameters():
            parameter.grad = torch.ones_like(parameter).cumsum(0)
            flat.named(gradient)[f"net.{name}"].copy_(parameter.grad)
        optimizer.step(gradient.detach(), (ParameterGroup("", 0.1),))
        moved.append(flat.vector.detach().clone())
        flat.vector.detach().copy_(before)
    wanted.step()
    torch.testing.assert_close(*moved, rtol=1e-5, atol=1e-6)
    flat.vector.detach().copy_(moved[1])
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(flat.named()[f"net.{name}"], parameter.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(flat.named()["fixed.weight"], kept)
    assert float(flat.named()["variables.log_temperature"]) == 2.0


def test_radam_is_torch_s() -> None:
    """Ten steps with β₂ = 0.95, of which the first five have no estimate of the variance; gradients are clipped."""
    torch.manual_seed(0)
    start = nn.Linear(5, 4)
    changes: dict[str, Any] = {"name": "radam", "eps": 1e-3, "betas": (0.8, 0.95)}
    experiment = recipes.ppo_cartpole().replace(
        **{f"algorithm.optimizer.{name}": value for name, value in changes.items()}, **{"algorithm.max_grad_norm": 4.0}
    )
    for kind in (PortableOptimizer, Optimizer):
        mine, alone = copy.deepcopy(start), copy.deepcopy(start)
        flat = FlatParameters(mine)
        optimizer, draw = kind(experiment, flat), torch.Generator().manual_seed(1)
        wanted = torch.optim.RAdam(alone.parameters(), lr=0.1, eps=1e-3, betas=(0.8, 0.95))
        for step in range(1, 11):
            for parameter in alone.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            gradient = torch.zeros_like(flat.vector)
            for name, parameter in alone.named_parameters():
                flat.named(gradient)[name].copy_(parameter.grad)  # type: ignore[arg-type]
            norm = optimizer.step(gradient.detach(), (ParameterGroup("", 0.1),))
            assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(alone.parameters(), 4.0)), rel=1e-5)
            wanted.step()
            assert float(optimizer.counts["step"]) == step
            for name, parameter in alone.named_parameters():
                torch.testing.assert_close(flat.named()[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_radam_by_hand() -> None:
    """β = (0, 0.5), so ρ_∞ = 3, and ρ_t never exceeds 5: each step is the learning rate times the gradient."""
    for kind in (PortableOptimizer, Optimizer):
        flat = FlatParameters(nn.Linear(1, 1))
        flat.vector.detach().fill_(8.0)
        changes: dict[str, Any] = {"algorithm.optimizer.name": "radam", "algorithm.optimizer.betas": (0.0, 0.5)}
        optimizer = kind(recipes.ppo_cartpole().replace(**changes, **{"algorithm.max_grad_norm": 1e9}), flat)
        for _ in range(3):
            optimizer.step(torch.full_like(flat.vector, 2.0).detach(), (ParameterGroup("", 0.25),))
        assert [float(x) for x in flat.named().values()] == [8 - 3 * 0.5] * 2


def slow_rmsprop_tf(
    x: np.ndarray, gradients: list[np.ndarray], largest: float, rate: float, decay: float, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """Number by number in float64, as in the documentation of TensorFlow's RMSPropOptimizer: x and the mean square."""
    x, squares = x.astype(np.float64).copy(), np.ones(len(x))
    for gradient in gradients:
        scale = min(1.0, largest / (math.sqrt(sum(float(g) ** 2 for g in gradient)) + 1e-6))
        for i in range(len(x)):
            g = float(gradient[i]) * scale
            squares[i] = decay * squares[i] + (1 - decay) * g * g
            x[i] -= rate * g / math.sqrt(squares[i] + eps)
    return x, squares


@pytest.mark.parametrize("kind", [Optimizer, PortableOptimizer])
def test_rmsprop_tf_is_a_slow_version_and_continues(kind: type[Optimizer]) -> None:
    """Forty steps, some of them clipped; halfway, another optimizer takes over the state."""
    flat, draw = FlatParameters(nn.Linear(5, 4)), torch.Generator().manual_seed(3)
    vector = flat.vector.detach()
    vector.copy_(torch.randn(vector.shape, generator=draw))
    changes: dict[str, Any] = {"name": "rmsprop_tf", "eps": 0.01, "decay": 0.9}
    experiment = recipes.ppo_cartpole().replace(
        **{f"algorithm.optimizer.{name}": value for name, value in changes.items()}, **{"algorithm.max_grad_norm": 4.0}
    )
    gradients = [torch.randn(vector.shape, generator=draw) * scale for scale in (0.01, 0.3, 1.0, 5.0) * 10]
    wanted, squares = slow_rmsprop_tf(vector.numpy(), [g.numpy() for g in gradients], 4.0, 0.02, 0.9, 0.01)
    optimizer = kind(experiment, flat)
    assert optimizer.state() == {}
    for step, gradient in enumerate(gradients):
        if step == 20:
            kept, optimizer = {name: x.clone() for name, x in optimizer.state().items()}, kind(experiment, flat)
            optimizer.load(kept)
        norm = optimizer.step(gradient.clone(), (ParameterGroup("", 0.02),))
        assert float(norm) == pytest.approx(float(gradient.norm()), rel=1e-5)
    np.testing.assert_allclose(vector.numpy(), wanted, rtol=1e-5, atol=1e-5)
    assert optimizer.state().keys() == {"step", "square_avg"} and float(optimizer.counts["step"]) == 40
    np.testing.assert_allclose(optimizer.moments["square_avg"].numpy(), squares, rtol=1e-5)


def test_rmsprop_tf_by_hand() -> None:
    """A decay of 0.5, ε = 0.5 and gradients of 1: the mean of squares stays at 1, where it begins, so a step is
    3 / √1.5 = √6. A group that does not move keeps its mean."""
    for kind in (Optimizer, PortableOptimizer):
        model: Any = nn.Module()
        model.moves, model.stays = nn.Linear(1, 1), nn.Linear(1, 1)
        flat = FlatParameters(model)
        flat.vector.detach().fill_(8.0)
        changes: dict[str, Any] = {"name": "rmsprop_tf", "eps": 0.5, "decay": 0.5}
        experiment = recipes.ppo_cartpole().replace(
            **{f"algorithm.optimizer.{name}": value for name, value in changes.items()},
            **{"algorithm.max_grad_norm": 1e9},
        )
        optimizer = kind(experiment, flat)
        for step in range(1, 3):
            optimizer.step(torch.ones_like(flat.vector).detach(), (ParameterGroup("moves.", 3.0),))
            found = [float(x) for x in flat.named().values()]
            assert found == [pytest.approx(8 - step * math.sqrt(6))] * 2 + [8.0] * 2
        assert torch.equal(optimizer.moments["square_avg"], torch.ones_like(flat.vector))


def test_weights_decay_by_hand() -> None:
    """Without a gradient, a weight of 8 is 8 · (1 - 0.5 · 0.25) = 7 after a step."""
    flat = FlatParameters(nn.Linear(1, 1))
    flat.vector.detach().fill_(8.0)
    changes = {"algorithm.optimizer.name": "adamw", "algorithm.optimizer.weight_decay": 0.25}
    optimizer = Optimizer(recipes.ppo_cartpole().replace(**changes), flat)
    optimizer.step(torch.zeros_like(flat.vector), (ParameterGroup("", 0.5),))
    assert [float(x) for x in flat.named().values()] == [7.0, 7.0]
    with pytest.raises(SettingsError, match=r"weight_decay=-1.*0\.01"):
        OptimizerConfig("adamw", weight_decay=-1).validate()
    assert to_json(OptimizerConfig()).keys().isdisjoint({"weight_decay"})
