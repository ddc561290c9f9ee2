"""Normalized layers (Ba et al. 2016, arXiv:1607.06450) in float32 arithmetic that is the same on every CPU, with the
bits of torch's replaced operations (lockstep.portable.sums.layer_norm).

Numbers that are normalized together lie together: those of a sample, or the channels at a place of an image. Their sums
have 8 parts (lockstep.kernels.sums).

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
from lockstep.kernels.tiles import WIDTH, address

EPS = np.float32(1e-6)
"""What is added to variances: that of lockstep.models.layers.LayerNorm."""
_ZERO, _ONE = np.float32(0), np.float32(1)


@instruction
def _sum_of_parts(typingctx: Any, at: Any, count: Any) -> Any:
    """The sum of numbers at an address, in parts. Their count is a multiple of 8, and at least 8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        begin, count = arguments
        index, kind = ir.IntType(64), ir.VectorType(ir.FloatType(), PARTS)
        entry, loop, end = builder.block, builder.append_basic_block("parts"), builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        i, parts = builder.phi(index), builder.phi(kind)
        place = builder.add(begin, builder.mul(i, index(4)))
        some = builder.load(builder.inttoptr(place, kind.as_pointer()))
        some.align = 4
        after, following = builder.fadd(parts, some), builder.add(i, index(PARTS))
        for phi, first, then in ((i, index(0), following), (parts, ir.Constant(kind, [0.0] * PARTS), after)):
            phi.add_incoming(first, entry)
            phi.add_incoming(then, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
        builder.position_at_end(end)
        total = ir.Constant(ir.FloatType(), 0.0)
        for part in range(PARTS):
            total = builder.fadd(total, builder.extract_element(after, ir.IntType(32)(part)))
        return total

    return types.float32(types.intp, types.intp), generate


@scalar
def _sum(x, count):
    """The sum of the first numbers of x, in parts."""
    whole = count - count % PARTS
    if whole == count:
        return _sum_of_parts(address(x), count)
    parts = np.zeros(PARTS, np.float32)
    for i in range(count):
        parts[i % PARTS] += x[i]
    return _sum_of_parts(address(parts), PARTS)


@scalar
def _far(x, count, far, squares):
    """Write how far the numbers of a row are from their mean, and return 1 / their deviation."""
    middle = _sum(x, count) / np.float32(count)
    for i in range(count):
        far[i] = x[i] - middle
        squares[i] = far[i] * far[i]
    return _ONE / sqrt(_sum(squares, count) / np.float32(count) + EPS)


@scalar
def _normalize(x, count, scale, shift, rectify, far, squares, y):
    inverse = _far(x, count, far, squares)
    for i in range(count):
        number = far[i] * inverse * scale[i] + shift[i]
        y[i] = select(rectify & (number <= 0), _ZERO, number)


@scalar
def _back(x, count, scale, by_y, far, squares, scaled, products, by_scale, by_shift, by_x):
    inverse = _far(x, count, far, squares)
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
def normalize_rows(x: np.ndarray, scale: np.ndarray, shift: np.ndarray, rectify: bool, y: np.ndarray) -> None:
    """Write the normalized rows to y.

    Args:
        x, y: float32 [R, K].
        scale, shift: what normalized numbers are multiplied by, and what is added then, float32 [K].
        rectify: write 0 for negative results.
    """
    count = x.shape[1]
    far, squares = np.empty(count, np.float32), np.empty(count, np.float32)
    for row in range(len(x)):
        if count == WIDTH:  # LLVM unrolls loops of known lengths
            _normalize(x[row], WIDTH, scale, shift, rectify, far, squares, y[row])
        else:
            _normalize(x[row], count, scale, shift, rectify, far, squares, y[row])


@compiled
def normalize_rows_back(
    x: np.ndarray, scale: np.ndarray, by_y: np.ndarray, by_scale: np.ndarray, by_shift: np.ndarray, by_x: np.ndarray
) -> None:
    """Given the gradient by y, float32 [R, K], write that by x, and add those by scale and shift [K], row by row."""
    count = x.shape[1]
    far, squares = np.empty(count, np.float32), np.empty(count, np.float32)
    scaled, products = np.empty(count, np.float32), np.empty(count, np.float32)
    for row in range(len(x)):
        held = far, squares, scaled, products, by_scale, by_shift
        if count == WIDTH:
            _back(x[row], WIDTH, scale, by_y[row], *held, by_x[row])
        else:
            _back(x[row], count, scale, by_y[row], *held, by_x[row])
