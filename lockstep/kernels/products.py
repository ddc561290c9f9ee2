"""Products of matrices in float32, with identical bits on every CPU.

Every number of a product adds its terms one by one, in order. Each term is multiplied and added with a single rounding
(`fma`). Only the sums of different numbers are computed at the same time, in tiles (lockstep.kernels.tiles).

Matrices are given by the address of their first number and by strides in numbers, so that a transposed matrix needs no
copy and every layout shares one compiled function.

Shape legend: n rows and m columns of a product, k terms of each of its numbers.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, intp

from lockstep.kernels.cache import apart, compiled
from lockstep.kernels.tiles import slim_tile, tallest_tile, tile, tile_columns, tile_rows
from lockstep.kernels.vectors import EDGE, WIDTH, address, fetch, load, move, plus, store, turn

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
def _rows(
    slices: int,
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
    m: int,
    rectify: bool,
    parts: int,
) -> None:
    """Write start + a @ b to c, whose columns fill tiles, or the tree's sum over slices of k terms. The sums of two
    slices each are written to the address `parts` first."""
    i, width = 0, tile_columns()
    while i < n:
        rows = tile_rows(n - i)
        if rows == tallest_tile() and m == width:
            for r in range(i + rows, i + 2 * rows):
                fetch(c + 4 * r * c_row)
        for j in range(0, m, width):
            from_a, from_b = a + 4 * i * a_row, b + 4 * j
            at_start, at_c = start + 4 * (i * start_row + j), c + 4 * (i * c_row + j)
            for s in range(slices):  # one call, since LLVM would copy the tile's code for another
                to, to_row = parts + 4 * (s // 2) * rows * width, width
                left = to if s % 2 else 0
                if s + 1 == slices <= 2:
                    to, to_row = at_c, c_row
                of_a = from_a + 4 * s * k * a_term, a_row, a_term
                of_b = from_b + 4 * s * k * b_term, b_term
                tile(rows, *of_a, *of_b, at_start, start_row, to, to_row, k, rectify, left)
            if slices > 2:
                _join(slices // 2, rows, parts, width, at_c, c_row)
        i += rows


@compiled
def _copy(b: int, b_term: int, b_column: int, k: int, columns: int, panel: int) -> None:
    """Copy some columns of b to a panel, [k, a tile's columns], whose other columns are 0."""
    width = tile_columns()
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
def _fetch_panel(b: int, b_term: int, b_column: int, k: int, columns: int) -> None:
    """Begin to move columns of b [k, columns] into the cache."""
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
    slices: int,
    a: int,
    a_row: int,
    a_term: int,
    b: int,
    b_term: int,
    columns: int,
    start: int,
    start_row: int,
    c: int,
    c_row: int,
    n: int,
    k: int,
    rectify: bool,
    sums: int,
    parts: int,
) -> None:
    """As _rows, for a tile's columns or fewer, which are computed at the address `sums`, [n, a tile's columns]."""
    width = tile_columns()
    first, first_row, to, to_row = start, start_row, c, c_row
    if columns < width:
        for i in range(n):
            for j in range(width):
                found = load(start + 4 * (i * start_row + j)) if j < columns else _ZERO
                store(sums + 4 * (i * width + j), found)
        first, first_row, to, to_row = sums, width, sums, width
    _rows(slices, a, a_row, a_term, b, b_term, first, first_row, to, to_row, n, k, width, rectify, parts)
    if columns < width:
        for i in range(n):
            for j in range(columns):
                store(c + 4 * (i * c_row + j), load(sums + 4 * (i * width + j)))


@compiled
def _turn(x: int, x_row: int, n: int, m: int, out: int, out_row: int) -> None:
    """Copy x [n, m] to out [m, n]. In both, the numbers of a row are adjacent."""
    for i in range(n):
        for j in range(m):
            store(out + 4 * (j * out_row + i), load(x + 4 * (i * x_row + j)))


@compiled
def _slim(
    a: int, a_row: int, b: int, b_column: int, start: int, start_row: int, c: int, c_row: int, k: int, m: int, rec: bool
) -> None:
    """Write 16 rows of start + a @ b as the columns of slim tiles, so that b need not be copied. The terms of a and
    those of b lie together. Arguments are those of product; rec is rectify."""
    memory = np.empty((k + m + 1) * WIDTH, np.float32)
    panel = address(memory) + -address(memory) % _LINE
    sums, squares = panel + 4 * k * WIDTH, k - k % EDGE
    for p in range(0, squares, EDGE):
        for i in range(0, WIDTH, EDGE):
            turn(a + 4 * (i * a_row + p), a_row, panel + 4 * (p * WIDTH + i), WIDTH)
    _turn(a + 4 * squares, a_row, WIDTH, k - squares, panel + 4 * squares * WIDTH, WIDTH)
    _turn(start, start_row, WIDTH, m, sums, WIDTH)
    j = 0
    while j < m:
        rows, to = tile_rows(m - j), sums + 4 * j * WIDTH
        slim_tile(rows, b + 4 * j * b_column, b_column, 1, panel, WIDTH, to, WIDTH, to, WIDTH, k, rec, 0)
        j += rows
    _turn(sums, WIDTH, m, WIDTH, c, c_row)
    hold(memory)


