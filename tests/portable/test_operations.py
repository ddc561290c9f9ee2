"""Portable operations compute what torch's do, up to rounding, and everything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.settings import SettingsError
from lockstep.portable.mode import PortableArithmetic


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y = numbers(10, 100), numbers(10, 100, seed=1)
CUBE = numbers(6, 7, 8)
IMAGES, KERNELS = numbers(2, 5, 8, 9), numbers(3, 5, 3, 3, seed=1)
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "expm1 near 0": lambda x: torch.expm1(1e-3 * x),
    "log": lambda x: torch.log(x.abs()),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log1p near 0": lambda x: torch.log1p(1e-4 * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "softplus with beta": lambda x: F.softplus(x, beta=2),
    "sin": torch.sin,
    "cos": torch.cos,
    "atanh": lambda x: torch.atanh(0.3 * torch.tanh(x)),
    "ndtr": lambda x: torch.special.ndtr(0.3 * x),
    "ndtri": lambda x: torch.special.ndtri(torch.sigmoid(0.3 * x)),
    "erf": torch.erf,
    "elu": F.elu,
    "leaky relu": F.leaky_relu,
    "whole power": lambda x: x**3,
    "negative power": lambda x: (x.abs() + 1) ** -2,
    "root": lambda x: x.abs() ** 0.5,
    "inverse root": lambda x: torch.rsqrt(x.abs() + 1),
    "power": lambda x: x.abs() ** 1.7,
    "powers of a number": lambda x: torch.tensor(0.97, dtype=x.dtype) ** x.abs(),
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "scaled sum": lambda x: torch.add(x, x.flip(0), alpha=0.3),
    "scaled difference": lambda x: torch.sub(x, x.flip(0), alpha=0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x.flip(0), value=0.3),
    "addcdiv": lambda x: torch.addcdiv(x, x, 1 + x.square(), value=0.3),
    "sum": lambda x: x.abs().sum(),
    "sum of rows": lambda x: x.abs().sum(-1),
    "sum of columns": lambda x: x.abs().sum(0, keepdim=True),
    "mean": lambda x: x.abs().mean(),
    "norm": lambda x: x.norm(),
    "standard deviation": lambda x: x.std(1),
    "variance": lambda x: x.var(0, unbiased=False),
    "log softmax": lambda x: F.log_softmax(x, -1),
    "softmax of columns": lambda x: F.softmax(x, 0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer norm": lambda x: F.layer_norm(x, (100,)),
    "product": lambda x: x @ x.t(),
    "product with a vector": lambda x: x @ x[0],
    "scalar product": lambda x: x[0].abs() @ x[1].abs(),
    "linear": lambda x: F.linear(x, x, x[:, 0]),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x.flip(0), reduction="none", beta=0.5),
    "mean squared error": lambda x: F.mse_loss(x, x.flip(0)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(name: str) -> None:
    exact, x = X.double().requires_grad_(), X.clone().requires_grad_()
    expected = CASES[name](exact)
    expected.sum().backward()
    with PortableArithmetic():
        found = CASES[name](x)
        found.sum().backward()
    assert exact.grad is not None and x.grad is not None
    for of_portable, of_torch in ((found, expected), (x.grad, exact.grad)):
        torch.testing.assert_close(of_portable, of_torch.float(), rtol=2e-5, atol=2e-5)


EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y,
    "product": lambda x, y: x * y,
    "quotient": lambda x, y: x / y,
    "reciprocal": lambda x, y: 1 / x,
    "remainder": lambda x, y: x % y,
    "whole quotient": lambda x, y: x // y,
    "absolute value": lambda x, y: abs(x),
    "sign": lambda x, y: np.sign(x) if isinstance(x, np.ndarray) else x.sign(),
    "square root": lambda x, y: abs(x) ** 0.5 if isinstance(x, np.ndarray) else x.abs().sqrt(),
    "root by a power": lambda x, y: abs(x) ** 0.5,
    "rounding": lambda x, y: x.round(),
    "floor": lambda x, y: np.floor(x) if isinstance(x, np.ndarray) else x.floor(),
    "larger": lambda x, y: np.maximum(x, y) if isinstance(x, np.ndarray) else torch.maximum(x, y),
}
"""What IEEE 754 fixes to the last bit, in an expression that NumPy and torch understand."""


@pytest.mark.parametrize("name", EXACT)
def test_operations_that_round_once_are_exact(name: str) -> None:
    x, y = numbers(10_000), numbers(10_000, seed=1)
    with PortableArithmetic():
        found = EXACT[name](x, y)
    np.testing.assert_array_equal(found.numpy(), EXACT[name](x.numpy(), y.numpy()))


def test_square_roots_of_double_precision_are_exact() -> None:
    x = numbers(10_000).double().abs()
    with PortableArithmetic():
        found, of_one = x.sqrt(), x[0].sqrt()
    np.testing.assert_array_equal(found.numpy(), np.sqrt(x.numpy()))
    assert of_one == found[0] and of_one.shape == ()


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_sums_over_any_axes(dims: tuple[int, ...], keepdim: bool) -> None:
    with PortableArithmetic():
        found = CUBE.sum(dims, keepdim=keepdim)
        turned = CUBE.transpose(0, 2).sum([2 - d for d in dims], keepdim=keepdim)
    expected = CUBE.double().sum(dims, keepdim=keepdim).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned, expected.transpose(0, 2) if keepdim else turned.clone(), rtol=1e-5, atol=1e-5)
    assert turned.numel() == expected.numel()


@pytest.mark.parametrize(
    "settings",
    [{}, {"stride": 2}, {"padding": 1}, {"padding": "valid"}, {"stride": (1, 2), "padding": (2, 0)}],
)
def test_convolutions(settings: dict[str, Any]) -> None:
    exact = [x.double().requires_grad_() for x in (IMAGES, KERNELS, X[0, :3])]
    given = [x.clone().requires_grad_() for x in (IMAGES, KERNELS, X[0, :3])]
    convolve: Any = F.conv2d
    expected = convolve(*exact, **settings)
    expected.square().sum().backward()
    with PortableArithmetic():
        found = convolve(*given, **settings)
        found.square().sum().backward()
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    for x, y in zip(given, exact, strict=True):
        assert x.grad is not None and y.grad is not None
        torch.testing.assert_close(x.grad, y.grad.float(), rtol=1e-4, atol=1e-2)


def test_operations_in_place_and_into_a_tensor() -> None:
    x, out = X.clone(), torch.empty(10, 100)
    with PortableArithmetic():
        expected, scaled = torch.exp(X), torch.lerp(X, Y, 0.25)
        assert x.exp_() is x
        torch.lerp(X, Y, 0.25, out=out)
    assert torch.equal(x, expected) and torch.equal(out, scaled)


def test_what_is_not_contiguous_moves_in_place() -> None:
    x, end = X.clone(), Y.t().contiguous().t()
    with PortableArithmetic():
        expected = torch.lerp(X, Y, 0.25)
        assert torch.equal(x.lerp_(end, 0.25), expected)
        assert torch.equal(X.t().clone().t().lerp_(end, 0.25), expected)


def test_whole_numbers_are_left_to_torch() -> None:
    n = torch.arange(6)
    with PortableArithmetic():
        assert n.sum() == 15 and torch.equal(n**2, n * n) and n.sum().dtype == torch.int64
        torch.testing.assert_close(torch.exp(n), torch.exp(n.float()))
        assert torch.equal((X > 0).sum(1), (X > 0).long().sum(1))
        assert torch.tensor([2**24 + 1]).sum(dtype=torch.float64) == 2**24 + 1


def test_initial_weights_are_orthogonal() -> None:
    with PortableArithmetic():
        torch.manual_seed(3)
        weight = nn.init.orthogonal_(torch.empty(20, 50), 2.0)
    torch.testing.assert_close(weight @ weight.t(), 4 * torch.eye(20), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda: F.gelu(X), "aten.gelu"),
        (lambda: torch.cumsum(X, 0), "aten.cumsum"),
        (lambda: torch.linalg.inv(X[:, :10]), "aten.linalg_inv"),
        (lambda: torch.fft.fft(X), "aten._fft"),
    ],
)
def test_other_operations_are_refused_by_name(operation: Callable[[], object], name: str) -> None:
    with PortableArithmetic(), pytest.raises(SettingsError, match=rf"does not cover torch's operation {name}.*fp32"):
        operation()


@pytest.mark.parametrize(
    "operation",
    [
        lambda: torch.ones(2, 3) @ torch.ones(5, 4),
        lambda: torch.bmm(torch.ones(2, 3, 4), torch.ones(1, 4, 5)),
        lambda: F.linear(torch.ones(2, 3), torch.ones(4, 7)),
        lambda: torch.mv(torch.ones(2, 3), torch.ones(4)),
        lambda: torch.dot(torch.ones(3), torch.ones(4)),
        lambda: F.conv2d(IMAGES[:, :2], KERNELS[:, :3]),
        lambda: torch.addmm(torch.ones(4), torch.ones(2, 3), torch.ones(3, 5)),
        lambda: torch.ones(2, 3).sum(2),
    ],
)
def test_what_does_not_fit_is_an_error(operation: Callable[[], object]) -> None:
    with PortableArithmetic(), torch.inference_mode(), pytest.raises((RuntimeError, IndexError)):
        operation()


def test_overloads_and_edges_are_torchs() -> None:
    x = torch.tensor([[1.0, 2.0, 4.0], [-3.0, 0.5, 8.0]])
    cases: list[Callable[[], Tensor]] = [
        lambda: x.var(unbiased=False),
        lambda: torch.std(x, 1, False),
        lambda: x.double().sum(1).float(),
        lambda: x ** torch.tensor([2.0, 3.0, 0.0]),
        lambda: torch.xlogy(torch.tensor([0.0, 2.0]), torch.tensor([float("inf"), 3.0])),
        lambda: torch.xlogy(2.0, x[0]),
        lambda: torch.xlogy(x, 2),
        lambda: torch.xlogy(x[0], torch.arange(1, 4)),
        lambda: torch.log1p(torch.tensor([float("inf"), 0.0])),
        lambda: torch.log1p(torch.tensor(-float("inf"))),
        lambda: torch.arange(0.3, 7, 0.1),
        lambda: torch.arange(2.5),
        lambda: torch.arange(0, 2.5, dtype=torch.int64),
        lambda: x.norm(keepdim=True),
        lambda: x[0, 0].log_softmax(0),
        lambda: F.layer_norm(x[0], (3,)),
    ]
    for case in cases:
        expected = case()
        with PortableArithmetic(), torch.inference_mode():
            torch.testing.assert_close(case(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_variance_without_degrees_of_freedom_is_not_finite() -> None:
    with PortableArithmetic():  # torch computes the same, with a warning
        assert (X[:2].var(0, correction=3) == float("inf")).all()
        assert X[:0].std(0).isnan().all()


def test_a_logarithm_of_nan_is_not_hidden_by_a_factor_of_0() -> None:
    with PortableArithmetic():
        assert torch.xlogy(torch.zeros(1), torch.tensor([float("nan")])).isnan()


def test_an_unbatched_layer_norm_has_gradients() -> None:
    weight = torch.ones(3, requires_grad=True)
    with PortableArithmetic():
        (F.layer_norm(torch.tensor([1.0, 2.0, 4.0]), (3,), weight) * torch.tensor([1.0, 0.0, 2.0])).sum().backward()
    assert weight.grad is not None and weight.grad[1] == 0


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (lambda: torch.addmm(X[0, :2], X[:2, :2], X[:2, :2], beta=0.5), "products that are scaled"),
        (lambda: torch.exp(X.double()), "numbers of type torch.float64"),
        (lambda: X.double() @ X.double().t(), "numbers of type torch.float64"),
        (lambda: F.conv2d(IMAGES[:, :4], KERNELS[:2, :2], groups=2), "convolutions with groups"),
        (lambda: X.norm(dim=0), "norms other than"),
        (lambda: X.norm(dtype=torch.float64), "numbers of type torch.float64"),
    ],
)
def test_other_numbers_and_variants_are_refused(operation: Callable[[], object], said: str) -> None:
    with PortableArithmetic(), pytest.raises(SettingsError, match=f"does not cover {said}.*fp32"):
        operation()
