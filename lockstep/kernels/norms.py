"""Layer normalization (Ba et al. 2016, arXiv:1607.06450) in float32, with identical bits on every CPU: those of torch's
replaced operations (lockstep.portable.sums.layer_norm).

Numbers that are normalized together are adjacent: those of a sample, or the channels at a place of an image. Their sums
have 8 parts (lockstep.kernels.sums). Rows of 16 numbers, such as the channels of MinAtar's network, stay in the CPU's
vector registers.

Shape legend: R rows, K numbers of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lockstep.kernels.cache import compiled
from lockstep.kernels.instructions import instruction, scalar, select, sqrt
from lockstep.kernels.sums import PARTS
from lockstep.kernels.vectors import WIDTH, address, put_vector, rectified, spread, vector_at

_ZERO, _ONE = np.float32(0), np.float32(1)
_FLOAT, _INT, _INDEX = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_PARTS = ir.VectorType(_FLOAT, PARTS)


def _added_up(builder: Any, parts: Any) -> Any:
    """The sum of the parts."""
    total = ir.Constant(_FLOAT, 0.0)
    for part in range(PARTS):
        total = builder.fadd(total, builder.extract_element(parts, _INDEX(part)))
    return total


@instruction
def _sum_of_parts(typingctx: Any, at: Any, count: Any) -> Any:
    """The sum of numbers at an address, in parts. Their count is a multiple of 8, and at least 8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        begin, count = arguments
        entry, loop, end = builder.block, builder.append_basic_block("parts"), builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        i, parts = builder.phi(_INT), builder.phi(_PARTS)
        after = builder.fadd(parts, vector_at(builder, builder.add(begin, builder.mul(i, _INT(4))), PARTS))
        following = builder.add(i, _INT(PARTS))
        for phi, first, then in ((i, _INT(0), following), (parts, ir.Constant(_PARTS, [0.0] * PARTS), after)):
            phi.add_incoming(first, entry)
            phi.add_incoming(then, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
        builder.position_at_end(end)
        return _added_up(builder, after)

    return types.float32(types.intp, types.intp), generate


def _mean(builder: Any, x: Any) -> Any:
    """The mean of a vector of 16 numbers, as a vector."""
    low, high = (
        builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(_INDEX, PARTS), list(range(begin, begin + PARTS))))
        for begin in (0, PARTS)
    )
    parts = builder.fadd(builder.fadd(ir.Constant(_PARTS, [0.0] * PARTS), low), high)
    return spread(builder, builder.fdiv(_added_up(builder, parts), ir.Constant(_FLOAT, float(WIDTH))))


def _far_of(builder: Any, x: Any, eps: Any) -> tuple[Any, Any]:
    """The differences of 16 numbers from their mean, and 1 / their deviation."""
    far = builder.fsub(x, _mean(builder, x))
    variance = builder.extract_element(_mean(builder, builder.fmul(far, far)), _INDEX(0))
    root = builder.module.declare_intrinsic("llvm.sqrt", [_FLOAT])
    deviation = builder.call(root, [builder.fadd(variance, eps)])
    return far, spread(builder, builder.fdiv(ir.Constant(_FLOAT, 1.0), deviation))


@instruction
def _normalize_vector(typingctx: Any, x: Any, eps: Any, scale: Any, shift: Any, rectify: Any, y: Any) -> Any:
    """As _normalize, for 16 numbers at addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, eps, scale, shift, rectify, y = arguments
        far, inverse = _far_of(builder, vector_at(builder, x), eps)
        scaled = builder.fmul(builder.fmul(far, inverse), vector_at(builder, scale))
        number = builder.fadd(scaled, vector_at(builder, shift))
        put_vector(builder, builder.select(rectify, rectified(builder, number), number), y)
        return context.get_dummy_value()

    of_arguments = types.intp, types.float32, types.intp, types.intp, types.boolean, types.intp
    return types.void(*of_arguments), generate


@instruction
def _vector_back(
    typingctx: Any, x: Any, eps: Any, scale: Any, by_y: Any, by_scale: Any, by_shift: Any, by_x: Any
) -> Any:
    """As _back, for 16 numbers at addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, eps, scale, by_y, by_scale, by_shift, by_x = arguments
        far, inverse = _far_of(builder, vector_at(builder, x), eps)
        y, given = builder.fmul(far, inverse), vector_at(builder, by_y)
        scaled = builder.fmul(given, vector_at(builder, scale))
        first, second = _mean(builder, scaled), _mean(builder, builder.fmul(scaled, y))
        for added, to in ((builder.fmul(given, y), by_scale), (given, by_shift)):
            put_vector(builder, builder.fadd(vector_at(builder, to), added), to)
        rest = builder.fsub(builder.fsub(scaled, first), builder.fmul(y, second))
        put_vector(builder, builder.fmul(rest, inverse), by_x)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, *[types.intp] * 5), generate


