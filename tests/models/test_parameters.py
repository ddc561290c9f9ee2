"""Flat parameters: large ones that layers cast are rounded once for all their uses, with the bits of casting them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.config.settings import SettingsError
from lockstep.learners.optimizer import Optimizer
from lockstep.models import PolicyModel, StandardModelConfig
from lockstep.models.parameters import FlatParameters

PIXELS = spaces.Box(0, 255, (4, 44, 44), np.uint8)
"""Small, and the encoder's last layer is large enough to be rounded once."""


def model(core: str) -> PolicyModel:
    config: Any = StandardModelConfig(encoder="nature", core=core, core_size=128)  # type: ignore[arg-type]
    return config.build(PIXELS, spaces.Discrete(6), precision="bf16", normalize_observations=False, seed=1)


def kept_rounded(of: PolicyModel) -> dict[str, Any]:
    """What is kept rounded of a model, by the parameter's name."""
    return {name: x.rounded for name, x in of.named_parameters() if hasattr(x, "rounded")}  # type: ignore[attr-defined]


def gradient(of: PolicyModel, flat: FlatParameters, uses: int) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    flat.forget_gradient()
    total = torch.zeros(())
    for _ in range(uses):
        obs = torch.randint(0, 256, (3, 2, *PIXELS.shape), generator=draw, dtype=torch.uint8)
        out, _ = of(obs, torch.zeros(3, 2, dtype=torch.bool), torch.zeros(2, of.state_size))
        total = total + out.policy.square().sum() + out.value.square().sum()
    total.backward()
    return flat.gather_gradient([total.detach()])


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
@pytest.mark.parametrize("uses", [1, 2])
def test_gradients_have_the_bits_of_casting_at_each_use(core: str, uses: int) -> None:
    plain, rounding = model(core), model(core)
    casts, rounded = FlatParameters(plain, tail=1), FlatParameters(rounding, tail=1, dtype=torch.bfloat16)
    assert len(kept_rounded(rounding)) == {"none": 1, "lstm": 3, "gru": 3}[core]
    for _ in range(2):
        expected, found = gradient(plain, casts, uses), gradient(rounding, rounded, uses)
        assert torch.equal(expected, found) and expected[:-1].abs().max() > 0
        for flat in (casts, rounded):
            flat.vector.data.sub_(1e-3 * expected[:-1])
            flat.round()


def test_gradients_are_put_where_they_are_gathered() -> None:
    rounding = model("none")
    flat = FlatParameters(rounding, tail=1, dtype=torch.bfloat16)
    gathered = gradient(rounding, flat, 1)
    (name,) = kept_rounded(rounding)
    found = rounding.get_parameter(name).grad
    assert found is not None and found.data_ptr() == flat.named(gathered)[name].data_ptr(), "it was copied"


def test_whoever_changes_parameters_has_them_rounded() -> None:
    agent = Agent(recipes.dqn_atari().replace(precision="bf16"))
    (name,) = kept_rounded(agent.model)
    target: Any = agent.target

    def rounded(model: PolicyModel) -> Tensor:
        return kept_rounded(model)[name].value.clone()

    def up_to_date(model: PolicyModel) -> bool:
        return torch.equal(rounded(model), model.get_parameter(name).to(torch.bfloat16))

    assert up_to_date(agent.model) and up_to_date(target)
    optimizer = Optimizer(agent.experiment, agent.flat)
    optimizer.step(torch.randn_like(agent.flat.vector.data), agent.algorithm.groups(1, {"learning_rate": 0.1}))
    assert up_to_date(agent.model)
    before = rounded(target)
    agent.follow(1)
    assert torch.equal(before, rounded(target))
    agent.follow(agent.experiment.algorithm.target_period)  # type: ignore[attr-defined]
    assert up_to_date(target) and not torch.equal(before, rounded(target))
    other = Agent(recipes.dqn_atari().replace(precision="bf16"))
    other.load(agent.state())
    assert up_to_date(other.model) and torch.equal(rounded(other.model), rounded(agent.model))


def test_copies_for_acting_keep_nothing_rounded() -> None:
    agent = Agent(recipes.dqn_atari().replace(precision="bf16"))
    acting = agent.model.for_acting()
    assert not any(hasattr(parameter, "rounded") for parameter in acting.parameters())


def test_parameters_of_a_group_must_be_adjacent() -> None:
    layers = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("first", "other", "fourth")})
    with pytest.raises(SettingsError, match="begin with 'f', which are not adjacent"):
        FlatParameters(layers).span("f")