@apart(*[intp] * 14, boolean)
def product(
    slices: int,
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
    """Write start [n, m] + a [n, k] @ b [k, m] to c [n, m], term by term. Of several slices of terms, write the tree's
    sum over such products: a is [n, slices * k], b is [slices * k, m], and each product begins with start.

    Args:
        slices: how many, a power of two. If there are several, start may not be c, and rectify is False.
        a, b, start, c: addresses of float32 matrices. start may be c, or lie elsewhere.
        a_row, a_term: the strides of a.
        b_term, b_column: the strides of b.
        start_row, c_row: the strides between rows of start and c; the numbers of a row are adjacent. A start_row of 0
            begins every row with the same numbers, such as biases.
        rectify: write 0 for negative results, if k is not 0.
    """
    if k == 0:
        for i in range(n):
            for j in range(m):
                store(c + 4 * (i * c_row + j), load(start + 4 * (i * start_row + j)))
        return
    width, terms = tile_columns(), slices * k
    # Few columns are computed as rows, which fill tiles. So are many that would be copied for few rows.
    few = b_column > b_term == 1 and n <= _FEW and 4 * n <= m
    if few and n == WIDTH < width and slices == a_term == 1:
        _slim(a, a_row, b, b_column, start, start_row, c, c_row, k, m, rectify)
        return
    turns = (m < n and 2 * m <= width) or (few and n % width == 0)
    if turns:
        a, a_row, a_term, b, b_term, b_column, n, m = b, b_column, b_term, a, a_term, a_row, m, n
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
    of, of_row, to, to_row = start, start_row, c, c_row
    if wide:  # rows are read and written from their first number to the last one, and the cache holds those of a block
        for p in range(0, k, _BLOCK):
            of_block, at_last = min(_BLOCK, k - p), rectify and p + _BLOCK >= k
            of_a, of_b = (a + 4 * p * a_term, a_row, a_term), (b + 4 * p * b_term, b_term)
            _rows(slices, *of_a, *of_b, of, of_row, c, c_row, n, of_block, m, at_last, parts)
            of, of_row = c, c_row
        hold(memory)
        return
    if turns:
        of = to = panel + 4 * (copied + cut + joined)
        of_row = to_row = m
        _turn(start, start_row, m, n, of, m)
    for j in range(0, m, width):
        columns = min(width, m - j)
        at_b, between = b + 4 * j, b_term
        if columns < width or not direct:
            _copy(b + 4 * j * b_column, b_term, b_column, terms, columns, panel)
            at_b, between = panel, width
        if j + 2 * width <= m and not direct:
            _fetch_panel(b + 4 * (j + width) * b_column, b_term, b_column, terms, width)
        of_b, at_of, at_to = (at_b, between, columns), of + 4 * j, to + 4 * j
        _columns(slices, a, a_row, a_term, *of_b, at_of, of_row, at_to, to_row, n, k, rectify, sums, parts)
    if turns:
        _turn(to, m, n, m, c, c_row)
    hold(memory)


@apart(*[intp] * 5)
def panels_of(b: int, b_term: int, b_column: int, k: int, m: int) -> np.ndarray:
    """Copy b [k, m] in the order in which tiles read it, for many products: float32 [panels, k, columns of a tile]. Its
    arguments are those of product."""
    width = tile_columns()
    panels = np.empty(((m + width - 1) // width, k, width), np.float32)
    for j in range(0, m, width):
        _copy(b + 4 * j * b_column, b_term, b_column, k, min(width, m - j), address(panels) + 4 * j * k)
    return panels


@apart(intp, intp, float32[:, :, ::1], *[intp] * 6)
def panel_product(
    a: int, a_row: int, panels: np.ndarray, start: int, start_row: int, c: int, c_row: int, n: int, m: int
) -> None:
    """Write start [n, m] + a [n, k] @ b to c [n, m], as product does, given panels_of b. A row of a lies together."""
    _, k, width = panels.shape
    sums = np.empty(n * width if m % width else 0, np.float32)
    for j in range(0, m, width):
        of_b, at_start, at_c = (address(panels) + 4 * j * k, width, min(width, m - j)), start + 4 * j, c + 4 * j
        _columns(1, a, a_row, 1, *of_b, at_start, start_row, at_c, c_row, n, k, False, address(sums), 0)
    hold(sums)


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
            1,
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
