from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.models import layers
from lockstep.models.layers import Linear, channels_last


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


def test_an_exported_layer_is_an_ordinary_one() -> None:
    exported = torch.export.export(Linear(128, 128), (torch.randn(256, 128),))
    assert "mkldnn" not in str(exported.graph)


@pytest.mark.skipif(not layers._AVAILABLE, reason="torch was built without oneDNN")
def test_only_large_products_of_fp32_are_onednns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    product = layers.product
    monkeypatch.setattr(layers, "product", lambda a, *rest: calls.append(tuple(a.shape)) or product(a, *rest))
    Linear(8, 8)(torch.randn(8, 8))
    Linear(128, 128)(torch.randn(128, 128, dtype=torch.bfloat16))
    assert not calls
    Linear(128, 128)(torch.randn(4, 32, 128))
    assert calls == [(128, 128)]


@pytest.mark.parametrize("shape", [(3, 4, 9, 7), (1, 3, 8, 8), (2, 1, 5, 5)])
def test_interleaved_bytes_are_what_torch_gives(shape: tuple[int, ...]) -> None:
    """Equal strides too, by which torch chooses a convolution."""
    image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = image.to(torch.float32, memory_format=torch.channels_last)
    found = channels_last(image).to(torch.float32, memory_format=torch.channels_last)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
