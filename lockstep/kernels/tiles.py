"""Tiles: the inner loop of products of matrices, and what moves numbers, written for LLVM directly.

A tile of rows and columns of a product stays in the CPU's vector registers while it goes through all terms. Its size
depends on how many registers there are, which changes no bit. Matrices are given by the address of their first number
and by strides in numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lockstep.kernels.cache import compiled
from lockstep.kernels.instructions import fused, has, instruction

WIDTH = 16
"""Numbers of a vector. LLVM cuts it into what the CPU has."""
_BYTES, _LISTED = 4, 8
_FLOAT, _INT, _INDEX = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_BYTE = ir.IntType(8).as_pointer()
_ROW = ir.VectorType(_FLOAT, WIDTH)


def _place(builder: Any, address: Any, numbers: Any) -> Any:
    return builder.add(address, builder.mul(numbers, _INT(_BYTES)))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    found = builder.load(builder.inttoptr(address, kind.as_pointer()))
    found.align = _BYTES
    return found


def put_vector(builder: Any, value: Any, address: Any) -> None:
    """Write numbers to an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = _BYTES


def vector_at(builder: Any, address: Any, count: int = WIDTH) -> Any:
    """The numbers at an address."""
    return _load(builder, address, ir.VectorType(_FLOAT, count))


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
        return _load(builder, arguments[0], _FLOAT)

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
        return builder.ptrtoint(made.data, _INT)

    return types.intp(array), generate


