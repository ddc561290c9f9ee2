"""Convolutions over small images in float32, as products of matrices with identical bits on every CPU.

The stride is one cell, and there is no padding. In outputs, the channels of a place are adjacent, as
lockstep.models.encoders.ConvNet flattens them. Patches are not copied: lists give the positions of a product's numbers
in the image.

Shape legend: n samples, C channels, H and W sides of an image, Q = (H-k+1)(W-k+1) places of a kernel of k x k cells,
K = Ckk numbers of a patch, in the order of torch's weights (C, k, k), M channels of outputs. V is M rounded up to whole
vectors; the columns behind M are 0.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int64, intp

from lockstep.kernels.cache import apart, compiled
from lockstep.kernels.cells import (
    FRACTIONS,
    MANY,
    begin_places,
    cell_places,
    list_cells,
    ordinary,
    put_places,
    take_places,
    visit_cells,
)
from lockstep.kernels.patches import places
from lockstep.kernels.tiles import narrow_tile, tile_rows
from lockstep.kernels.vectors import WIDTH, add_rows, address, load, store


@compiled
def _lists(channels: int, height: int, width: int, kernel: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the numbers of the first patch [K], and the first numbers of all patches [Q] lie in an image, in bytes."""
    of_patch, first = np.empty(channels * kernel * kernel, np.int64), np.empty(places(height, width, kernel), np.int64)
    for i in range(len(of_patch)):
        c, cell = i // (kernel * kernel), i % (kernel * kernel)
        of_patch[i] = 4 * ((c * height + cell // kernel) * width + cell % kernel)
    across = width - kernel + 1
    for q in range(len(first)):
        first[q] = 4 * (q // across * width + q % across)
    return of_patch, first


@compiled
def _filled(m: int) -> int:
    """V"""
    return (m + WIDTH - 1) // WIDTH * WIDTH


@compiled
def _tiles(
    image: int,
    rows: np.ndarray,
    terms: np.ndarray,
    b: np.ndarray,
    start: np.ndarray,
    start_row: int,
    c: np.ndarray,
    rectify: bool,
) -> None:
    """Write start + a @ b to c [N, V]: rows [N] and terms [T] list where a's numbers lie in the image, b is [T, V].
    start_row is 0 for a start [V], else V."""
    i, v = 0, b.shape[1]
    while i < len(rows):
        height = tile_rows(len(rows) - i)
        for j in range(0, v, WIDTH):
            of_rows, at = address(rows) + 8 * i, 4 * (i * v + j)
            from_b, from_start = address(b) + 4 * j, address(start) + 4 * (i * start_row + j)
            to = address(c) + at
            narrow_tile(
                height, image, of_rows, address(terms), from_b, v, from_start, start_row, to, v, len(terms), rectify, 0
            )
        i += height


@compiled
def _take_columns(of: np.ndarray, count: int, to: np.ndarray) -> None:
    """Copy the first columns of a matrix to those of another one with as many rows."""
    for i in range(len(of)):
        for j in range(count):
            to[i, j] = of[i, j]


@apart(float32[:, :], int64[:], intp, intp, boolean, float32[:, ::1])
def convolve(x: np.ndarray, shape: np.ndarray, weight: int, bias: int, rectify: bool, y: np.ndarray) -> None:
    """Write the convolution of images to y.

    Args:
        x: images, float32 [n, CHW].
        shape: see lockstep.kernels.patches. The kernel moves by one cell.
        weight, bias: the addresses of weights [M, K] and biases [M].
        rectify: write 0 for negative results.
        y: float32 [n, QM].
    """
    kernel, _, channels, height, width, _, brightest = shape
    of_patch, first = _lists(channels, height, width, kernel)
    m, k = y.shape[1] // len(first), len(of_patch)
    v = _filled(m)
    turned, start = np.zeros((k, v), np.float32), np.zeros(v, np.float32)
    for j in range(m):
        start[j] = load(bias + 4 * j)
        for i in range(k):
            turned[i, j] = load(weight + 4 * (j * k + i)) / np.float32(brightest)
    filled = np.empty((len(first) if m < v else 0, v), np.float32)
    skips = ordinary(start) and ordinary(turned)
    margin, across, cell_of = kernel - 1, width + kernel - 1, np.empty(x.shape[1] + 1, np.int64)
    at, grid = cell_places(channels, height, width, kernel), np.zeros(((height + kernel - 1) * across, v), np.float32)
    for i in range(len(x)):
        image, out = address(x[i]), y[i].reshape((len(first), m))
        to = filled if m < v else out
        cells = list_cells(image, x.shape[1], cell_of) if skips else MANY
        if cells >= 0:
            begin_places(start, margin, across, grid)
            visit_cells(image, cell_of[:cells], at, kernel, across, turned, grid, False)
            take_places(grid, margin, across, rectify, to)
        else:
            _tiles(image, first, of_patch, turned, start, 0, to, rectify)
        if m < v:
            _take_columns(filled, m, out)


@apart(float32[:, :], int64[:], float32[:, ::1], boolean, intp, intp)
def convolve_back(
    x: np.ndarray, shape: np.ndarray, by_y: np.ndarray, fresh: bool, by_weight: int, by_bias: int
) -> None:
    """Add the gradients by weights and biases to by_weight and by_bias or, if they are to be fresh, write them: sample
    by sample, given the one by y. Arguments as for convolve."""
    kernel, _, channels, height, width, _, brightest = shape
    assert fresh or brightest == 1
    of_patch, first = _lists(channels, height, width, kernel)
    m, k = by_y.shape[1] // len(first), len(of_patch)
    v = _filled(m)
    turned, total = np.zeros((k, v), np.float32), np.zeros(v, np.float32)
    if not fresh:
        for j in range(m):
            total[j] = load(by_bias + 4 * j)
            for i in range(k):
                turned[i, j] = load(by_weight + 4 * (j * k + i))
    filled, skips = np.zeros((len(first) if m < v else 0, v), np.float32), ordinary(turned)
    margin, across, cell_of = kernel - 1, width + kernel - 1, np.empty(x.shape[1] + 1, np.int64)
    at, grid = cell_places(channels, height, width, kernel), np.zeros(((height + kernel - 1) * across, v), np.float32)
    for i in range(len(x)):
        image, given = address(x[i]), by_y[i].reshape((len(first), m))
        if m < v:
            _take_columns(given, m, filled)
            given = filled
        for j in range(0, v, WIDTH):
            add_rows(len(given), address(given) + 4 * j, v, address(total) + 4 * j)
        cells = list_cells(image, x.shape[1], cell_of) if skips and ordinary(total) else MANY
        skips = skips and cells != FRACTIONS  # whose products may be rounded to -0
        if cells >= 0:
            put_places(given, margin, across, grid)
            visit_cells(image, cell_of[:cells], at, kernel, across, turned, grid, True)
        else:
            _tiles(image, of_patch, first, given, turned, v, turned, False)
    for j in range(m):
        store(by_bias + 4 * j, total[j])
        for i in range(k):
            store(by_weight + 4 * (j * k + i), turned[i, j] / np.float32(brightest))
