"""Products of matrices in float32, with identical bits on every CPU.

Every number of a product adds its terms one by one, in order. Each term is multiplied and added with a single rounding
(`fma`). Only the sums of different numbers are computed at the same time, in tiles (lockstep.kernels.tiles).

A Matrix is an address and two strides, so that a transposed one needs no copy and every layout shares one compiled
function.

Shape legend: n rows and m columns of a product, k terms of each of its numbers.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, intp, types

from lockstep.kernels.cache import apart, compiled
from lockstep.kernels.tiles import slim_tile, tallest_tile, tile, tile_columns, tile_rows
from lockstep.kernels.vectors import EDGE, WIDTH, address, fetch, load, move, plus, store, turn

Matrix = tuple[int, int, int]
"""The address of a float32 matrix, and its strides between rows and between columns, in numbers."""
Rows = tuple[int, int]
"""A matrix whose numbers of a row are adjacent: its address, and the stride between rows."""
Shape = tuple[int, int, int]
"""n, k and m of a product."""

_COPIED = 4096
"""The most numbers of a right-hand matrix that is read in place. Larger ones are copied, so that the numbers that a
tile reads are adjacent in the cache."""
_FEW = 64
"""The most rows of a product that reads the right-hand matrix several times, because copying it takes longer."""
_BLOCK = 32
"""The most terms of a product that reads the right-hand matrix in place, one row of tiles after the other."""
_LINE = 4 * WIDTH
"""Bytes of a line of the cache."""
_ZERO = np.float32(0)
_MATRIX = _SHAPE = types.UniTuple(intp, 3)
_ROWS = types.UniTuple(intp, 2)


@compiled
def hold(memory: np.ndarray) -> None:
    """Keep an array until here. An address does not keep it alive."""


@compiled
def _join(slices: int, rows: int, parts: int, width: int, c: int, c_row: int) -> None:
    """Write the tree's sum over the slices' tiles, which lie one after the other at parts, to a tile of c."""
    size, far = rows * width, 1
    while 2 * far < slices:
        for left in range(0, slices, 2 * far):
            for place in range(left * size, (left + 1) * size, WIDTH):
                plus(parts + 4 * place, parts + 4 * (place + far * size), parts + 4 * place)
        far *= 2
    for r in range(rows):
        for j in range(0, width, WIDTH):
            place = r * width + j
            plus(parts + 4 * place, parts + 4 * (place + far * size), c + 4 * (r * c_row + j))


@compiled
def _rows(slices: int, a: Matrix, b: Rows, start: Rows, c: Rows, shape: Shape, rectify: bool, parts: int) -> None:
    """Write start + a @ b to c, whose columns fill tiles, or the tree's sum over slices of k terms. The sums of two
    slices each are written to the address `parts` first."""
    (at_a, a_row, a_term), (at_b, b_term), (at_start, start_row), (at_c, c_row) = a, b, start, c
    (n, k, m), i, width = shape, 0, tile_columns()
    while i < n:
        rows = tile_rows(n - i)
        if rows == tallest_tile() and m == width:
            for r in range(i + rows, i + 2 * rows):
                fetch(at_c + 4 * r * c_row)
        for j in range(0, m, width):
            of_start, of_c = at_start + 4 * (i * start_row + j), at_c + 4 * (i * c_row + j)
            for s in range(slices):  # one call, since LLVM would copy the tile's code for another
                to, to_row = parts + 4 * (s // 2) * rows * width, width
                left = to if s % 2 else 0
                if s + 1 == slices <= 2:
                    to, to_row = of_c, c_row
                of_a = at_a + 4 * (i * a_row + s * k * a_term), a_row, a_term
                of_b = at_b + 4 * (j + s * k * b_term), b_term
                tile(rows, *of_a, *of_b, of_start, start_row, to, to_row, k, rectify, left)
            if slices > 2:
                _join(slices // 2, rows, parts, width, of_c, c_row)
        i += rows


@compiled
def _copy(matrix: Matrix, k: int, columns: int, panel: int) -> None:
    """Copy some columns of a matrix b to a panel, [k, a tile's columns], whose other columns are 0."""
    (b, b_term, b_column), width = matrix, tile_columns()
    if b_column == 1 and columns == width:
        for p in range(k):
            for j in range(0, width, WIDTH):
                move(b + 4 * (p * b_term + j), panel + 4 * (p * width + j))
        return
    squares = k - k % EDGE if b_term == 1 and columns == width else 0
    for p in range(0, squares, EDGE):
        for j in range(0, width, EDGE):
            turn(b + 4 * (p + j * b_column), b_column, panel + 4 * (p * width + j), width)
    for p in range(squares, k):
        for j in range(width):
            store(panel + 4 * (p * width + j), load(b + 4 * (p * b_term + j * b_column)) if j < columns else _ZERO)


@compiled
def _fetch_panel(matrix: Matrix, k: int, columns: int) -> None:
    """Begin to move columns of a matrix b [k, columns] into the cache."""
    b, b_term, b_column = matrix
    if b_column == 1:
        for p in range(k):
            for j in range(0, columns, WIDTH):
                fetch(b + 4 * (p * b_term + j))
    else:
        for j in range(columns):
            for p in range(0, k, WIDTH):
                fetch(b + 4 * (j * b_column + p * b_term))


@compiled
def _columns(
    slices: int, a: Matrix, b: Rows, start: Rows, c: Rows, shape: Shape, rectify: bool, sums: int, parts: int
) -> None:
    """As _rows, for m columns of a tile, or all of them, which are computed at the address `sums`, [n, a tile's
    columns]."""
    (n, k, columns), width = shape, tile_columns()
    first, to = start, c
    (at_start, start_row), (at_c, c_row) = start, c
    if columns < width:
        for i in range(n):
            for j in range(width):
                found = load(at_start + 4 * (i * start_row + j)) if j < columns else _ZERO
                store(sums + 4 * (i * width + j), found)
        first = to = sums, width
    _rows(slices, a, b, first, to, (n, k, width), rectify, parts)
    if columns < width:
        for i in range(n):
            for j in range(columns):
                store(at_c + 4 * (i * c_row + j), load(sums + 4 * (i * width + j)))


@compiled
def _transposed(x: Matrix) -> Matrix:
    at, row, column = x
    return at, column, row


@compiled
def _turn(x: int, x_row: int, n: int, m: int, out: int, out_row: int) -> None:
    """Copy x [n, m] to out [m, n]. In both, the numbers of a row are adjacent."""
    for i in range(n):
        for j in range(m):
            store(out + 4 * (j * out_row + i), load(x + 4 * (i * x_row + j)))


@compiled
def _slim(a: Matrix, b: Matrix, start: Rows, c: Rows, k: int, m: int, rectify: bool) -> None:
    """Write 16 rows of start + a @ b as the columns of slim tiles, so that b need not be copied. The terms of a and
    those of b lie together."""
    (at_a, a_row, _), (at_b, _, b_column), (at_start, start_row), (at_c, c_row) = a, b, start, c
    memory = np.empty((k + m + 1) * WIDTH, np.float32)
    panel = address(memory) + -address(memory) % _LINE
    sums, squares = panel + 4 * k * WIDTH, k - k % EDGE
    for p in range(0, squares, EDGE):
        for i in range(0, WIDTH, EDGE):
            turn(at_a + 4 * (i * a_row + p), a_row, panel + 4 * (p * WIDTH + i), WIDTH)
    _turn(at_a + 4 * squares, a_row, WIDTH, k - squares, panel + 4 * squares * WIDTH, WIDTH)
    _turn(at_start, start_row, WIDTH, m, sums, WIDTH)
    j = 0
    while j < m:
        rows, to = tile_rows(m - j), sums + 4 * j * WIDTH
        slim_tile(rows, at_b + 4 * j * b_column, b_column, 1, panel, WIDTH, to, WIDTH, to, WIDTH, k, rectify, 0)
        j += rows
    _turn(sums, WIDTH, m, WIDTH, at_c, c_row)
    hold(memory)


@compiled
def _in_blocks(slices: int, a: Matrix, b: Rows, start: Rows, c: Rows, shape: Shape, rectify: bool, parts: int) -> None:
    """As _rows, block by block of terms: rows are read and written from their first number to the last one, and the
    cache holds those of a block."""
    (at_a, a_row, a_term), (at_b, b_term), (n, k, m), of = a, b, shape, start
    for p in range(0, k, _BLOCK):
        of_a, of_b = (at_a + 4 * p * a_term, a_row, a_term), (at_b + 4 * p * b_term, b_term)
        _rows(slices, of_a, of_b, of, c, (n, min(_BLOCK, k - p), m), rectify and p + _BLOCK >= k, parts)
        of = c


@apart(intp, _MATRIX, _MATRIX, _ROWS, _ROWS, _SHAPE, boolean)
def product(slices: int, a: Matrix, b: Matrix, start: Rows, c: Rows, shape: Shape, rectify: bool) -> None:
    """Write start [n, m] + a [n, k] @ b [k, m] to c [n, m], term by term. Of several slices of terms, write the tree's
    sum over such products: a is [n, slices * k], b is [slices * k, m], and each product begins with start.

    Args:
        slices: how many, a power of two. If there are several, start may not be c, and rectify is False.
        start: c or a matrix elsewhere. A stride of 0 begins every row with the same numbers, such as biases.
        shape: n, k and m.
        rectify: write 0 for negative results, if k is not 0.
    """
    (n, k, m), (at_start, start_row), (at_c, c_row) = shape, start, c
    if k == 0:
        for i in range(n):
            for j in range(m):
                store(at_c + 4 * (i * c_row + j), load(at_start + 4 * (i * start_row + j)))
        return
    (_, _, a_term), (_, b_term, b_column) = a, b
    width, terms = tile_columns(), slices * k
    # Few columns are computed as rows, which fill tiles. So are many that would be copied for few rows.
    few = b_column > b_term == 1 and n <= _FEW and 4 * n <= m
    if few and n == WIDTH < width and slices == a_term == 1:
        _slim(a, b, start, c, k, m, rectify)
        return
    turns = (m < n and 2 * m <= width) or (few and n % width == 0)
    if turns:
        a, b, n, m = _transposed(b), _transposed(a), m, n
    at_b, b_term, b_column = b
    direct = b_column == 1 and (terms * m <= _COPIED or b_term <= 2 * width)
    short = terms <= _BLOCK or (n <= _FEW and slices == 1)
    wide = short and b_column == 1 and m % width == 0 and not (direct or turns)
    turned = n * m if turns else 0
    copied = 0 if wide or (direct and m % width == 0) else terms * width
    cut = n * width if m % width else 0  # columns that fill no tile
    joined = slices * tallest_tile() * width if slices > 1 else 0
    # One array, which only addresses refer to: small products take less time than more arrays, and than counting uses.
    memory = np.empty(copied + cut + joined + turned + WIDTH, np.float32)
    panel = address(memory) + -address(memory) % _LINE  # so that no vector lies in two lines of the cache
    sums, parts = panel + 4 * copied, panel + 4 * (copied + cut)
    if wide:
        _in_blocks(slices, a, (at_b, b_term), start, c, (n, k, m), rectify, parts)
        hold(memory)
        return
    (of, of_row), (to, to_row) = start, c
    if turns:
        of = to = panel + 4 * (copied + cut + joined)
        of_row = to_row = m
        _turn(at_start, start_row, m, n, of, m)
    for j in range(0, m, width):
        columns = min(width, m - j)
        of_b = at_b + 4 * j, b_term
        if columns < width or not direct:
            _copy((at_b + 4 * j * b_column, b_term, b_column), terms, columns, panel)
            of_b = panel, width
        if j + 2 * width <= m and not direct:
            _fetch_panel((at_b + 4 * (j + width) * b_column, b_term, b_column), terms, width)
        _columns(slices, a, of_b, (of + 4 * j, of_row), (to + 4 * j, to_row), (n, k, columns), rectify, sums, parts)
    if turns:
        _turn(to, m, n, m, at_c, c_row)
    hold(memory)


@apart(_MATRIX, intp, intp)
def panels_of(b: Matrix, k: int, m: int) -> np.ndarray:
    """Copy b [k, m] in the order in which tiles read it, for many products: float32 [panels, k, columns of a tile]."""
    (at_b, b_term, b_column), width = b, tile_columns()
    panels = np.empty(((m + width - 1) // width, k, width), np.float32)
    for j in range(0, m, width):
        of_b = at_b + 4 * j * b_column, b_term, b_column
        _copy(of_b, k, min(width, m - j), address(panels) + 4 * j * k)
    return panels


@apart(_ROWS, float32[:, :, ::1], _ROWS, _ROWS, intp, intp)
def panel_product(a: Rows, panels: np.ndarray, start: Rows, c: Rows, n: int, m: int) -> None:
    """Write start [n, m] + a [n, k] @ b to c [n, m], as product does, given panels_of b."""
    (at_a, a_row), (at_start, start_row), (at_c, c_row) = a, start, c
    _, k, width = panels.shape
    sums = np.empty(n * width if m % width else 0, np.float32)
    for j in range(0, m, width):
        of_b, of_start, of_c = (
            (address(panels) + 4 * j * k, width),
            (at_start + 4 * j, start_row),
            (at_c + 4 * j, c_row),
        )
        _columns(1, (at_a, a_row, 1), of_b, of_start, of_c, (n, k, min(width, m - j)), False, address(sums), 0)
    hold(sums)


@compiled
def products(count: int, between: tuple[int, int, int], a: Matrix, b: Matrix, c: Rows, shape: Shape) -> None:
    """Add a @ b to c, for each of several matrices; between: how far apart the matrices a, b and c are, in numbers."""
    (a_next, b_next, c_next), (at_a, a_row, a_term), (at_b, b_term, b_column), (at_c, c_row) = between, a, b, c
    for i in range(count):
        to = at_c + 4 * i * c_next, c_row
        of_a, of_b = (at_a + 4 * i * a_next, a_row, a_term), (at_b + 4 * i * b_next, b_term, b_column)
        product(1, of_a, of_b, to, to, shape, False)
