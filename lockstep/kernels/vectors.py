"""Operations on vectors of 16 numbers, written for LLVM directly: they read, move and add them.

A vector is given by the address of its first number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lockstep.kernels.cache import compiled
from lockstep.kernels.instructions import fused, instruction

WIDTH = 16
"""Numbers of a vector. LLVM divides it into vectors of the CPU's size."""
BYTES = 4
"""Bytes of a number."""
FLOAT, INT, _INDEX = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_BYTE = ir.IntType(8).as_pointer()
_ROW = ir.VectorType(FLOAT, WIDTH)


def beyond(builder: Any, address: Any, numbers: Any) -> Any:
    """The address so many numbers behind another address."""
    return builder.add(address, builder.mul(numbers, INT(BYTES)))


def value_at(builder: Any, address: Any, kind: Any) -> Any:
    """The value of a type of LLVM's at an address."""
    found = builder.load(builder.inttoptr(address, kind.as_pointer()))
    found.align = BYTES
    return found


def put_vector(builder: Any, value: Any, address: Any) -> None:
    """Write numbers to an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = BYTES


def vector_at(builder: Any, address: Any, count: int = WIDTH) -> Any:
    """The numbers at an address."""
    return value_at(builder, address, ir.VectorType(FLOAT, count))


def spread(builder: Any, number: Any) -> Any:
    """A vector of one number."""
    single = builder.insert_element(ir.Constant(_ROW, ir.Undefined), number, _INDEX(0))
    mask = ir.Constant(ir.VectorType(_INDEX, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(single, ir.Constant(_ROW, ir.Undefined), mask)


def rectified(builder: Any, numbers: Any) -> Any:
    """16 numbers, with 0 for negative ones and for -0."""
    zero = ir.Constant(_ROW, [0.0] * WIDTH)
    above = builder.fcmp_unordered(">=", numbers, zero)  # or NaN, which stays
    return builder.fadd(builder.select(above, numbers, zero), zero)  # without -0


@instruction
def load(typingctx: Any, address: Any) -> Any:
    """The float32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return value_at(builder, arguments[0], FLOAT)

    return types.float32(types.intp), generate


@instruction
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a float32 to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        put_vector(builder, arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


@instruction
def address(typingctx: Any, array: Any) -> Any:
    """The address of an array's first number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(made.data, INT)

    return types.intp(array), generate


@instruction
def move(typingctx: Any, b: Any, out: Any) -> Any:
    """Copy 16 numbers from an address to another one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        put_vector(builder, vector_at(builder, arguments[0]), arguments[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@instruction
def plus(typingctx: Any, a: Any, b: Any, out: Any) -> Any:
    """Write the sums of 16 numbers at two addresses to a third one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, out = arguments
        put_vector(builder, builder.fadd(vector_at(builder, a), vector_at(builder, b)), out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@instruction
def add_scaled(typingctx: Any, factor: Any, b: Any, to: Any) -> Any:
    """Add a float32 times 16 numbers at an address to those at another one, each with a single rounding."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        factor, b, to = arguments
        total = fused(context, builder, spread(builder, factor), vector_at(builder, b), vector_at(builder, to))
        put_vector(builder, total, to)
        return context.get_dummy_value()

    return types.void(types.float32, types.intp, types.intp), generate


@instruction
def any_nonzero(typingctx: Any, address: Any) -> Any:
    """Whether any of 16 numbers at an address is neither 0 nor -0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zero = ir.Constant(_ROW, [0.0] * WIDTH)
        lanes = builder.fcmp_unordered("!=", vector_at(builder, arguments[0]), zero)
        return builder.icmp_unsigned("!=", builder.bitcast(lanes, ir.IntType(WIDTH)), ir.IntType(WIDTH)(0))

    return types.boolean(types.intp), generate


@instruction
def add_rows(typingctx: Any, rows: Any, b: Any, b_row: Any, to: Any) -> Any:
    """Add the first 16 numbers of several rows, one row after the other, to those at an address. There is at least one
    row; b_row is their stride in numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, b, b_row, to = arguments
        before = vector_at(builder, to)
        entry, loop, end = builder.block, builder.append_basic_block("rows"), builder.append_basic_block("added")
        builder.branch(loop)
        builder.position_at_end(loop)
        row, place, total = builder.phi(INT), builder.phi(INT), builder.phi(_ROW)
        following, after = builder.add(row, INT(1)), builder.fadd(total, vector_at(builder, place))
        advanced = following, beyond(builder, place, b_row), after
        for phi, first, then in zip((row, place, total), (INT(0), b, before), advanced, strict=True):
            phi.add_incoming(first, entry)
            phi.add_incoming(then, loop)
        builder.cbranch(builder.icmp_signed("<", following, rows), loop, end)
        builder.position_at_end(end)
        put_vector(builder, after, to)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@instruction
def rectify(typingctx: Any, b: Any, out: Any) -> Any:
    """Write 16 numbers at an address to another one, and 0 for negative ones and for -0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        put_vector(builder, rectified(builder, vector_at(builder, arguments[0])), arguments[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@instruction
def fetch(typingctx: Any, address: Any) -> Any:
    """Begin to move the numbers at an address into the cache. The address may be outside of memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE, _INDEX, _INDEX, _INDEX])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE], kind)
        to_read, keep, data = _INDEX(0), _INDEX(2), _INDEX(1)
        builder.call(prefetch, [builder.inttoptr(arguments[0], _BYTE), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.intp), generate


EDGE = 8
"""Rows and columns of a square that turn transposes."""


@instruction
def turn(typingctx: Any, b: Any, b_row: Any, out: Any, out_row: Any) -> Any:
    """Write the transposed square at an address to another one; the rows of both are strides in numbers apart."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        b, b_row, out, out_row = arguments
        kind = ir.VectorType(FLOAT, EDGE)
        rows = [value_at(builder, beyond(builder, b, builder.mul(b_row, INT(i))), kind) for i in range(EDGE)]
        for far in (1, 2, 4):  # swap what lies this far off the diagonal, within squares of twice the size
            upper = [lane + (EDGE - far) * bool(lane & far) for lane in range(EDGE)]
            lower = [lane + (EDGE if lane & far else far) for lane in range(EDGE)]
            masks = [ir.Constant(ir.VectorType(_INDEX, EDGE), lanes) for lanes in (upper, lower)]
            for i in (i for i in range(EDGE) if not i & far):
                pair = rows[i], rows[i + far]
                rows[i], rows[i + far] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        for i, row in enumerate(rows):
            put_vector(builder, row, beyond(builder, out, builder.mul(out_row, INT(i))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@compiled
def move_row(of: np.ndarray, to: np.ndarray) -> None:
    """Copy a row, float32 [D], number by number: LLVM turns this into vectors, but not an assignment of arrays."""
    for d in range(len(to)):
        to[d] = of[d]
