"""The operations of torch that portable arithmetic replaces, by their names in torch.ops.aten.

Each takes the arguments of the operation that it replaces, and returns a new tensor. lockstep.portable.mode writes it
where an operation in place must write.

Shape legend: C matrices, n rows, k terms, m columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels import products
from lockstep.kernels.initialize import orthogonal_rows
from lockstep.portable import loops


def _checked(x: Tensor) -> Tensor:
    """A contiguous float32 tensor."""
    assert x.dtype == torch.float32, f"portable arithmetic is float32, not {x.dtype}"
    return x.contiguous()


def _mapped(loop: Callable[[int, int, int], None]) -> Callable[[Tensor], Tensor]:
    """The operation that applies a loop to each number."""

    def operation(x: Tensor) -> Tensor:
        x = _checked(x)
        out = torch.empty_like(x)
        loop(x.data_ptr(), out.data_ptr(), x.numel())
        return out

    return operation


exp, expm1, log, tanh, sigmoid = map(_mapped, (loops.exp, loops.expm1, loops.log, loops.tanh, loops.sigmoid))
ndtri, erf, erfc, sin, cos = map(_mapped, (loops.ndtri, loops.erf, loops.erfc, loops.sin, loops.cos))
_softplus = _mapped(loops.softplus)


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    return _softplus(x) if beta == 1 else _softplus(x * beta) / beta


def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    return grad * sigmoid(x if beta == 1 else x * beta)


def tanh_backward(grad: Tensor, y: Tensor) -> Tensor:
    return grad * (1 - y * y)


def sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    return grad * ((1 - y) * y)


def log1p(x: Tensor) -> Tensor:
    """By the trick of Kahan, which cancels the rounding of 1 + x."""
    total = 1 + x
    near = log(total) * (x / (total - 1))
    return torch.where(total == 1, x, near)


def atanh(x: Tensor) -> Tensor:
    return 0.5 * (log1p(x) - log1p(-x))


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(x > 0, x * scale, expm1(x * input_scale) * (alpha * scale))


def elu_backward(
    grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, self_or_result: Tensor
) -> Tensor:
    x = self_or_result
    slope = (x + alpha * scale) if is_result else exp(x * input_scale) * (alpha * scale)
    return torch.where(x > 0, grad * scale, grad * (slope * input_scale))


def square(x: Tensor) -> Tensor:
    return x * x


def power(x: Any, exponent: Any) -> Tensor:
    """Products for whole exponents, square roots, and else e**(exponent log x)."""
    if isinstance(exponent, (int, float)):
        if exponent == int(exponent) and abs(exponent) <= 64:
            whole = _whole_power(x, abs(int(exponent)))
            return whole if exponent >= 0 else 1 / whole
        if exponent == 0.5:
            return x.sqrt()
    x, exponent = torch.broadcast_tensors(*(torch.as_tensor(each, dtype=torch.float32) for each in (x, exponent)))
    x, exponent = _checked(x), _checked(exponent)
    out = torch.empty_like(x)
    loops.power(x.data_ptr(), exponent.data_ptr(), out.data_ptr(), x.numel())
    return out


def _whole_power(x: Tensor, exponent: int) -> Tensor:
    result = torch.ones_like(x)
    while exponent:
        if exponent & 1:
            result = result * x
        x, exponent = x * x, exponent >> 1
    return result


def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + (a * b if value == 1 else (a * b) * value)


def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + (a / b if value == 1 else (a / b) * value)


def lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    if isinstance(weight, (int, float)) and x.shape == end.shape:
        x, end = _checked(x), _checked(end)
        out = torch.empty_like(x)
        loops.lerp(x.data_ptr(), end.data_ptr(), np.float32(weight), out.data_ptr(), x.numel())
        return out
    return x + (end - x) * weight


def xlogy(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x == 0, 0.0, x * log(y))


_REDUCTIONS = {0: lambda x: x, 1: lambda x: mean(x), 2: lambda x: total(x)}


def smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    far = (x - target).abs()
    return _REDUCTIONS[reduction](torch.where(far < beta, (0.5 * far) * far / beta, far - 0.5 * beta))


def smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    error = x - target
    slope = torch.where(error.abs() < beta, error / beta, error.sign())
    return slope * (grad / x.numel() if reduction == 1 else grad)


def mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _REDUCTIONS[reduction](square(x - target))


def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    return (2 * (x - target)) * (grad / x.numel() if reduction == 1 else grad)


def total(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Sums over some axes, all by default."""
    if dtype is not None and dtype != x.dtype:
        x = x.to(dtype)
    axes = sorted({axis % max(1, x.dim()) for axis in dim}) if dim else list(range(x.dim()))
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)] if keepdim else kept
    if x.dtype == torch.float64:
        return _exact_order(x, axes).view(shape)
    if axes and axes[-1] - axes[0] >= len(axes):  # not neighbours
        x = x.permute([axis for axis in range(x.dim()) if axis not in axes] + axes)
        axes = list(range(x.dim() - len(axes), x.dim()))
    x = _checked(x)
    outer, inner = math.prod(x.shape[: axes[0]]) if axes else 1, math.prod(x.shape[axes[-1] + 1 :]) if axes else 1
    out = torch.empty(shape)
    if not out.numel():
        return out
    count = x.numel() // (outer * inner)
    if inner == 1:
        loops.row_sums(x.data_ptr(), out.data_ptr(), outer, count)
    else:
        loops.inner_sums(x.data_ptr(), out.data_ptr(), outer, count, inner)
    return out


