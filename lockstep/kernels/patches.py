"""Convolutions with strides, or over the outputs of another layer, in float32 with identical bits on every CPU.

Patches may overlap and are not copied: lists give the positions of a product's numbers in images. In a layer's outputs,
the channels of a place are adjacent.

Shape legend: n samples, C channels, H and W sides of an image, Q places of a kernel of k x k cells, K = Ckk numbers of
a patch, in the order of torch's weights (C, k, k), M channels of outputs, which fill tiles.

A shape, int64 [7], is k, the stride, C, H, W, the side of a block, and the divisor of weights and of their gradients,
as in PixelConv2d of lockstep.models.layers. If a block has several cells, sums take the numbers of a patch in the order
of fold_kernel there. For images that another layer computed, the last two are 1.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int64, intp

from lockstep.kernels.cache import apart, compiled
from lockstep.kernels.products import hold, panels_of, product
from lockstep.kernels.tiles import listed_tile, tile_columns, tile_rows
from lockstep.kernels.vectors import EDGE, address, load, plus, store, turn
from lockstep.kernels.vectors import WIDTH as VECTOR

_TOGETHER = 256
"""How many places gradients take at once, so that their numbers stay in the cache."""


@compiled
def places(height: int, width: int, kernel: int, stride: int = 1) -> int:
    """Q"""
    return ((height - kernel) // stride + 1) * ((width - kernel) // stride + 1)


@compiled
def _of_patch(shape: np.ndarray, planes: bool) -> np.ndarray:
    """How many bytes behind its place each number of a patch lies, int64 [K]. planes: images are [C, H, W] instead of
    [H, W, C]."""
    kernel, _, channels, height, width, _, _ = shape
    found = np.empty(channels * kernel * kernel, np.int64)
    for i in range(len(found)):
        c, cell = i // (kernel * kernel), i // kernel % kernel * width + i % kernel
        found[i] = 4 * (c * height * width + cell if planes else cell * channels + c)
    return found


@compiled
def _order(shape: np.ndarray) -> np.ndarray:
    """The order in which sums take the numbers of a patch, int64 [K]."""
    kernel, _, channels, _, _, block, _ = shape
    across, i = kernel // block, 0
    found = np.empty(channels * kernel * kernel, np.int64)
    for outer in range(channels * block * block):
        c, above, before = outer // (block * block), outer // block % block, outer % block
        for inner in range(across * across):
            row, column = inner // across * block + above, inner % across * block + before
            found[i] = (c * kernel + row) * kernel + column
            i += 1
    return found


@compiled
def _places(shape: np.ndarray, planes: bool, samples: int, between: int) -> np.ndarray:
    """How many bytes behind the first sample each place lies, int64 [nQ]. between: bytes between samples."""
    kernel, stride, channels, height, width, _, _ = shape
    across, each = (width - kernel) // stride + 1, places(height, width, kernel, stride)
    found, cell = np.empty(samples * each, np.int64), 4 if planes else 4 * channels
    for i in range(samples):
        for q in range(each):
            found[i * each + q] = i * between + cell * stride * (q // across * width + q % across)
    return found


@compiled
def _tiles(
    images: int,
    rows: np.ndarray,
    terms: np.ndarray,
    b: np.ndarray,
    b_term: int,
    b_next: int,
    start: int,
    start_row: int,
    c: np.ndarray,
    rectify: bool,
) -> None:
    """Write start + a @ b to c [n, m]: rows [n] and terms [k] list where a's numbers lie in images. b_term is the
    stride between b's terms, b_next that between its parts that are as wide as a tile."""
    (n, m), width = c.shape, tile_columns()
    for j in range(0, m, width):
        i, from_b = 0, address(b) + 4 * (j // width) * b_next
        while i < n:
            height, at_rows = tile_rows(n - i), address(rows) + 8 * i
            from_start, to = start + 4 * (i * start_row + j), address(c) + 4 * (i * m + j)
            listed_tile(
                *(height, images, at_rows, address(terms), from_b, b_term),
                *(from_start, start_row, to, m, len(terms), rectify, 0),
            )
            i += height


@compiled
def _turn(b: int, b_row: int, rows: int, columns: int, out: int, out_row: int) -> None:
    """Write the transposed matrix [rows, columns] at an address to another one. The last squares may overlap others."""
    if rows < EDGE or columns < EDGE:
        for i in range(rows):
            for j in range(columns):
                store(out + 4 * (j * out_row + i), load(b + 4 * (i * b_row + j)))
        return
    for above in range(0, rows, EDGE):
        for before in range(0, columns, EDGE):
            i, j = min(above, rows - EDGE), min(before, columns - EDGE)
            turn(b + 4 * (i * b_row + j), b_row, out + 4 * (j * out_row + i), out_row)


@compiled
def _turn_each(b: int, count: int, rows: int, columns: int, out: int) -> None:
    """Write several transposed matrices [rows, columns] at an address to another one."""
    for i in range(count):
        begin = 4 * i * rows * columns
        _turn(b + begin, columns, rows, columns, out + begin, rows)


@compiled
def _of_pixels(weight: int, order: np.ndarray, brightest: int, outputs: int) -> np.ndarray:
    """Weights [M, K] in the order in which sums take them, divided."""
    k = len(order)
    found = np.empty((outputs, k), np.float32)
    for j in range(outputs):
        for i in range(k):
            found[j, i] = load(weight + 4 * (j * k + order[i])) / np.float32(brightest)
    return found


@compiled
def _panels(weights: np.ndarray) -> np.ndarray:
    """Weights [M, K] as tiles read them. This is a function because an argument keeps its array alive, and an address
    does not."""
    m, k = weights.shape
    return panels_of((address(weights), 1, k), k, m)


@apart(float32[:, :], int64[:], boolean, intp, intp, boolean, float32[:, ::1])
def convolve_patches(
    x: np.ndarray, shape: np.ndarray, planes: bool, weight: int, bias: int, rectify: bool, y: np.ndarray
) -> None:
    """Write the convolution of images to y.

    Args:
        x: images, float32 [n, CHW] if planes, else [n, HWC].
        weight, bias: the addresses of weights [M, K] and biases [M].
        rectify: write 0 for negative results.
        y: float32 [n, QM].
    """
    order, where = _order(shape), _places(shape, planes, len(x), x.strides[0])
    k, m = len(order), y.size // len(where)
    assert m % tile_columns() == 0
    panels = _panels(_of_pixels(weight, order, shape[6], m)) if planes else panels_of((weight, 1, k), k, m)
    terms, width = _of_patch(shape, planes)[order], tile_columns()
    _tiles(address(x), where, terms, panels, width, k * width, bias, 0, y.reshape((len(where), m)), rectify)


@apart(float32[:, :], int64[:], boolean, float32[:, ::1], boolean, intp)
def convolve_patches_back(
    x: np.ndarray, shape: np.ndarray, planes: bool, by_y: np.ndarray, fresh: bool, by_weight: int
) -> None:
    """Given the gradient by y, add that by weights to by_weight sample by sample, or write it if it is to be fresh.
    Other arguments are those of convolve_patches."""
    of_patch, each = _of_patch(shape, planes), places(shape[3], shape[4], shape[0], shape[1])
    k, m, together = len(of_patch), by_y.shape[1] // each, max(1, _TOGETHER // each)
    channels = k if planes else shape[2]
    cells = k // channels
    of_patch = of_patch.reshape((channels, cells)).transpose().copy().reshape(k)  # a tile's rows should lie together
    turned, weights = np.zeros((k, m), np.float32), np.empty((m, k), np.float32)
    if not fresh:
        _turn_each(by_weight, m, channels, cells, address(weights))
        _turn(address(weights), k, m, k, address(turned), m)
    where = _places(shape, planes, min(together, len(x)), x.strides[0])
    for i in range(0, len(x), together):
        given, to = by_y[i : i + together], address(turned)
        _tiles(
            *(address(x) + i * x.strides[0], of_patch, where[: len(given) * each]),
            *(given, m, tile_columns(), to, m, turned, False),
        )
    if shape[6] != 1:
        assert fresh
        turned /= np.float32(shape[6])
    _turn(address(turned), m, k, m, address(weights), k)
    _turn_each(address(weights), m, cells, channels, by_weight)
    hold(turned)
    hold(weights)


@compiled
def _add(b: int, count: int, out: int) -> None:
    """Add numbers at an address to those at another one."""
    whole = count - count % VECTOR
    for j in range(0, whole, VECTOR):
        plus(out + 4 * j, b + 4 * j, out + 4 * j)
    for j in range(whole, count):
        store(out + 4 * j, load(out + 4 * j) + load(b + 4 * j))


@compiled
def _paste(by_y: np.ndarray, weights: np.ndarray, zeros: np.ndarray, where: np.ndarray, to: int) -> None:
    """Add one cell of all patches to images that begin at an address: the product of gradients by outputs [nQ, M] and
    the cell's weights [M, C]. where: bytes behind the address, [nQ]."""
    (n, m), channels = by_y.shape, weights.shape[1]
    found = np.empty((n, channels), np.float32)
    a, b = (address(by_y), m, 1), (address(weights), channels, 1)
    product(1, a, b, (address(zeros), 0), (address(found), channels), (n, m, channels), False)
    for i in range(n):
        _add(address(found[i]), channels, to + where[i])


@apart(float32[:, ::1], int64[:], intp, float32[:, :])
def paste_patches(by_y: np.ndarray, shape: np.ndarray, weight: int, by_x: np.ndarray) -> None:
    """Given the gradient by y, write that by images to by_x [n, HWC]: of each of their numbers, the sum over the cells
    of a patch, the first one first. Other arguments are those of convolve_patches."""
    kernel, stride, channels, height, width, _, _ = shape
    each, cells = places(height, width, kernel, stride), kernel * kernel
    m, together = by_y.shape[1] // each, max(1, _TOGETHER // each)
    weights, zeros = np.empty((cells, m, channels), np.float32), np.zeros(channels, np.float32)
    _turn(weight, cells, m * channels, cells, address(weights), m * channels)
    where = _places(shape, False, min(together, len(by_y)), by_x.strides[0])
    by_x[:] = 0
    for i in range(0, len(by_y), together):
        given = by_y[i : i + together]
        for cell in range(cells):
            to = address(by_x) + i * by_x.strides[0] + 4 * channels * (cell // kernel * width + cell % kernel)
            count = len(given) * each
            _paste(given.reshape((count, m)), weights[cell], zeros, where[:count], to)