@instruction
def move(typingctx: Any, b: Any, out: Any) -> Any:
    """Copy 16 numbers from an address to another one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        put_vector(builder, _load(builder, arguments[0], _ROW), arguments[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@instruction
def plus(typingctx: Any, a: Any, b: Any, out: Any) -> Any:
    """Write the sums of 16 numbers at two addresses to a third one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, out = arguments
        put_vector(builder, builder.fadd(_load(builder, a, _ROW), _load(builder, b, _ROW)), out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@instruction
def add_scaled(typingctx: Any, factor: Any, b: Any, to: Any) -> Any:
    """Add a float32 times 16 numbers at an address to those at another one, each with a single rounding."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        factor, b, to = arguments
        total = fused(context, builder, spread(builder, factor), _load(builder, b, _ROW), _load(builder, to, _ROW))
        put_vector(builder, total, to)
        return context.get_dummy_value()

    return types.void(types.float32, types.intp, types.intp), generate


@instruction
def any_nonzero(typingctx: Any, address: Any) -> Any:
    """Whether any of 16 numbers at an address is neither 0 nor -0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zero = ir.Constant(_ROW, [0.0] * WIDTH)
        lanes = builder.fcmp_unordered("!=", _load(builder, arguments[0], _ROW), zero)
        return builder.icmp_unsigned("!=", builder.bitcast(lanes, ir.IntType(WIDTH)), ir.IntType(WIDTH)(0))

    return types.boolean(types.intp), generate


@instruction
def add_rows(typingctx: Any, rows: Any, b: Any, b_row: Any, to: Any) -> Any:
    """Add the first 16 numbers of several rows, one row after the other, to those at an address. There is at least one
    row; b_row is their stride in numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, b, b_row, to = arguments
        before = _load(builder, to, _ROW)
        entry, loop, end = builder.block, builder.append_basic_block("rows"), builder.append_basic_block("added")
        builder.branch(loop)
        builder.position_at_end(loop)
        row, place, total = builder.phi(_INT), builder.phi(_INT), builder.phi(_ROW)
        following, after = builder.add(row, _INT(1)), builder.fadd(total, _load(builder, place, _ROW))
        advanced = following, _place(builder, place, b_row), after
        for phi, first, then in zip((row, place, total), (_INT(0), b, before), advanced, strict=True):
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
        put_vector(builder, rectified(builder, _load(builder, arguments[0], _ROW)), arguments[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@instruction
def fetch(typingctx: Any, address: Any) -> Any:
    """Begin to move what lies at an address into the cache. It may lie outside of memory."""

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
        kind = ir.VectorType(_FLOAT, EDGE)
        rows = [_load(builder, _place(builder, b, builder.mul(b_row, _INT(i))), kind) for i in range(EDGE)]
        for far in (1, 2, 4):  # swap what lies this far off the diagonal, within squares of twice the size
            upper = [lane + (EDGE - far) * bool(lane & far) for lane in range(EDGE)]
            lower = [lane + (EDGE if lane & far else far) for lane in range(EDGE)]
            masks = [ir.Constant(ir.VectorType(_INDEX, EDGE), lanes) for lanes in (upper, lower)]
            for i in (i for i in range(EDGE) if not i & far):
                pair = rows[i], rows[i + far]
                rows[i], rows[i + far] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        for i, row in enumerate(rows):
            put_vector(builder, row, _place(builder, out, builder.mul(out_row, _INT(i))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


def _terms(context: Any, builder: Any, rows: int, vectors: int, arguments: Any, *, listed: bool) -> None:
    """Write the loop over the terms of a tile of rows × 16 * vectors numbers: c = start + a @ b, perhaps rectified.

    Args:
        listed: a's strides are addresses of lists, int64, of how many bytes behind a each row and each term begins.
    """
    a, a_row, a_term, b, b_term, start, start_row, c, c_row, k, rectify = arguments
    columns = [_INT(_BYTES * WIDTH * v) for v in range(vectors)]

    def places(first: Any, row: Any) -> list[Any]:
        begins = [_place(builder, first, builder.mul(row, _INT(r))) for r in range(rows)]
        return [builder.add(begin, column) for begin in begins for column in columns]

    before, to = [_load(builder, place, _ROW) for place in places(start, start_row)], places(c, c_row)
    if listed:
        steps = [_load(builder, builder.add(a_row, _INT(_LISTED * r)), _INT) for r in range(rows)]
    else:
        steps = [_place(builder, _INT(0), builder.mul(a_row, _INT(r))) for r in range(rows)]
    entry, loop, end = (builder.block, builder.append_basic_block("terms"), builder.append_basic_block("stored"))
    builder.branch(loop)
    builder.position_at_end(loop)
    term, at_a, at_b = (builder.phi(_INT) for _ in range(3))
    sums = [builder.phi(_ROW) for _ in to]
    of_b = [_load(builder, builder.add(at_b, column), _ROW) for column in columns]
    from_a = builder.add(a, _load(builder, at_a, _INT)) if listed else at_a
    after = []
    for r, step in enumerate(steps):
        factor = spread(builder, _load(builder, builder.add(from_a, step), _FLOAT))
        totals = sums[r * vectors : (r + 1) * vectors]
        after += [fused(context, builder, factor, x, total) for x, total in zip(of_b, totals, strict=True)]
    following = builder.add(term, _INT(1))
    next_a = builder.add(at_a, _INT(_LISTED)) if listed else _place(builder, at_a, a_term)
    begins = (_INT(0), a_term if listed else a, b, *before)
    advanced = (following, next_a, _place(builder, at_b, b_term), *after)
    for phi, first, then in zip((term, at_a, at_b, *sums), begins, advanced, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", following, k), loop, end)
    builder.position_at_end(end)
    with builder.if_else(rectify) as (yes, no):  # a choice of each number would take as long as eight terms
        with yes:
            for total, place in zip(after, to, strict=True):
                put_vector(builder, rectified(builder, total), place)
        with no:
            for total, place in zip(after, to, strict=True):
                put_vector(builder, total, place)


def _size(context: Any) -> tuple[int, int]:
    """Rows and vectors of the tallest tile: with AVX-512, a CPU has 32 registers for vectors of 16 numbers."""
    return (8, 2) if has(context, "avx512f") else (6, 1)


def _of_heights(context: Any, builder: Any, arguments: Any, write: Callable[[int, Any], None]) -> None:
    """Let the first argument choose among tiles of each height, which `write` writes."""
    tallest, _ = _size(context)
    done = builder.append_basic_block("done")
    switch = builder.switch(arguments[0], done)
    for height in (tallest, 4, 2, 1):
        block = builder.append_basic_block(f"rows{height}")
        switch.add_case(_INT(height), block)
        builder.position_at_end(block)
        write(height, arguments[1:])
        builder.branch(done)
    builder.position_at_end(done)


def _tile(*, narrow: bool, listed: bool) -> Any:
    """The signature and the code of a tile.

    Args:
        narrow: whether it has the columns of one vector.
        listed: whether a's numbers lie anywhere.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = 1 if narrow else _size(context)[1]

        def write(height: int, given: Any) -> None:
            _terms(context, builder, height, vectors, given, listed=listed)

        _of_heights(context, builder, arguments, write)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 11, types.boolean), generate


