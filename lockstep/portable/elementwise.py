"""Operations that treat each number by itself, and random numbers, in portable arithmetic.

Each function takes the arguments of the operation of torch.ops.aten that it replaces, and returns new tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.settings import SettingsError
from lockstep.portable import loops


def refusal(what: str) -> SettingsError:
    """The error for what portable arithmetic does not cover."""
    return SettingsError(
        f"precision=portable does not cover {what}. Use --precision fp32, whose bits depend on the processor."
    )


def of_float32(x: Tensor) -> Tensor:
    """The tensor itself, which must be float32."""
    if x.dtype != torch.float32:
        raise refusal(f"numbers of type {x.dtype}: its models and losses are float32")
    return x


def checked(x: Tensor) -> Tensor:
    """The tensor, which must be float32, contiguous."""
    return of_float32(x).contiguous()


def _mapped(loop: Callable[[int, int, int], None]) -> Callable[[Tensor], Tensor]:
    """The operation that applies a loop to each number."""

    def operation(x: Tensor) -> Tensor:
        x = checked(x)
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
    return torch.where((total == 1) | (x == math.inf), x, near)


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


def sqrt(x: Tensor) -> Tensor:
    """NumPy's square root, which is rounded as IEEE 754 says. On Intel's CPUs, torch's comes from a library (MKL) that
    rounds about one in a hundred to the number beside it."""
    out = torch.empty(x.shape, dtype=x.dtype)
    np.sqrt(x.detach().numpy(), out=out.numpy())
    return out


def rsqrt(x: Tensor) -> Tensor:
    return 1 / sqrt(x)


def power(x: Any, exponent: Any) -> Tensor:
    """Products for whole exponents, square roots, and else e**(exponent log x)."""
    if isinstance(exponent, (int, float)):
        if float(exponent).is_integer() and abs(exponent) <= 64:
            whole = _whole_power(x, abs(int(exponent)))
            return whole if exponent >= 0 else 1 / whole
        if exponent == 0.5:
            return sqrt(x)
    x, exponent = torch.broadcast_tensors(*(torch.as_tensor(each, dtype=torch.float32) for each in (x, exponent)))
    x, exponent = checked(x), checked(exponent)
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
        x, end = checked(x), checked(end)
        out = torch.empty_like(x)
        loops.lerp(x.data_ptr(), end.data_ptr(), np.float32(weight), out.data_ptr(), x.numel())
        return out
    return x + (end - x) * weight


def lerp_in_place(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    if not isinstance(weight, (int, float)) or x.shape != end.shape or not x.is_contiguous():
        return lerp(x, end, weight)
    x, end = of_float32(x), checked(end)  # which keeps a copy of end alive
    loops.lerp_in_place(x.data_ptr(), end.data_ptr(), np.float32(weight), x.numel())
    return x


def xlogy(x: Any, y: Any) -> Tensor:
    dtype = torch.result_type(x, y)  # one of them may be a number
    x, y = torch.as_tensor(x, dtype=dtype), torch.as_tensor(y, dtype=dtype)
    return torch.where((x == 0) & ~y.isnan(), 0.0, x * log(y))


def arange(*limits: float, dtype: Any = None, **kwargs: Any) -> Tensor:
    start, end, step = (*((0,) if len(limits) == 1 else ()), *limits, *(() if len(limits) == 3 else (1,)))
    whole = dtype is not None and not dtype.is_floating_point
    if whole or all(float(x).is_integer() for x in (start, end, step)):
        return torch.arange(*limits, dtype=dtype, **kwargs)
    count = math.ceil((end - start) / step)
    return torch.tensor([float(start + step * i) for i in range(count)], dtype=dtype, **kwargs)


def linspace(start: float, end: float, steps: int, **kwargs: Any) -> Tensor:
    last = max(1, steps - 1)
    return torch.tensor([start + (end - start) * (i / last) for i in range(steps)], **kwargs)


def uniform(x: Tensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Tensor:
    return torch.rand(x.shape, generator=generator) * (high - low) + low


def normal(x: Tensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> Tensor:
    return ndtri(torch.rand(x.shape, generator=generator).clamp(1e-7, 1 - 1e-7)) * std + mean
