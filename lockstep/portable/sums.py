"""Sums over axes, and what consists of them, in portable arithmetic.

Each function takes the arguments of the operation of torch.ops.aten that it replaces, and returns new tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import policies
from lockstep.kernels.optimizers import norm
from lockstep.portable import loops
from lockstep.portable.elementwise import checked, exp, log, refusal, sqrt, square


def total(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Sums over some axes, all by default."""
    if dtype is not None and dtype != x.dtype:
        x = x.to(dtype)
    axes = _axes(x, dim)
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)] if keepdim else kept
    if x.dtype == torch.float64:
        return _exact_order(x, axes).view(shape)
    if axes and axes[-1] - axes[0] >= len(axes):  # not neighbours
        x = x.permute([axis for axis in range(x.dim()) if axis not in axes] + axes)
        axes = list(range(x.dim() - len(axes), x.dim()))
    x = checked(x)
    outer, inner = math.prod(x.shape[: axes[0]]) if axes else 1, math.prod(x.shape[axes[-1] + 1 :]) if axes else 1
    out = torch.empty(shape)
    if not out.numel():
        return out
    count = x.numel() // (outer * inner)
    loops.middle_sums(x.data_ptr(), out.data_ptr(), outer, count, inner)
    return out


def _axes(x: Tensor, dim: list[int] | None) -> list[int]:
    """The axes that are meant, in order; all by default."""
    size = max(1, x.dim())
    for axis in dim or ():
        if not -size <= axis < size:
            raise IndexError(f"axis {axis} is out of range for a tensor of {x.dim()} axes")
    return [axis for axis in range(x.dim()) if axis in {each % size for each in dim}] if dim else list(range(x.dim()))


def _exact_order(x: Tensor, axes: list[int]) -> Tensor:
    """Sums of float64 over some axes, one number after the other, as a vector."""
    kept = [axis for axis in range(x.dim()) if axis not in axes]
    outer = math.prod(x.shape[axis] for axis in kept)
    result = torch.zeros(outer, dtype=x.dtype)
    if x.numel():
        loops.ordered_sums(x.permute(kept + axes).reshape(outer, -1).numpy(), result.numpy())
    return result


def mean(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    sums = total(x, dim, keepdim, dtype=dtype)
    return sums / (x.numel() / max(1, sums.numel()))


def variance(x: Tensor, dim: list[int] | None = None, *, correction: float | None = 1, keepdim: bool = False) -> Tensor:
    far = x - mean(x, dim, True) if dim else x - mean(x)
    sums = total(far * far, dim, keepdim)
    freedom = x.numel() / max(1, sums.numel()) - (1 if correction is None else correction)
    return sums / max(0.0, freedom)


def deviation(
    x: Tensor, dim: list[int] | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> Tensor:
    return sqrt(variance(x, dim, correction=correction, keepdim=keepdim))


def vector_norm(
    x: Tensor, order: float = 2, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if order != 2 or dim is not None:
        raise refusal("norms other than the Euclidean one of a whole tensor")
    x = checked(x if dtype is None else x.to(dtype))
    found = torch.tensor(norm(x.view(-1).detach().numpy()), dtype=torch.float32)
    return found.view([1] * x.dim()) if keepdim else found


def _by_rows(loop: Callable[..., None], given: list[Tensor], dim: int) -> Tensor:
    """The result of a loop over the rows of tensors whose rows lie along an axis."""
    size = max(1, given[0].dim())
    last = dim % size == size - 1
    held = [checked(x if last else x.movedim(dim, -1)) for x in given]
    out, count = torch.empty_like(held[0]), held[0].shape[-1] if held[0].dim() else 1
    if out.numel():
        loop(*(x.view(-1, count).numpy() for x in (*held, out)))
    return out if last else out.movedim(-1, dim)


def log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    return _by_rows(policies.log_softmax, [x], dim)


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
    inverse = 1 / sqrt(mean(far * far, axes, True) + eps)
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

    def summed(gradient: Tensor) -> Tensor:
        return total(gradient, leading) if leading else gradient

    return by_x, summed(grad * y) if mask[1] else None, summed(grad) if mask[2] else None


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
