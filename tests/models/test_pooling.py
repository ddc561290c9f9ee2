"""Max pooling with a deterministic gradient, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lockstep.models.pooling import DeterministicMaxPool


@pytest.mark.parametrize("size", [(84, 84), (21, 11), (1, 2)])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_it_has_the_values_and_the_gradient_of_torchs_pooling(size: tuple[int, int], form: torch.memory_format) -> None:
    draw = torch.Generator().manual_seed(0)
    image = torch.randint(-4, 5, (2, 3, *size), generator=draw).double().contiguous(memory_format=form)
    of_torch, own = (image.clone().requires_grad_() for _ in range(2))
    expected, found = F.max_pool2d(of_torch, 3, stride=2, padding=1), DeterministicMaxPool.apply(own)
    assert torch.equal(found, expected)
    weight = torch.randint(-9, 10, expected.shape, generator=draw).double()  # whole numbers add up exactly
    expected.backward(weight)
    found.backward(weight)
    assert own.grad is not None and of_torch.grad is not None
    assert torch.equal(own.grad, of_torch.grad)