def _exact_order(x: Tensor, axes: list[int]) -> Tensor:
    """Sums of float64, one number after the other; there are few of them."""
    rows = x.permute([axis for axis in range(x.dim()) if axis not in axes] + axes).flatten(-len(axes))
    result = torch.zeros(rows.shape[:-1], dtype=x.dtype)
    for column in rows.unbind(-1):
        result = result + column
    return result


def mean(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    sums = total(x, dim, keepdim, dtype=dtype)
    return sums / (x.numel() / max(1, sums.numel()))


def variance(x: Tensor, dim: list[int] | None = None, *, correction: float | None = 1, keepdim: bool = False) -> Tensor:
    far = x - mean(x, dim, True) if dim else x - mean(x)
    sums = total(far * far, dim, keepdim)
    freedom = x.numel() / max(1, sums.numel()) - (1 if correction is None else correction)
    return sums / freedom


def deviation(
    x: Tensor, dim: list[int] | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> Tensor:
    return variance(x, dim, correction=correction, keepdim=keepdim).sqrt()


def vector_norm(
    x: Tensor, order: float = 2, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if order != 2 or dim is not None:
        raise NotImplementedError("portable arithmetic has the Euclidean norm of whole tensors")
    x = _checked(x)
    return torch.tensor(math.sqrt(loops.square_sum(x.data_ptr(), x.numel())), dtype=torch.float32)


def _by_rows(loop: Callable[..., None], given: list[Tensor], dim: int) -> Tensor:
    """The result of a loop over the rows of tensors whose rows lie along an axis."""
    last = dim % given[0].dim() == given[0].dim() - 1
    held = [_checked(x if last else x.movedim(dim, -1)) for x in given]
    out, count = torch.empty_like(held[0]), held[0].shape[-1]
    if out.numel():
        loop(*(x.data_ptr() for x in held), out.data_ptr(), out.numel() // count, count)
    return out if last else out.movedim(-1, dim)


def log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    return _by_rows(loops.log_softmax, [x], dim)


def log_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _by_rows(loops.log_softmax_backward, [grad, y], dim)


def softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    return exp(log_softmax(x, dim))


def softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _by_rows(loops.softmax_backward, [grad, y], dim)


def logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    largest = x.amax(dim, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    found = log(total(exp(x - largest), dim, True)) + largest
    return found if keepdim else found.squeeze(tuple(dim))


def layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized x, and means and reciprocal deviations, as aten::native_layer_norm."""
    axes = list(range(x.dim() - len(shape), x.dim()))
    middle = mean(x, axes, True)
    far = x - middle
    inverse = 1 / (mean(far * far, axes, True) + eps).sqrt()
    y = far * inverse
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), middle, inverse


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    middle: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    axes = list(range(x.dim() - len(shape), x.dim()))
    leading = list(range(x.dim() - len(shape)))
    y = (x - middle) * inverse
    scaled = grad if weight is None else grad * weight
    by_x = (scaled - mean(scaled, axes, True) - y * mean(scaled * y, axes, True)) * inverse if mask[0] else None
    by_weight = total(grad * y, leading) if mask[1] else None
    return by_x, by_weight, total(grad, leading) if mask[2] else None


def _matrix(x: Tensor) -> tuple[Tensor, int, int]:
    """A matrix with the strides of rows and columns of its last two axes."""
    assert x.dtype == torch.float32, f"portable arithmetic is float32, not {x.dtype}"
    return x, x.stride(-2), x.stride(-1)


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a [n, k] @ b [k, m] to a contiguous out [n, m]."""
    (a, a_row, a_term), (b, b_term, b_column) = _matrix(a), _matrix(b)
    (n, k), m = a.shape, b.shape[1]
    products.product(a.data_ptr(), a_row, a_term, b.data_ptr(), b_term, b_column, out.data_ptr(), m, n, k, m)
    return out


def mm(a: Tensor, b: Tensor) -> Tensor:
    return _add_product(torch.zeros(a.shape[0], b.shape[1]), a, b)


def addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    assert beta == 1 and alpha == 1
    return _add_product(x.expand(a.shape[0], b.shape[1]).clone(memory_format=torch.contiguous_format), a, b)


def baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """x + a @ b for each of C matrices."""
    assert beta == 1 and alpha == 1
    (a, a_row, a_term), (b, b_term, b_column) = _matrix(a), _matrix(b)
    (count, n, k), m = a.shape, b.shape[2]
    out = x.expand(count, n, m).clone(memory_format=torch.contiguous_format)
    lefts, rights = (a.data_ptr(), a.stride(0), a_row, a_term), (b.data_ptr(), b.stride(0), b_term, b_column)
    products.products(count, *lefts, *rights, out.data_ptr(), n * m, m, n, k, m)
    return out


def bmm(a: Tensor, b: Tensor) -> Tensor:
    return baddbmm(torch.zeros(()), a, b)


def mv(a: Tensor, x: Tensor) -> Tensor:
    return mm(a, x.unsqueeze(1)).squeeze(1)


def addmv(x: Tensor, a: Tensor, v: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return addmm(x.unsqueeze(1), a, v.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return total(a * b)


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(1) * b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = mm(rows, weight.t()) if bias is None else addmm(bias, rows, weight.t())
    return y.view(*x.shape[:-1], len(weight))


def linear_pointwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, scalars: list[Any], algorithm: str | None
) -> Tensor:
    assert name == "none"
    return linear(x, weight, bias)


def _windows(x: Tensor, kernel: list[int], stride: Any, padding: Any, dilation: Any) -> Tensor:
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
    kernel = list(weight.shape[2:])
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
        raise NotImplementedError("portable arithmetic has convolutions of images without groups")


def linspace(start: float, end: float, steps: int, **kwargs: Any) -> Tensor:
    last = max(1, steps - 1)
    return torch.tensor([start + (end - start) * (i / last) for i in range(steps)], **kwargs)


def uniform(x: Tensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Tensor:
    return torch.rand(x.shape, generator=generator) * (high - low) + low


def normal(x: Tensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> Tensor:
    return ndtri(torch.rand(x.shape, generator=generator).clamp(1e-7, 1 - 1e-7)) * std + mean


def qr(x: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Q with orthogonal columns and R of a matrix with at least as many rows as columns. R's diagonal is positive."""
    assert mode == "reduced" and x.shape[0] >= x.shape[1]
    q = torch.from_numpy(orthogonal_rows(x.t().contiguous().numpy())).t()
    return q, mm(q.t(), x)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "exp": exp,
    "expm1": expm1,
    "log": log,
    "log1p": log1p,
    "tanh": tanh,
    "tanh_backward": tanh_backward,
    "sigmoid": sigmoid,
    "sigmoid_backward": sigmoid_backward,
    "softplus": softplus,
    "softplus_backward": softplus_backward,
    "special_ndtri": ndtri,
    "erf": erf,
    "erfc": erfc,
    "sin": sin,
    "cos": cos,
    "atanh": atanh,
    "elu": elu,
    "elu_backward": elu_backward,
    "square": square,
    "pow": power,
    "addcmul": addcmul,
    "addcdiv": addcdiv,
    "lerp": lerp,
    "xlogy": xlogy,
    "smooth_l1_loss": smooth_l1_loss,
    "smooth_l1_loss_backward": smooth_l1_loss_backward,
    "mse_loss": mse_loss,
    "mse_loss_backward": mse_loss_backward,
    "sum": total,
    "mean": mean,
    "var": variance,
    "std": deviation,
    "linalg_vector_norm": vector_norm,
    "_log_softmax": log_softmax,
    "_log_softmax_backward_data": log_softmax_backward,
    "_softmax": softmax,
    "_softmax_backward_data": softmax_backward,
    "logsumexp": logsumexp,
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "mm": mm,
    "addmm": addmm,
    "bmm": bmm,
    "baddbmm": baddbmm,
    "mv": mv,
    "addmv": addmv,
    "dot": dot,
    "outer": outer,
    "linear": linear,
    "mkldnn::_linear_pointwise": linear_pointwise,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "linspace": linspace,
    "uniform_": uniform,
    "normal_": normal,
    "linalg_qr": qr,
}
"""By name; see torch's native_functions.yaml for their arguments."""