@scalar
def _sum(x, count):
    """The sum of the first numbers of x, in parts."""
    whole = count - count % PARTS
    if whole == count:
        return _sum_of_parts(address(x), count)
    parts = np.zeros(PARTS, np.float32)
    for i in range(count):
        parts[i % PARTS] += x[i]
    total = _ZERO
    for part in range(PARTS):
        total += parts[part]
    return total


@scalar
def _far(x, count, eps, far, squares):
    """Write the differences of a row's numbers from their mean, and return 1 / their deviation."""
    middle = _sum(x, count) / np.float32(count)
    for i in range(count):
        far[i] = x[i] - middle
        squares[i] = far[i] * far[i]
    return _ONE / sqrt(_sum(squares, count) / np.float32(count) + eps)


@scalar
def _normalize(x, count, eps, scale, shift, rectify, far, squares, y):
    inverse = _far(x, count, eps, far, squares)
    for i in range(count):
        y[i] = far[i] * inverse * scale[i] + shift[i]
    if rectify:
        for i in range(count):
            y[i] = select(y[i] <= 0, _ZERO, y[i])


@scalar
def _back(x, count, eps, scale, by_y, far, squares, scaled, products, by_scale, by_shift, by_x):
    inverse = _far(x, count, eps, far, squares)
    for i in range(count):
        y = far[i] * inverse
        scaled[i] = by_y[i] * scale[i]
        products[i] = scaled[i] * y
        by_scale[i] += by_y[i] * y
        by_shift[i] += by_y[i]
    first = _sum(scaled, count) / np.float32(count)
    second = _sum(products, count) / np.float32(count)
    for i in range(count):
        by_x[i] = (scaled[i] - first - far[i] * inverse * second) * inverse


@compiled
def normalize_rows(
    x: np.ndarray, eps: np.float32, scale: np.ndarray, shift: np.ndarray, rectify: bool, y: np.ndarray
) -> None:
    """Write the normalized rows to y.

    Args:
        x, y: float32 [R, K].
        eps: is added to variances.
        scale, shift: factors of the normalized numbers, and numbers that are added then, float32 [K].
        rectify: write 0 for negative results.
    """
    count = x.shape[1]
    far, squares = np.empty(count, np.float32), np.empty(count, np.float32)
    for row in range(len(x)):
        if count == WIDTH:
            _normalize_vector(address(x[row]), eps, address(scale), address(shift), rectify, address(y[row]))
        else:
            _normalize(x[row], count, eps, scale, shift, rectify, far, squares, y[row])


@compiled
def normalize_rows_back(
    x: np.ndarray,
    eps: np.float32,
    scale: np.ndarray,
    by_y: np.ndarray,
    by_scale: np.ndarray,
    by_shift: np.ndarray,
    by_x: np.ndarray,
) -> None:
    """Given the gradient by y, float32 [R, K], write that by x, and add those by scale and shift [K], row by row."""
    count = x.shape[1]
    far, squares = np.empty(count, np.float32), np.empty(count, np.float32)
    scaled, products = np.empty(count, np.float32), np.empty(count, np.float32)
    for row in range(len(x)):
        if count == WIDTH:
            of_sums = address(by_scale), address(by_shift)
            _vector_back(address(x[row]), eps, address(scale), address(by_y[row]), *of_sums, address(by_x[row]))
        else:
            held = far, squares, scaled, products, by_scale, by_shift
            _back(x[row], count, eps, scale, by_y[row], *held, by_x[row])
