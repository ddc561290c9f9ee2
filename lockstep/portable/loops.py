"""Loops over contiguous float32 memory, given by addresses: the compiled part of elementwise operations, sums and
softmaxes.

A sum of numbers that lie together has parts (lockstep.kernels.sums). A sum over an outer axis adds one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[reportPrivateImportUsage]

from lockstep.kernels import math, sums
from lockstep.kernels.cache import compiled
from lockstep.kernels.instructions import instruction, scalar

_ZERO, _HALF, _ONE, _TWO, _NAN = map(np.float32, (0, 0.5, 1, 2, np.nan))


@instruction
def _pointer(typingctx: Any, address: Any) -> Any:
    """An address as a pointer to float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.intp), generate


@scalar
def _floats(address, count):
    return carray(_pointer(address), count)


@compiled
def exp(x: int, out: int, count: int) -> None:
    """e**x"""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.exp(a[i])


@compiled
def expm1(x: int, out: int, count: int) -> None:
    """e**x - 1"""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.expm1(a[i])


@compiled
def log(x: int, out: int, count: int) -> None:
    """The natural logarithm."""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.log(a[i])


@compiled
def tanh(x: int, out: int, count: int) -> None:
    """The hyperbolic tangent."""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.tanh(a[i])


@compiled
def sigmoid(x: int, out: int, count: int) -> None:
    """1 / (1 + e**-x)"""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.sigmoid(a[i])


@compiled
def softplus(x: int, out: int, count: int) -> None:
    """log(1 + e**x)"""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.softplus(a[i])


@compiled
def ndtri(x: int, out: int, count: int) -> None:
    """Quantiles of the standard normal distribution."""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.ndtri(a[i])


@compiled
def erf(x: int, out: int, count: int) -> None:
    """The error function."""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.erf(a[i])


@compiled
def erfc(x: int, out: int, count: int) -> None:
    """1 - erf(x)"""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.erfc(a[i])


@compiled
def sin(x: int, out: int, count: int) -> None:
    """The sine."""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.sin32(a[i])


@compiled
def cos(x: int, out: int, count: int) -> None:
    """The cosine."""
    a, b = _floats(x, count), _floats(out, count)
    for i in range(count):
        b[i] = math.cos32(a[i])


@compiled
def power(x: int, exponents: int, out: int, count: int) -> None:
    """x to the power y, as e**(y log x); for negative x, if y is whole."""
    a, e, b = _floats(x, count), _floats(exponents, count), _floats(out, count)
    for i in range(count):
        size = math.exp(e[i] * math.log(abs(a[i]))) if e[i] != 0 else _ONE
        whole = e[i] == math.floor(e[i])
        odd = whole and _HALF * e[i] != math.floor(_HALF * e[i])
        b[i] = size if a[i] >= 0 else ((-size if odd else size) if whole else _NAN)


@compiled
def lerp(x: int, end: int, weight: np.float32, out: int, count: int) -> None:
    """x + (end - x) * weight"""
    a, e, b = _floats(x, count), _floats(end, count), _floats(out, count)
    for i in range(count):
        b[i] = a[i] + (e[i] - a[i]) * weight


@compiled
def lerp_in_place(x: int, end: int, weight: np.float32, count: int) -> None:
    """As lerp, written to x. LLVM's loop for several arrays is slow if two of them are the same."""
    a, e = _floats(x, count), _floats(end, count)
    for i in range(count):
        a[i] += (e[i] - a[i]) * weight


@compiled
def ordered_sums(x: np.ndarray, out: np.ndarray) -> None:
    """float64 [rows, count] -> [rows], one number after the other."""
    for row in range(len(x)):
        total = 0.0
        for i in range(x.shape[1]):
            total += x[row, i]
        out[row] = total


@compiled
def middle_sums(x: int, out: int, outer: int, count: int, inner: int) -> None:
    """[outer, count, inner] -> [outer, inner]"""
    a, b = _floats(x, outer * count * inner), _floats(out, outer * inner)
    sums.middle_sums(a.reshape((outer, count, inner)), b.reshape((outer, inner)))


@compiled
def log_softmax_backward(grad: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """The gradient by x, given that by y = log_softmax(x) of each row: [rows, count] each."""
    for row in range(len(y)):
        total = _ZERO
        for i in range(y.shape[1]):
            total += grad[row, i]
        for i in range(y.shape[1]):
            out[row, i] = grad[row, i] - math.exp(y[row, i]) * total


@compiled
def softmax_backward(grad: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """The gradient by x, given that by y = softmax(x) of each row: [rows, count] each."""
    for row in range(len(y)):
        total = _ZERO
        for i in range(y.shape[1]):
            total += grad[row, i] * y[row, i]
        for i in range(y.shape[1]):
            out[row, i] = y[row, i] * (grad[row, i] - total)
