"""Multilayer perceptrons side by side: values and hand-written gradients against torch's own, one layer at a time."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.models import layers, mlps
from lockstep.models.mlps import MLPs

FUNCTIONS = {"tanh": torch.tanh, "relu": torch.relu, "elu": F.elu}


def plain(model: MLPs, x: Tensor) -> Tensor:
    """[n, I] or [C, n, I] -> [C, n, O], by autograd."""
    last = len(model.weights) - 1
    for index, (weight, bias) in enumerate(zip(model.weights, model.biases, strict=True)):
        x = x @ weight + bias
        if index == 0 and model.layer_norm:
            x = torch.tanh(F.layer_norm(x, x.shape[-1:]) * model.gain + model.shift)
        elif index < last:
            x = FUNCTIONS[model.activation](x)
    return x


def gradients(y: Tensor, back: Tensor, model: MLPs, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, [x, *model.parameters()], back))


def differ(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, of the size of what is expected."""
    return max(
        float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize(("count", "shared"), [(1, True), (3, True), (3, False)])
def test_gradients_are_autograds(
    count: int, shared: bool, activation: Literal["tanh", "relu", "elu"], layer_norm: bool
) -> None:
    torch.manual_seed(0)
    model = MLPs(count, (4, 6, 5, 2), activation, layer_norm).double()
    x = torch.randn(*([] if shared else [count]), 7, 4, dtype=torch.float64, requires_grad=True)
    y, expected, back = model(x), plain(model, x), torch.randn(count, 7, 2, dtype=torch.float64)
    assert differ([y, *gradients(y, back, model, x)], [expected, *gradients(expected, back, model, x)]) < 1e-13
    with torch.no_grad():
        assert torch.equal(model(x), y), "acting sees what learning sees"


@pytest.mark.parametrize(("count", "rows"), [(1, 128), (2, 64)])
def test_large_ones_are_onednns_and_equal_those_in_double_precision(
    count: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    product = mlps.product
    monkeypatch.setattr(mlps, "product", lambda a, *rest: calls.append(1) or product(a, *rest))
    torch.manual_seed(0)
    model, x = MLPs(count, (20, 160, 128, 3), "relu", False), torch.randn(rows, 20, requires_grad=True)
    y, back = model(x), torch.randn(count, rows, 3)
    found = [y, *gradients(y, back, model, x)]
    assert len(calls) == (3 * count if layers._AVAILABLE else 0), "forwards, by weights and by inputs"
    exact, exact_x = model.double(), x.detach().double().requires_grad_()
    expected = plain(exact, exact_x)
    assert differ(found, [expected, *gradients(expected, back.double(), exact, exact_x)]) < 1e-5


@pytest.mark.parametrize("size", [64, 800])
def test_hidden_layers_compute_in_the_precision_of_the_input_and_the_last_in_fp32(size: int) -> None:
    torch.manual_seed(0)
    model, x = MLPs(2, (20, size, 32, 3), "relu", False), torch.randn(50, 20)
    rounded, back = x.bfloat16().requires_grad_(), torch.randn(2, 50, 3)
    y = model(rounded)
    found, exact = gradients(y, back, model, rounded), x.clone().requires_grad_()
    expected = gradients(plain(model, exact), back, model, exact)
    assert y.dtype == torch.float32
    assert [g.dtype for g in found] == [torch.bfloat16, *[torch.float32] * 6]
    cosine = [F.cosine_similarity(a.float().flatten(), b.flatten(), 0) for a, b in zip(found, expected, strict=True)]
    assert min(cosine) > 0.99


@pytest.mark.parametrize("rows", [5, 200])
def test_frozen_ones_pass_gradients_on_to_the_input_alone(rows: int) -> None:
    torch.manual_seed(0)
    model, x = MLPs(2, (8, 128, 128, 1), "relu", True), torch.randn(rows, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    model(x, frozen=True).sum().backward()
    assert torch.equal(x.grad, expected) and expected.abs().sum() > 0  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["weights.0", "biases.1"])
def test_single_parameters_without_gradients_leave_others_theirs(name: str) -> None:
    torch.manual_seed(0)
    model, x = MLPs(2, (8, 5, 1), "tanh", False), torch.randn(7, 8)
    plain(model, x).sum().backward()
    expected = {each: parameter.grad for each, parameter in model.named_parameters() if each != name}
    model.zero_grad()
    model.get_parameter(name).requires_grad_(False)
    model(x).sum().backward()
    found = {each: parameter.grad for each, parameter in model.named_parameters()}
    assert found.pop(name) is None
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("rows", [5, 256])
def test_what_is_no_number_remains_so(
    rows: int, activation: Literal["tanh", "relu", "elu"], dtype: torch.dtype
) -> None:
    model, x = MLPs(2, (64, 128, 64, 1), activation, False), torch.randn(rows, 64).to(dtype)
    x[0, 0] = torch.nan
    y = model(x)
    assert y[:, 0].isnan().all() and not y[:, 1:].isnan().any()
