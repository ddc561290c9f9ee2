"""Convolutions whose kernels do not overlap, in float32 arithmetic that is the same on every CPU.

Kernels move by their size, without padding, so every cell belongs to at most one patch, and a convolution is a product
of patches and weights. In a layer's outputs, the channels of a place lie together. cut_pixels cuts the pixels of an
observation into patches once, before the first layer. They stay bytes, which layers see as a quarter as many float32
numbers, until a product needs them: less memory is read that way than with numbers.

Shape legend: n samples, C channels, H and W sides of an image, Q = (H // k)(W // k) patches of k x k cells, K = Ckk
numbers of a patch, in the order of torch's weights (C, k, k), M channels of outputs, R bytes of an image's patches: QK
rounded up to whole vectors.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, intp

from lockstep.kernels.cache import apart, compiled
from lockstep.kernels.products import product
from lockstep.kernels.tiles import EDGE, address, load, move, move_bytes, plus, store, turn, widen
from lockstep.kernels.tiles import WIDTH as VECTOR

_TOGETHER = 512
"""How many patches are made and multiplied at once, so that they stay in the cache."""


@compiled
def _cut_row(pixels: int, plane: int, channels: int, width: int, kernel: int, to: int) -> None:
    """Write a row of patches to an address, and up to 7 bytes behind it. Its pixels lie at another one, those of each
    channel `plane` bytes apart; up to 7 bytes behind them are read."""
    for q in range(width // kernel):
        for c in range(channels):
            begin = pixels + c * plane + q * kernel
            for _ in range(kernel):
                for j in range(0, kernel, EDGE):
                    move_bytes(begin + j, to + j)
                begin += width
                to += kernel


@compiled
def cut_pixels(images: np.ndarray, kernel: int) -> np.ndarray:
    """The patches of images, uint8 [n, C, H, W] -> bytes, as float32 [n, R / 4].

    Lines of patches are moved 8 bytes at a time. What one writes too much, the next one overwrites. So an image's last
    row of patches is cut where there is room for more, before and after.
    """
    n, channels, height, width = images.shape
    down, together, plane = height // kernel, kernel * width, height * width
    size = width // kernel * channels * kernel * kernel
    pixels, last = np.zeros(channels * together + EDGE, np.uint8), np.empty(size + EDGE, np.uint8)
    out = np.empty((n, (down * size + VECTOR - 1) // VECTOR * VECTOR), np.uint8)
    flat = images.reshape((n, channels, plane))
    for i in range(n):
        of, to, end = address(flat[i]), address(out[i]), (down - 1) * together
        for row in range(down - 1):
            _cut_row(of + row * together, plane, channels, width, kernel, to + row * size)
        for c in range(channels):
            pixels[c * together : (c + 1) * together] = flat[i, c, end : end + together]
        _cut_row(address(pixels), together, channels, width, kernel, address(last))
        out[i, (down - 1) * size : down * size] = last[:size]
    return out.view(np.float32)


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
def _patches(
    x: np.ndarray, is_cut: bool, channels: int, height: int, width: int, kernel: int, patches: np.ndarray
) -> None:
    """Write the patches [nQK, and up to 15 numbers behind them] of what convolve_patches takes."""
    if not is_cut:
        _cut(x, channels, height, width, kernel, patches)
        return
    size = (height // kernel) * (width // kernel) * channels * kernel * kernel
    for i in range(len(x)):
        of, to = address(x[i]), address(patches) + 4 * i * size
        for j in range(0, size, VECTOR):
            widen(of + j, to + 4 * j)


@compiled
def _together(n: int, each: int, k: int) -> tuple[int, np.ndarray]:
    """Of how many samples, at most n, patches of k numbers are made at once, and where. A sample has `each` patches."""
    together = min(n, max(1, _TOGETHER // each))
    return together, np.empty(together * each * k + VECTOR, np.float32)


@compiled
def _weigh(patches: np.ndarray, k: int, each: int, weight: int, bias: int, rectify: bool, y: np.ndarray) -> None:
    """Write the outputs [n, QM] of patches. This is a function because an argument keeps its array alive, and an
    address does not."""
    n, m = len(y) * each, y.shape[1] // each
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
        x: what cut_pixels returned [n, R / 4] if is_cut; else images whose channels lie together [n, HWC].
        weight, bias: the addresses of weights [M, K] and biases [M].
        rectify: write 0 for negative results.
        y: float32 [n, QM].
    """
    each, k = (height // kernel) * (width // kernel), channels * kernel * kernel
    together, patches = _together(len(x), each, k)
    for i in range(0, len(x), together):
        end = min(i + together, len(x))
        _patches(x[i:end], is_cut, channels, height, width, kernel, patches)
        _weigh(patches, k, each, weight, bias, rectify, y[i:end])


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
    together, patches = _together(len(x), each, k)
    for i in range(0, len(x), together):
        end = min(i + together, len(x))
        _patches(x[i:end], is_cut, channels, height, width, kernel, patches)
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