@instruction
def tile(
    typingctx: Any,
    rows: Any,
    a: Any,
    a_row: Any,
    a_term: Any,
    b: Any,
    b_term: Any,
    start: Any,
    start_row: Any,
    c: Any,
    c_row: Any,
    k: Any,
    rectify: Any,
) -> Any:
    """Write start + a @ b to a tile of the tallest kind's rows or of 4, 2 or 1: a is rows × k, b is k × its columns.
    a, b, start and c are addresses, a_row to c_row strides in numbers; k is at least 1, rectify a bool."""

    return _tile(narrow=False, listed=False)


@instruction
def slim_tile(
    typingctx: Any,
    rows: Any,
    a: Any,
    a_row: Any,
    a_term: Any,
    b: Any,
    b_term: Any,
    start: Any,
    start_row: Any,
    c: Any,
    c_row: Any,
    k: Any,
    rectify: Any,
) -> Any:
    """As tile, for 16 columns."""

    return _tile(narrow=True, listed=False)


@instruction
def narrow_tile(
    typingctx: Any,
    rows: Any,
    a: Any,
    a_rows: Any,
    a_terms: Any,
    b: Any,
    b_term: Any,
    start: Any,
    start_row: Any,
    c: Any,
    c_row: Any,
    k: Any,
    rectify: Any,
) -> Any:
    """As tile, for 16 columns and for numbers of a that lie anywhere: a_rows and a_terms are the addresses of lists,
    int64, of how many bytes behind a each row and each term begins."""

    return _tile(narrow=True, listed=True)


@instruction
def listed_tile(
    typingctx: Any,
    rows: Any,
    a: Any,
    a_rows: Any,
    a_terms: Any,
    b: Any,
    b_term: Any,
    start: Any,
    start_row: Any,
    c: Any,
    c_row: Any,
    k: Any,
    rectify: Any,
) -> Any:
    """As narrow_tile, for as many columns as tile has."""

    return _tile(narrow=False, listed=True)


@instruction
def tallest_tile(typingctx: Any) -> Any:
    """Rows of the tallest tile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _INT(_size(context)[0])

    return types.intp(), generate


@compiled
def tile_rows(left: int) -> int:
    """Rows of the next tile of a product that has this many rows left to write."""
    tallest = tallest_tile()
    if left < tallest or (left == 8 and tallest == 6):  # two tiles of 4 rows take less time than one of 6 and one of 2
        return 4 if left >= 4 else (2 if left >= 2 else 1)
    return tallest


@instruction
def tile_columns(typingctx: Any) -> Any:
    """Columns of a tile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _INT(WIDTH * _size(context)[1])

    return types.intp(), generate


@compiled
def move_row(of: np.ndarray, to: np.ndarray) -> None:
    """Copy a row, float32 [D], number by number: LLVM turns this into vectors, but not an assignment of arrays."""
    for d in range(len(to)):
        to[d] = of[d]
