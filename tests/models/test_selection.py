"""Each action's entry: what a GPU computes against what the CPU computes."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from lockstep.models import selection

ACTION = torch.tensor([[2, 0, 1]])


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (selection.of_action, (1, 3, 4)),
        (selection.of_action, (2, 1, 3, 4)),  # two critics
        (selection.numbers_of_action, (1, 3, 4, 5)),
    ],
)
def test_both_choose_the_same_entries(function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = []
    for on_gpu in (False, True):
        given = x.clone().requires_grad_()
        with mock.patch.object(selection, "_on_gpu", return_value=on_gpu):
            result = function(given, ACTION)
        result.backward(torch.arange(1.0, 1 + result.numel()).view_as(result))
        found.append((result, given.grad))
    (expected, gradient), (result, other) = found
    assert torch.equal(result, expected) and torch.equal(other, gradient)


def test_the_entry_is_that_of_the_action() -> None:
    x = torch.arange(12.0).view(1, 3, 4)
    assert selection.of_action(x, ACTION).tolist() == [[2.0, 4.0, 9.0]]
    assert selection.numbers_of_action(x.unsqueeze(-1), ACTION).tolist() == [[[2.0], [4.0], [9.0]]]
