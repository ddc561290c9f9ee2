"""Tiles: the inner loop of products of matrices, written for LLVM directly.

A tile is a block of rows and columns of a product. It stays in the CPU's vector registers until all terms are added.
Its size depends on the number of registers and changes no bit. Matrices are given by the address of their first number
and by strides in numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from lockstep.kernels.cache import compiled
from lockstep.kernels.instructions import fused, has, instruction
from lockstep.kernels.vectors import (
    BYTES,
    FLOAT,
    INT,
    WIDTH,
    beyond,
    put_vector,
    rectified,
    spread,
    value_at,
    vector_at,
)

_LISTED = 8
"""Bytes of a place in a list."""


def _terms(context: Any, builder: Any, rows: int, vectors: int, arguments: Any, *, listed: bool) -> None:
    """Write the loop over the terms of a tile of rows × 16 * vectors numbers: c = start + a @ b, perhaps rectified.

    Args:
        listed: a's strides are addresses of lists, int64, of how many bytes behind a each row and each term begins.
    """
    a, a_row, a_term, b, b_term, start, start_row, c, c_row, k, rectify, added = arguments
    columns = [INT(BYTES * WIDTH * v) for v in range(vectors)]

    def places(first: Any, row: Any) -> list[Any]:
        begins = [beyond(builder, first, builder.mul(row, INT(r))) for r in range(rows)]
        return [builder.add(begin, column) for begin in begins for column in columns]

    before, to = [vector_at(builder, place) for place in places(start, start_row)], places(c, c_row)
    if listed:
        steps = [value_at(builder, builder.add(a_row, INT(_LISTED * r)), INT) for r in range(rows)]
    else:
        steps = [beyond(builder, INT(0), builder.mul(a_row, INT(r))) for r in range(rows)]
    entry, loop, end = (builder.block, builder.append_basic_block("terms"), builder.append_basic_block("stored"))
    builder.branch(loop)
    builder.position_at_end(loop)
    term, at_a, at_b = (builder.phi(INT) for _ in range(3))
    sums = [builder.phi(ir.VectorType(FLOAT, WIDTH)) for _ in to]
    of_b = [vector_at(builder, builder.add(at_b, column)) for column in columns]
    from_a = builder.add(a, value_at(builder, at_a, INT)) if listed else at_a
    after = []
    for r, step in enumerate(steps):
        factor = spread(builder, value_at(builder, builder.add(from_a, step), FLOAT))
        totals = sums[r * vectors : (r + 1) * vectors]
        after += [fused(context, builder, factor, x, total) for x, total in zip(of_b, totals, strict=True)]
    following = builder.add(term, INT(1))
    next_a = builder.add(at_a, INT(_LISTED)) if listed else beyond(builder, at_a, a_term)
    begins = (INT(0), a_term if listed else a, b, *before)
    advanced = (following, next_a, beyond(builder, at_b, b_term), *after)
    for phi, first, then in zip((term, at_a, at_b, *sums), begins, advanced, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", following, k), loop, end)
    builder.position_at_end(end)
    with builder.if_else(rectify) as (yes, no):  # a choice of each number would take as long as eight terms
        with yes:
            for total, place in zip(after, to, strict=True):
                put_vector(builder, rectified(builder, total), place)
        with no, builder.if_else(builder.icmp_signed("!=", added, INT(0))) as (joins, alone):
            with joins:
                rows_of_added = places(added, INT(WIDTH * vectors))
                for total, place, left in zip(after, to, rows_of_added, strict=True):
                    put_vector(builder, builder.fadd(vector_at(builder, left), total), place)
            with alone:
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
        switch.add_case(INT(height), block)
        builder.position_at_end(block)
        write(height, arguments[1:])
        builder.branch(done)
    builder.position_at_end(done)


def _tile(*, narrow: bool, listed: bool) -> Any:
    """An instruction that writes a tile.

    Args:
        narrow: whether it has the columns of one vector.
        listed: whether a's numbers lie anywhere.
    """

    def typed(
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
        added: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vectors = 1 if narrow else _size(context)[1]

            def write(height: int, given: Any) -> None:
                _terms(context, builder, height, vectors, given, listed=listed)

            _of_heights(context, builder, arguments, write)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 11, types.boolean, types.intp), generate

    return instruction(typed)


tile = _tile(narrow=False, listed=False)
"""Write start + a @ b to a tile of the tallest kind's rows or of 4, 2 or 1: a is rows × k, b is k × its columns. a, b,
start and c are addresses, a_row to c_row strides in numbers; k is at least 1, rectify a bool. Without rectify, the tile
at the address `added` is added to the result, if that is not 0; its rows lie together."""
slim_tile = _tile(narrow=True, listed=False)
"""As tile, for 16 columns."""
narrow_tile = _tile(narrow=True, listed=True)
"""As slim_tile, for numbers of a that lie anywhere: a_row and a_term are the addresses of lists, int64, of how many
bytes behind a each row and each term begins."""
listed_tile = _tile(narrow=False, listed=True)
"""As narrow_tile, for as many columns as tile has."""


@instruction
def tallest_tile(typingctx: Any) -> Any:
    """Rows of the tallest tile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return INT(_size(context)[0])

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
        return INT(WIDTH * _size(context)[1])

    return types.intp(), generate
