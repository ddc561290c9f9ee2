"""Products of matrices, and what consists of them, in portable arithmetic: the sums of lockstep.kernels.products.

Each function takes the arguments of the operation of torch.ops.aten that it replaces, and returns new tensors.

Shape legend: C matrices, n rows, k terms, m columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import products
from lockstep.kernels.initialize import orthogonal_rows
from lockstep.portable.elementwise import checked, of_float32, refusal
from lockstep.portable.sums import total


def _matrix(x: Tensor) -> products.Matrix:
    """The last two axes of a float32 tensor, which must be kept alive."""
    return of_float32(x).data_ptr(), x.stride(-2), x.stride(-1)


def _check(a: Tensor, b: Tensor, dimensions: int) -> None:
    """Raise RuntimeError for matrices that cannot be multiplied."""
    fitting = a.dim() == b.dim() == dimensions and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    if not fitting:
        raise RuntimeError(f"matrices of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")


def _start(x: Tensor, shape: tuple[int, ...], beta: float, alpha: float) -> Tensor:
    """A new tensor of this shape with the numbers of x, to which a product is added."""
    if beta != 1 or alpha != 1:
        raise refusal("products that are scaled when they are added")
    return checked(x.expand(shape)).clone(memory_format=torch.contiguous_format)


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a [n, k] @ b [k, m] to a contiguous out [n, m]."""
    _check(a, b, 2)
    (n, k), m = a.shape, b.shape[1]
    to = out.data_ptr(), m
    products.product(1, _matrix(a), _matrix(b), to, to, (n, k, m), False)
    return out


def mm(a: Tensor, b: Tensor) -> Tensor:
    return _add_product(torch.zeros(a.shape[0], b.shape[1]), a, b)


def addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _add_product(_start(x, (a.shape[0], b.shape[1]), beta, alpha), a, b)


def baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """x + a @ b for each of C matrices."""
    _check(a, b, 3)
    (count, n, k), m = a.shape, b.shape[2]
    out = _start(x, (count, n, m), beta, alpha)
    between = a.stride(0), b.stride(0), n * m
    products.products(count, between, _matrix(a), _matrix(b), (out.data_ptr(), m), (n, k, m))
    return out


def bmm(a: Tensor, b: Tensor) -> Tensor:
    return baddbmm(torch.zeros(()), a, b)


def mv(a: Tensor, x: Tensor) -> Tensor:
    return mm(a, x.unsqueeze(1)).squeeze(1)


def addmv(x: Tensor, a: Tensor, v: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return addmm(x.unsqueeze(1), a, v.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return mm(a.unsqueeze(0), b.unsqueeze(1)).view(())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = mm(rows, weight.t()) if bias is None else addmm(bias, rows, weight.t())
    return y.view(*x.shape[:-1], len(weight))


def linear_pointwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, scalars: list[Any], algorithm: str | None
) -> Tensor:
    if name != "none":
        raise refusal(f"linear layers that are fused with {name}")
    return linear(x, weight, bias)


def _by_axis(*settings: list[int]) -> list[list[int]]:
    """Settings of a convolution, for both axes. Torch gives one number if they are alike, as for padding="valid"."""
    return [each * 2 if len(each) == 1 else each for each in settings]


def _windows(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """The inputs of each output of a convolution: [n, inputs * kernel, places]."""
    return torch.ops.aten.im2col(x, kernel, dilation, padding, stride)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """A convolution of images, as a product of matrices."""
    _check_convolution(x, transposed, groups)
    if x.shape[1] != weight.shape[1]:
        raise RuntimeError(f"a convolution of {weight.shape[1]} channels cannot take images of shape {tuple(x.shape)}")
    kernel, (stride, padding, dilation) = list(weight.shape[2:]), _by_axis(stride, padding, dilation)
    columns = _windows(x, kernel, stride, padding, dilation)
    size = [(x.shape[2 + d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(2)]
    start = torch.zeros(()) if bias is None else bias.view(1, -1, 1)
    return baddbmm(start, weight.flatten(1).expand(len(x), -1, -1), columns).view(len(x), len(weight), *size)


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    _check_convolution(x, transposed, groups)
    kernel, flat = list(weight.shape[2:]), grad.flatten(2)
    stride, padding, dilation = _by_axis(stride, padding, dilation)
    by_x = by_weight = None
    if mask[0]:
        columns = bmm(weight.flatten(1).t().expand(len(x), -1, -1), flat)
        by_x = torch.ops.aten.col2im(columns, x.shape[2:], kernel, dilation, padding, stride)
    if mask[1]:
        by_weight = torch.zeros(len(weight), weight[0].numel())
        for image, seen in zip(flat, _windows(x, kernel, stride, padding, dilation), strict=True):
            _add_product(by_weight, image, seen.t())
        by_weight = by_weight.view(weight.shape)
    return by_x, by_weight, total(flat, [0, 2]) if mask[2] else None


def _check_convolution(x: Tensor, transposed: bool, groups: int) -> None:
    if transposed or groups != 1 or x.dim() != 4:
        raise refusal("convolutions with groups, transposed ones, and those of other than images")


def qr(x: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Q with orthogonal columns and R of a matrix with at least as many rows as columns. R's diagonal is positive."""
    if mode != "reduced" or x.dim() != 2 or x.shape[0] < x.shape[1]:
        raise refusal("QR decompositions other than reduced ones of a tall matrix")
    q = torch.from_numpy(orthogonal_rows(x.t().contiguous().numpy())).t()
    return q, mm(q.t(), x)
