"""Convolutions over sparse images, such as MinAtar's: only the cells that are not 0 are multiplied.

The bits are those of lockstep.kernels.convolution. Omitting a product with 0 changes a sum of float32 only if the sum
is -0 or the other factor is not finite. A sum that does not begin with -0 becomes -0 only if a product is rounded to 0,
which does not happen if cells are whole numbers. Cells are visited in the order of the image, so every sum adds its
terms in the same order.

The places of a kernel are stored in a grid with a margin, so that every kernel that covers a cell has a place in the
grid. Places in the margin, whose kernels leave the image, are ignored.

Shape legend: C channels, H and W sides of an image, k cells of a kernel's side, V columns, G = (H+k-1)(W+k-1) places of
the grid.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.instructions import bitcast, scalar
from lockstep.kernels.vectors import WIDTH, add_scaled, address, any_nonzero, load, move, rectify

_SPARSE = 3
"""The least number of cells for each that is not 0 with which visiting only these takes less time."""
_LARGEST, _NEGATIVE_ZERO = np.float32(np.finfo(np.float32).max), np.int32(-(2**31))
_ALL_BUT_SIGN = np.int32(2**31 - 1)
MANY, FRACTIONS = -1, -2
"""Instead of a number of cells: most are not 0; some are closer to 0 than 1."""


@compiled
def ordinary(x: np.ndarray) -> bool:
    """Whether all numbers of x are finite, and none is -0."""
    flat, found = x.reshape(x.size), True
    for i in range(flat.size):
        found &= abs(flat[i]) <= _LARGEST and bitcast(flat[i]) != _NEGATIVE_ZERO
    return found


@compiled
def list_cells(image: int, count: int, cells: np.ndarray) -> int:
    """List the cells of an image that are not 0.

    Args:
        image: the address of `count` cells.
        cells: int64 [count + 1], overwritten.

    Returns:
        How many there are, or MANY, or FRACTIONS.
    """
    found = 0
    for begin in range(0, count, WIDTH):
        end = begin + WIDTH
        if end > count:
            end = count
        elif not any_nonzero(image + 4 * begin):
            continue
        for i in range(begin, end):
            cells[found] = i
            found += (bitcast(load(image + 4 * i)) & _ALL_BUT_SIGN) != 0
    for i in range(found):
        if abs(load(image + 4 * cells[i])) < 1:
            return FRACTIONS
    return found if found * _SPARSE <= count else MANY


@compiled
def cell_places(channels: int, height: int, width: int, kernel: int) -> tuple[np.ndarray, np.ndarray]:
    """For each cell of an image, the first of its channel's weights, and the place of the grid whose kernel begins with
    the cell: int64 [CHW]. The kernels that cover the cell lie before this place, as far as their weights lie behind."""
    count, across, i = channels * height * width, width + kernel - 1, 0
    first, place = np.empty(count, np.int64), np.empty(count, np.int64)
    for c in range(channels):
        for y in range(height):
            begin = (y + kernel - 1) * across + kernel - 1
            for x in range(width):
                first[i], place[i] = c * kernel * kernel, begin + x
                i += 1
    return first, place


@scalar
def _visit(
    x: np.float32, kernel: int, v: int, b: int, b_row: int, b_next: int, to: int, to_row: int, to_next: int
) -> None:
    """For each cell of a kernel, add x times V numbers to V others. b and to are the addresses of both for the first
    cell, b_row to to_next their strides between lines and between cells, in numbers."""
    for line in range(kernel):
        for cell in range(kernel):
            for j in range(0, v, WIDTH):
                at_b, at_to = line * b_row + cell * b_next + j, line * to_row + cell * to_next + j
                add_scaled(x, b + 4 * at_b, to + 4 * at_to)


@compiled
def visit_cells(
    image: int,
    cells: np.ndarray,
    places: tuple[np.ndarray, np.ndarray],
    kernel: int,
    across: int,
    weights: np.ndarray,
    grid: np.ndarray,
    back: bool,
) -> None:
    """Add each cell's products with the weights to the numbers of all places whose kernels cover it. In the backward
    pass, add its products with the gradients by these numbers to the gradients by weights instead.

    Args:
        image: its address.
        cells: those that are not 0.
        places: what cell_places returned.
        across: places of the grid side by side.
        weights: float32 [Ckk, V], or the gradients by them.
        grid: float32 [G, V]: the numbers of all places, or the gradients by them. In the backward pass, the margin must
            be 0.
    """
    v = weights.shape[1]
    first, place = places
    usual = kernel == 3 and v == WIDTH  # LLVM unrolls loops of known lengths
    for i in range(len(cells)):
        cell = cells[i]
        x = load(image + 4 * cell)
        at_weights, at_grid = address(weights) + 4 * v * first[cell], address(grid) + 4 * v * place[cell]
        row, line = v * kernel, -v * across
        if usual and back:
            _visit(x, 3, WIDTH, at_grid, line, -WIDTH, at_weights, 3 * WIDTH, WIDTH)
        elif usual:
            _visit(x, 3, WIDTH, at_weights, 3 * WIDTH, WIDTH, at_grid, line, -WIDTH)
        elif back:
            _visit(x, kernel, v, at_grid, line, -v, at_weights, row, v)
        else:
            _visit(x, kernel, v, at_weights, row, v, at_grid, line, -v)


@compiled
def begin_places(start: np.ndarray, margin: int, across: int, grid: np.ndarray) -> None:
    """Write the same numbers [V] to all places of the grid [G, V] but its margins."""
    v = len(start)
    begin = address(grid) + 4 * v * margin * (across + 1)
    end = address(grid) + 4 * v * (len(grid) - margin * (across + 1))
    for j in range(0, 4 * v, 4 * WIDTH):
        for to in range(begin + j, end, 4 * v):
            move(address(start) + j, to)


@compiled
def take_places(grid: np.ndarray, margin: int, across: int, rectified: bool, out: np.ndarray) -> None:
    """Copy the numbers of the places inside of the grid [G, V] to out [Q, V], perhaps rectified."""
    v, to = out.shape[1], address(out)
    for line in range(margin, len(grid) // across - margin):
        begin = address(grid) + 4 * v * (line * across + margin)
        for b in range(begin, begin + 4 * v * (across - 2 * margin), 4 * WIDTH):
            if rectified:
                rectify(b, to)
            else:
                move(b, to)
            to += 4 * WIDTH


@compiled
def put_places(given: np.ndarray, margin: int, across: int, grid: np.ndarray) -> None:
    """Copy numbers [Q, V] to their places inside of the grid [G, V]."""
    v, b = given.shape[1], address(given)
    for line in range(margin, len(grid) // across - margin):
        begin = address(grid) + 4 * v * (line * across + margin)
        for to in range(begin, begin + 4 * v * (across - 2 * margin), 4 * WIDTH):
            move(b, to)
            b += 4 * WIDTH
