"""Convolutions whose kernels do not overlap, in float32 arithmetic that is the same on every CPU.

Kernels move by their size, without padding, so every cell belongs to at most one patch, and a convolution is a product
of patches and weights. In a layer's outputs, the channels of a place lie together. cut_pixels cuts the pixels of an
observation into patches once, before the first layer.

Shape legend: n samples, C channels, H and W sides of an image, Q = (H // k)(W // k) patches of k x k cells, K = Ckk
numbers of a patch, in the order of torch's weights (C, k, k), M channels of outputs.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, intp

from lockstep.kernels.cache import apart, compiled
from lockstep.kernels.products import product
from lockstep.kernels.tiles import EDGE, address, load, move, move_edge, plus, store, turn
from lockstep.kernels.tiles import WIDTH as VECTOR

_TOGETHER = 256
"""How many patches are multiplied at once by the gradients by their outputs, so that they stay in the cache."""


@compiled
def _cut_rows(floats: np.ndarray, channels: int, width: int, kernel: int, cut: np.ndarray) -> None:
    """Write the patches of an image as high as they are, [CkW] with 8 more numbers behind it, to cut, and up to 7
    numbers behind them."""
    place = address(cut)
    for q in range(width // kernel):
        for line in range(channels * kernel):
            begin = address(floats) + 4 * (line * width + q * kernel)
            for j in range(0, kernel, EDGE):
                move_edge(begin + 4 * j, place + 4 * j)
            place += 4 * kernel


@compiled
def cut_pixels(images: np.ndarray, kernel: int, out: np.ndarray) -> None:
    """Write the patches of images, uint8 [n, C, H, W] -> float32 [n, QK].

    One row of patches is made at a time, whose pixels stay in the cache. Lines of patches are moved 8 numbers at a
    time. What one writes too much, the next one overwrites, so the last row is cut where there is room for more.
    """
    n, channels, height, width = images.shape
    down, together = height // kernel, kernel * width
    size = width // kernel * channels * kernel * kernel
    floats, last = np.zeros(channels * together + EDGE, np.float32), np.empty(size + EDGE, np.float32)
    flat, rows = images.reshape((n * channels, height * width)), out.reshape((n * down, size))
    for i in range(n * down):
        begin = i % down * together
        for c in range(channels):
            of, to = flat[i // down * channels + c, begin : begin + together], floats[c * together : (c + 1) * together]
            for j in range(together):
                to[j] = of[j]
        _cut_rows(floats, channels, width, kernel, rows[i] if i < n * down - 1 else last)
    to = rows[n * down - 1]
    for j in range(size):
        to[j] = last[j]


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
def _copy(b: int, count: int, out: int) -> None:
    """Copy numbers from an address to another one."""
    whole = count - count % VECTOR
    for j in range(0, whole, VECTOR):
        move(b + 4 * j, out + 4 * j)
    for j in range(whole, count):
        store(out + 4 * j, load(b + 4 * j))


@compiled
def _add(b: int, count: int, out: int) -> None:
    """Add numbers at an address to those at another one."""
    whole = count - count % VECTOR
    for j in range(0, whole, VECTOR):
        plus(out + 4 * j, b + 4 * j, out + 4 * j)
    for j in range(whole, count):
        store(out + 4 * j, load(out + 4 * j) + load(b + 4 * j))


@compiled
def _cut(x: np.ndarray, channels: int, height: int, width: int, kernel: int, out: np.ndarray) -> None:
    """Write the patches of images whose channels lie together, [n, HWC] -> [nQ, K]."""
    across, square, to = width // kernel, kernel * kernel, address(out)
    each, cells = (height // kernel) * across, np.empty((square, channels), np.float32)
    for i in range(len(x) * each):
        q, image = i % each, address(x) + 4 * (i // each) * height * width * channels
        for row in range(kernel):
            begin = image + 4 * ((q // across * kernel + row) * width + q % across * kernel) * channels
            _copy(begin, kernel * channels, address(cells) + 4 * row * kernel * channels)
        _turn(address(cells), channels, square, channels, to, square)
        to += 4 * channels * square


@compiled
def _paste(
    patches: np.ndarray, channels: int, height: int, width: int, kernel: int, added: bool, out: np.ndarray
) -> None:
    """Add patches [nQ, K] to images whose channels lie together, [n, HWC], or, if not added, write such images."""
    across, square, of = width // kernel, kernel * kernel, address(patches)
    each, cells = (height // kernel) * across, np.empty((square, channels), np.float32)
    if not added:
        out[:] = 0
    for i in range(len(out) * each):
        q, image = i % each, address(out) + 4 * (i // each) * height * width * channels
        _turn(of, square, channels, square, address(cells), channels)
        for row in range(kernel):
            begin = image + 4 * ((q // across * kernel + row) * width + q % across * kernel) * channels
            _add(address(cells) + 4 * row * kernel * channels, kernel * channels, begin)
        of += 4 * channels * square


@compiled
def _weigh(patches: np.ndarray, k: int, weight: int, bias: int, rectify: bool, y: np.ndarray) -> None:
    """Write the outputs [nQ, M] of all patches, nQK numbers. This is a function because an argument keeps its array
    alive, and an address does not."""
    n, m = y.shape
    product(1, address(patches), k, 1, weight, 1, k, bias, 0, address(y), m, n, k, m, rectify)


@apart(float32[:, :], boolean, *[intp] * 6, boolean, float32[:, ::1])
def convolve_patches(
    x: np.ndarray,
    is_cut: bool,
    channels: int,
    height: int,
    width: int,
    kernel: int,
    weight: int,
    bias: int,
    rectify: bool,
    y: np.ndarray,
) -> None:
    """Write the convolution of images to y.

    Args:
        x: patches [n, QK] if is_cut; else images whose channels lie together [n, HWC].
        weight, bias: the addresses of weights [M, K] and biases [M].
        rectify: write 0 for negative results.
        y: float32 [n, QM].
    """
    count, k = len(x) * (height // kernel) * (width // kernel), channels * kernel * kernel
    out = y.reshape((count, y.size // count))
    if is_cut:
        _weigh(x, k, weight, bias, rectify, out)
    else:
        patches = np.empty((count, k), np.float32)
        _cut(x, channels, height, width, kernel, patches)
        _weigh(patches, k, weight, bias, rectify, out)


@compiled
def _add_products(patches: np.ndarray, by_y: np.ndarray, to: np.ndarray) -> None:
    """For each of Q patches, add the products of its numbers and the gradients by its outputs to a matrix [K, M]. All
    patches have QK numbers and QM outputs."""
    k, m = to.shape
    product(1, address(patches), 1, k, address(by_y), m, 1, address(to), m, address(to), m, k, by_y.size // m, m, False)


@apart(float32[:, :], boolean, *[intp] * 4, float32[:, ::1], boolean, intp)
def convolve_patches_back(
    x: np.ndarray,
    is_cut: bool,
    channels: int,
    height: int,
    width: int,
    kernel: int,
    by_y: np.ndarray,
    fresh: bool,
    by_weight: int,
) -> None:
    """Given the gradient by y, add that by weights to by_weight sample by sample, or write it if it is to be fresh.
    Other arguments are those of convolve_patches."""
    each, k = (height // kernel) * (width // kernel), channels * kernel * kernel
    m = by_y.shape[1] // each
    turned = np.zeros((k, m), np.float32)
    if not fresh:
        for j in range(m):
            for i in range(k):
                turned[i, j] = load(by_weight + 4 * (j * k + i))
    together = max(1, _TOGETHER // each)
    patches = np.empty((0 if is_cut else together * each, k), np.float32)
    for i in range(0, len(x), together):
        end = min(i + together, len(x))
        if is_cut:
            _add_products(x[i:end], by_y[i:end], turned)
        else:
            _cut(x[i:end], channels, height, width, kernel, patches)
            _add_products(patches, by_y[i:end], turned)
    for j in range(m):
        for i in range(k):
            store(by_weight + 4 * (j * k + i), turned[i, j])


@compiled
def _weigh_back(by_y: np.ndarray, weight: int, zeros: np.ndarray, patches: np.ndarray) -> None:
    """Write the gradient by patches [nQ, K], given that by their outputs [nQ, M]."""
    (n, m), k = by_y.shape, patches.shape[1]
    product(1, address(by_y), m, 1, weight, k, 1, address(zeros), 0, address(patches), k, n, m, k, False)


@apart(float32[:, ::1], *[intp] * 5, boolean, float32[:, :])
def paste_patches(
    by_y: np.ndarray, channels: int, height: int, width: int, kernel: int, weight: int, added: bool, by_x: np.ndarray
) -> None:
    """Given the gradient by y, add that by images to by_x [n, HWC], or write it if not added. Other arguments are those
    of convolve_patches."""
    count, k = len(by_y) * (height // kernel) * (width // kernel), channels * kernel * kernel
    patches = np.empty((count, k), np.float32)
    _weigh_back(by_y.reshape((count, by_y.size // count)), weight, np.zeros(k, np.float32), patches)
    _paste(patches, channels, height, width, kernel, added, by_x)
