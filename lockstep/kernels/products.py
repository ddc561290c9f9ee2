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


def _tile(rows: int, vectors: int) -> Any:
    """The function that adds a @ b to a tile of so many rows: a is rows × k, b is k × 16 * vectors."""

    def tile(typingctx: Any, a: Any, a_row: Any, a_term: Any, b: Any, b_term: Any, c: Any, c_row: Any, k: Any) -> Any:
        """a, b and c are addresses, the rest are strides in numbers; k is at least 1."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_row, a_term, b, b_term, c, c_row, k = arguments
            columns = [_INT(_BYTES * WIDTH * v) for v in range(vectors)]
            starts = [_place(builder, c, builder.mul(c_row, _INT(r))) for r in range(rows)]
            places = [builder.add(start, column) for start in starts for column in columns]
            before = [_load(builder, place, _ROW) for place in places]
            steps = [_place(builder, _INT(0), builder.mul(a_row, _INT(r))) for r in range(rows)]
            entry, loop, end = (
                builder.block,
                builder.append_basic_block("terms"),
                builder.append_basic_block("stored"),
            )
            builder.branch(loop)
            builder.position_at_end(loop)
            term, at_a, at_b = (builder.phi(_INT) for _ in range(3))
            sums = [builder.phi(_ROW) for _ in places]
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
            for total, place in zip(after, places, strict=True):
                _store(builder, total, place)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return instruction(tile)


_tile6, _tile4, _tile2, _tile1 = (_tile(rows, 1) for rows in (6, 4, 2, 1))
_wide8, _wide4, _wide2, _wide1 = (_tile(rows, 2) for rows in (8, 4, 2, 1))


@instruction
def _has_wide_registers(typingctx: Any) -> Any:
    """Whether the CPU has 32 registers for vectors of 16 numbers: AVX-512."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), has(context, "avx512f"))

    return types.boolean(), generate


@compiled
def _columns(m: int) -> int:
    """Columns of the tiles for a matrix of m columns, or for its last ones."""
    return 2 * WIDTH if m > WIDTH and _has_wide_registers() else WIDTH


@compiled
def _rows(
    a: int, a_row: int, a_term: int, b: int, b_term: int, c: int, c_row: int, n: int, k: int, columns: int
) -> None:
    """Add a @ b to 16 or 32 columns of c."""
    i = 0
    if _has_wide_registers() and columns > WIDTH:
        while i < n:
            at_a, at_c, left = a + 4 * i * a_row, c + 4 * i * c_row, n - i
            if left >= 8:
                _wide8(at_a, a_row, a_term, b, b_term, at_c, c_row, k)
                i += 8
            elif left >= 4:
                _wide4(at_a, a_row, a_term, b, b_term, at_c, c_row, k)
                i += 4
            elif left >= 2:
                _wide2(at_a, a_row, a_term, b, b_term, at_c, c_row, k)
                i += 2
            else:
                _wide1(at_a, a_row, a_term, b, b_term, at_c, c_row, k)
                i += 1
        return
    while i < n:
        at_a, at_c, left = a + 4 * i * a_row, c + 4 * i * c_row, n - i
        if left >= 6 and left != 8:
            for r in range(6, 12):
                _fetch(at_c + 4 * r * c_row)
            _tile6(at_a, a_row, a_term, b, b_term, at_c, c_row, k)
            i += 6
        elif left >= 4:
            _tile4(at_a, a_row, a_term, b, b_term, at_c, c_row, k)
            i += 4
        elif left >= 2:
            _tile2(at_a, a_row, a_term, b, b_term, at_c, c_row, k)
            i += 2
        else:
            _tile1(at_a, a_row, a_term, b, b_term, at_c, c_row, k)
            i += 1


@compiled
def _rows_with(
    a: int, a_row: int, a_term: int, panel: np.ndarray, c: int, c_row: int, sums: np.ndarray, n: int, k: int
) -> None:
    """Add a @ panel [k, columns] to columns of c or, if there are any, to sums [n, columns]. As an argument, an array
    lives until the call ends; its address alone would not keep it alive."""
    columns = panel.shape[1]
    if len(sums):
        _rows(a, a_row, a_term, address(panel), columns, address(sums), columns, n, k, columns)
    else:
        _rows(a, a_row, a_term, address(panel), columns, c, c_row, n, k, columns)


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
    c: int,
    c_row: int,
    n: int,
    k: int,
    m: int,
) -> None:
    """Add a [n, k] @ b [k, m] to c [n, m], term by term.

    Args:
        a, b, c: addresses of float32 matrices.
        a_row, a_term: the strides of a.
        b_term, b_column: the strides of b.
        c_row: the stride between rows of c, whose columns lie together.
    """
    if k == 0:
        return
    direct, width = b_column == 1 and k * m <= _COPIED, _columns(m)
    panel = np.empty((k, width), np.float32)
    whole = m - m % width
    for j in range(0, whole, width):
        if direct:
            _rows(a, a_row, a_term, b + 4 * j, b_term, c + 4 * j, c_row, n, k, width)
        else:
            _copy(b + 4 * j * b_column, b_term, b_column, k, width, panel)
            _fetch_panel(b + 4 * (j + width) * b_column, b_term, b_column, k, width)
            _rows_with(a, a_row, a_term, panel, c + 4 * j, c_row, panel[:0], n, k)
    if whole < m:
        rest = m - whole
        width = _columns(rest)
        panel = np.empty((k, width), np.float32)
        _copy(b + 4 * whole * b_column, b_term, b_column, k, rest, panel)
        sums = np.empty((n, width), np.float32)
        for i in range(n):
            for j in range(width):
                sums[i, j] = load(c + 4 * (i * c_row + whole + j)) if j < rest else np.float32(0)
        _rows_with(a, a_row, a_term, panel, c, c_row, sums, n, k)
        for i in range(n):
            for j in range(rest):
                store(c + 4 * (i * c_row + whole + j), sums[i, j])


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
    """product for each of several matrices; a_next, b_next and c_next are the strides between them."""
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
            n,
            k,
            m,
        )
