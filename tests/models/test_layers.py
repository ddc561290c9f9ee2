from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.models import layers
from lockstep.models.layers import Linear, batched_linear


def differs(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The largest difference, of the size of what is expected."""
    return max(
        float((a.detach() - b.detach()).abs().max() / b.detach().abs().max())
        for a, b in zip(found, expected)
        if a is not None and b is not None
    )


@pytest.mark.parametrize(("batch", "into", "out"), [((3, 50), 96, 64), ((200,), 64, 80), ((2,), 8, 4)])
def test_a_layer_equals_the_product_in_double_precision(batch: tuple[int, ...], into: int, out: int) -> None:
    torch.manual_seed(0)
    layer, x = Linear(into, out), torch.randn(*batch, into, requires_grad=True)
    y = layer(x)
    back = torch.randn_like(y)
    y.backward(back)
    weight, bias, exact_x = (t.detach().double().requires_grad_() for t in (layer.weight, layer.bias, x))
    exact = F.linear(exact_x, weight, bias)
    exact.backward(back.double())
    assert y.shape == exact.shape
    found = [y, x.grad, layer.weight.grad, layer.bias.grad]
    assert differs(found, [exact, exact_x.grad, weight.grad, bias.grad]) < 1e-5


@pytest.mark.parametrize(
    ("count", "rows", "into", "out"), [(2, 128, 64, 48), (2, 128, 256, 1), (1, 256, 64, 64), (3, 4, 5, 2)]
)
def test_layers_side_by_side_equal_products_in_double_precision(count: int, rows: int, into: int, out: int) -> None:
    torch.manual_seed(0)
    given = torch.randn(count, 1, out), torch.randn(count, rows, into), torch.randn(count, into, out)
    bias, x, weight = (t.requires_grad_() for t in given)
    y = batched_linear(x, weight, bias)
    back = torch.randn_like(y)
    y.backward(back)
    assert weight.grad is not None and weight.grad.is_contiguous()
    exact = [t.detach().double().requires_grad_() for t in given]
    product = torch.baddbmm(*exact)
    product.backward(back.double())
    assert differs([y, *(t.grad for t in (bias, x, weight))], [product, *(t.grad for t in exact)]) < 1e-5


def test_weights_that_are_frozen_get_no_gradient_and_inputs_do() -> None:
    x, weight, bias = torch.randn(2, 64, 64, requires_grad=True), torch.randn(2, 64, 64), torch.randn(2, 1, 64)
    batched_linear(x, weight, bias).sum().backward()
    assert torch.allclose(x.grad, weight.sum(2).unsqueeze(1).expand_as(x), atol=1e-4)  # type: ignore[arg-type]


def test_an_exported_layer_is_an_ordinary_one() -> None:
    exported = torch.export.export(Linear(128, 128), (torch.randn(256, 128),))
    assert "mkldnn" not in str(exported.graph)


@pytest.mark.skipif(not layers._AVAILABLE, reason="torch was built without oneDNN")
def test_only_large_products_of_fp32_are_onednns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    product = layers._product
    monkeypatch.setattr(layers, "_product", lambda a, *rest: calls.append(tuple(a.shape)) or product(a, *rest))
    Linear(8, 8)(torch.randn(8, 8))
    Linear(128, 128)(torch.randn(128, 128, dtype=torch.bfloat16))
    assert not calls
    Linear(128, 128)(torch.randn(4, 32, 128))
    assert calls == [(128, 128)]
