"""Products of matrices in float32, with equal bits on every CPU.

Every number of a product adds its terms one by one, the first one first. Each is multiplied and added with a single
rounding (`fma`). Only sums of different numbers advance together: a tile of rows and columns stays in the CPU's vector
registers while it goes through all terms. Its size depends on how many registers there are, which changes no bit.

Matrices are given by the address of their first number and by strides in numbers, so that a transposed matrix needs no
copy and every layout shares one compiled function.

Shape legend: n rows and m columns of a product, k terms of each of its numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lockstep.kernels.cache import compiled
from lockstep.kernels.instructions import fused, has, instruction

WIDTH = 16
"""Numbers of a vector. LLVM cuts it into what the CPU has."""
_BYTES = 4
_FLOAT, _INT, _INDEX = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_BYTE = ir.IntType(8).as_pointer()
_ROW = ir.VectorType(_FLOAT, WIDTH)
_COPIED = 4096
"""Numbers of the right-hand matrix from which it is copied, so that what a tile reads lies together in the cache."""


def _place(builder: Any, address: Any, numbers: Any) -> Any:
    return builder.add(address, builder.mul(numbers, _INT(_BYTES)))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    found = builder.load(builder.inttoptr(address, kind.as_pointer()))
    found.align = _BYTES
    return found


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = _BYTES


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
        _store(builder, arguments[1], arguments[0])
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
def _move(typingctx: Any, b: Any, out: Any) -> Any:
    """Copy 16 numbers from an address to another one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(builder, _load(builder, arguments[0], _ROW), arguments[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@instruction
def _fetch(typingctx: Any, address: Any) -> Any:
    """Begin to move what lies at an address into the cache. It may lie outside of memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE, _INDEX, _INDEX, _INDEX])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE], kind)
        to_read, keep, data = _INDEX(0), _INDEX(2), _INDEX(1)
        builder.call(prefetch, [builder.inttoptr(arguments[0], _BYTE), to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.intp), generate


_EDGE = 8
"""Rows and columns of a square that _turn transposes."""


@instruction
def _turn(typingctx: Any, b: Any, b_row: Any, out: Any, out_row: Any) -> Any:
    """Write the transposed square at an address to another one; the rows of both are strides in numbers apart."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        b, b_row, out, out_row = arguments
        kind = ir.VectorType(_FLOAT, _EDGE)
        rows = [_load(builder, _place(builder, b, builder.mul(b_row, _INT(i))), kind) for i in range(_EDGE)]
        for far in (1, 2, 4):  # swap what lies this far off the diagonal, within squares of twice the size
            upper = [lane + (_EDGE - far) * bool(lane & far) for lane in range(_EDGE)]
            lower = [lane + (_EDGE if lane & far else far) for lane in range(_EDGE)]
            masks = [ir.Constant(ir.VectorType(_INDEX, _EDGE), lanes) for lanes in (upper, lower)]
            for i in (i for i in range(_EDGE) if not i & far):
                pair = rows[i], rows[i + far]
                rows[i], rows[i + far] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        for i, row in enumerate(rows):
            _store(builder, row, _place(builder, out, builder.mul(out_row, _INT(i))))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


def _terms(context: Any, builder: Any, rows: int, vectors: int, arguments: Any) -> None:
    """Write the loop over the terms of a tile of rows × 16 * vectors numbers: c = start + a @ b, perhaps rectified."""
    a, a_row, a_term, b, b_term, start, start_row, c, c_row, k, rectify = arguments
    columns = [_INT(_BYTES * WIDTH * v) for v in range(vectors)]

    def places(first: Any, row: Any) -> list[Any]:
        begins = [_place(builder, first, builder.mul(row, _INT(r))) for r in range(rows)]
        return [builder.add(begin, column) for begin in begins for column in columns]

    before, to = [_load(builder, place, _ROW) for place in places(start, start_row)], places(c, c_row)
    steps = [_place(builder, _INT(0), builder.mul(a_row, _INT(r))) for r in range(rows)]
    entry, loop, end = (builder.block, builder.append_basic_block("terms"), builder.append_basic_block("stored"))
    builder.branch(loop)
    builder.position_at_end(loop)
    term, at_a, at_b = (builder.phi(_INT) for _ in range(3))
    sums = [builder.phi(_ROW) for _ in to]
    of_b = [_load(builder, builder.add(at_b, column), _ROW) for column in columns]
    after = []
    for r, step in enumerate(steps):
        number = _load(builder, builder.add(at_a, step), _FLOAT)
        single = builder.insert_element(ir.Constant(_ROW, ir.Undefined), number, _INDEX(0))
        mask = ir.Constant(ir.VectorType(_INDEX, WIDTH), [0] * WIDTH)
        spread = builder.shuffle_vector(single, ir.Constant(_ROW, ir.Undefined), mask)
        totals = sums[r * vectors : (r + 1) * vectors]
        after += [fused(context, builder, spread, x, total) for x, total in zip(of_b, totals, strict=True)]
    following = builder.add(term, _INT(1))
    advanced = (following, _place(builder, at_a, a_term), _place(builder, at_b, b_term), *after)
    for phi, first, then in zip((term, at_a, at_b, *sums), (_INT(0), a, b, *before), advanced, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", following, k), loop, end)
    builder.position_at_end(end)
    zero = ir.Constant(_ROW, [0.0] * WIDTH)
    for total, place in zip(after, to, strict=True):
        above = builder.fcmp_unordered(">=", total, zero)  # or NaN, which stays
        rectified = builder.fadd(builder.select(above, total, zero), zero)  # without -0
        _store(builder, builder.select(rectify, rectified, total), place)


def _size(context: Any) -> tuple[int, int]:
    """Rows and vectors of the tallest tile: with AVX-512, a CPU has 32 registers for vectors of 16 numbers."""
    return (8, 2) if has(context, "avx512f") else (6, 1)


@instruction
def _tile(
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

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tallest, vectors = _size(context)
        done = builder.append_basic_block("done")
        switch = builder.switch(arguments[0], done)
        for height in (tallest, 4, 2, 1):
            block = builder.append_basic_block(f"rows{height}")
            switch.add_case(_INT(height), block)
            builder.position_at_end(block)
            _terms(context, builder, height, vectors, arguments[1:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 11, types.boolean), generate


@instruction
def _tallest(typingctx: Any) -> Any:
    """Rows of the tallest tile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _INT(_size(context)[0])

    return types.intp(), generate


@instruction
def _columns(typingctx: Any) -> Any:
    """Columns of a tile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _INT(WIDTH * _size(context)[1])

    return types.intp(), generate


@compiled
def _rows(
    a: int,
    a_row: int,
    a_term: int,
    b: int,
    b_term: int,
    start: int,
    start_row: int,
    c: int,
    c_row: int,
    n: int,
    k: int,
    rectify: bool,
    panel: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Write start + a @ b to a tile's columns of c. panel and sums, where some of them may lie, are arguments because
    an array lives until the call ends; its address alone would not keep it alive."""
    i = 0
    while i < n:
        left, rows = n - i, _tallest()
        at_a, at_start, at_c = a + 4 * i * a_row, start + 4 * i * start_row, c + 4 * i * c_row
        if left < rows or (left == 8 and rows == 6):
            rows = 4 if left >= 4 else (2 if left >= 2 else 1)
        else:
            for r in range(rows, 2 * rows):
                _fetch(at_c + 4 * r * c_row)
        _tile(rows, at_a, a_row, a_term, b, b_term, at_start, start_row, at_c, c_row, k, rectify)
        i += rows


@compiled
def _copy(b: int, b_term: int, b_column: int, k: int, columns: int, panel: np.ndarray) -> None:
    """Copy some columns of b into panel [k, its columns], whose other columns are 0."""
    width = panel.shape[1]
    if columns < width:
        panel[:] = 0
    if b_column == 1 and columns == width:
        for p in range(k):
            for j in range(0, width, WIDTH):
                _move(b + 4 * (p * b_term + j), address(panel) + 4 * (p * width + j))
        return
    squares = k - k % _EDGE if b_term == 1 and columns == width else 0
    for p in range(0, squares, _EDGE):
        for j in range(0, width, _EDGE):
            _turn(b + 4 * (p + j * b_column), b_column, address(panel) + 4 * (p * width + j), width)
    for p in range(squares, k):
        for j in range(columns):
            panel[p, j] = load(b + 4 * (p * b_term + j * b_column))


@compiled
def _fetch_panel(b: int, b_term: int, b_column: int, k: int, columns: int) -> None:
    """Begin to move columns of b [k, columns] into the cache."""
    if b_column == 1:
        for p in range(k):
            for j in range(0, columns, WIDTH):
                _fetch(b + 4 * (p * b_term + j))
    else:
        for j in range(columns):
            for p in range(0, k, WIDTH):
                _fetch(b + 4 * (j * b_column + p * b_term))


@compiled
def product(
    a: int,
    a_row: int,
    a_term: int,
    b: int,
    b_term: int,
    b_column: int,
    start: int,
    start_row: int,
    c: int,
    c_row: int,
    n: int,
    k: int,
    m: int,
    rectify: bool,
) -> None:
    """Write start [n, m] + a [n, k] @ b [k, m] to c [n, m], term by term.

    Args:
        a, b, start, c: addresses of float32 matrices. start may be c, or lie elsewhere.
        a_row, a_term: the strides of a.
        b_term, b_column: the strides of b.
        start_row, c_row: the strides between rows of start and c, whose columns lie together. A start_row of 0 begins
            every row with the same numbers, such as biases.
        rectify: write 0 for negative results, if k is not 0.
    """
    turns = m == 1 and c_row == 1
    if k == 0 or turns:
        for i in range(n):
            for j in range(m):
                store(c + 4 * (i * c_row + j), load(start + 4 * (i * start_row + j)))
    if k == 0:
        return
    if turns:  # a column is computed as a row, which fills the tile
        a, a_row, a_term, b, b_term, b_column = b, b_column, b_term, a, a_term, a_row
        start, start_row, c_row, n, m = c, n, n, 1, n
    width, direct = _columns(), b_column == 1 and k * m <= _COPIED
    panel = np.empty((k, width), np.float32)
    sums = np.zeros((n if m % width else 0, width), np.float32)  # for columns that fill no tile
    for j in range(0, m, width):
        columns = min(width, m - j)
        at_b, between, first, first_row, to, to_row = b + 4 * j, b_term, start + 4 * j, start_row, c + 4 * j, c_row
        if columns < width or not direct:
            _copy(b + 4 * j * b_column, b_term, b_column, k, columns, panel)
            at_b, between = address(panel), width
        if j + 2 * width <= m and not direct:
            _fetch_panel(b + 4 * (j + width) * b_column, b_term, b_column, k, width)
        if columns < width:
            for i in range(n):
                for rest in range(columns):
                    sums[i, rest] = load(first + 4 * (i * first_row + rest))
            first, first_row, to, to_row = address(sums), width, address(sums), width
        _rows(a, a_row, a_term, at_b, between, first, first_row, to, to_row, n, k, rectify, panel, sums)
        if columns < width:
            for i in range(n):
                for rest in range(columns):
                    store(c + 4 * (i * c_row + j + rest), sums[i, rest])


@compiled
def products(
    count: int,
    a: int,
    a_next: int,
    a_row: int,
    a_term: int,
    b: int,
    b_next: int,
    b_term: int,
    b_column: int,
    c: int,
    c_next: int,
    c_row: int,
    n: int,
    k: int,
    m: int,
) -> None:
    """Add a @ b to c, for each of several matrices; a_next, b_next and c_next are the strides between them."""
    for i in range(count):
        product(
            a + 4 * i * a_next,
            a_row,
            a_term,
            b + 4 * i * b_next,
            b_term,
            b_column,
            c + 4 * i * c_next,
            c_row,
            c + 4 * i * c_next,
            c_row,
            n,
            k,
            m,
            False,
        )
