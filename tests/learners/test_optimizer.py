"""The optimizer: what it does with groups of parameters."""

from __future__ import annotations

import torch
from torch import nn

from lockstep import recipes
from lockstep.learners.optimizer import Optimizer
from lockstep.models.parameters import FlatParameters


def test_an_update_of_no_group_moves_nothing() -> None:
    flat = FlatParameters(nn.Linear(3, 2))
    before = flat.vector.detach().clone()
    optimizer = Optimizer(recipes.ppo_cartpole(), flat)
    assert optimizer.step(torch.ones_like(before), ()) == 0.0
    assert torch.equal(flat.vector.detach(), before)
