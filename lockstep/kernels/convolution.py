"""A convolution over small images in float32 arithmetic that is the same on every CPU: a product with their patches.

Kernels move by one cell, without padding. Channels of outputs lie together, as lockstep.models.encoders.ConvNet
flattens them.

Shape legend: n samples, C channels, H and W sides of an image, Q = (H-k+1)(W-k+1) places of a kernel of k x k cells,
K = Ckk numbers of a patch, M channels of outputs.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.products import product
from lockstep.kernels.tiles import address, load, store

_TOGETHER = 4
"""How many samples' patches one product takes: few enough for the cache, and enough to spread what a product costs
before its first term."""


@compiled
def places(height: int, width: int, kernel: int) -> int:
    """Q"""
    return (height - kernel + 1) * (width - kernel + 1)


@compiled
def _write_patches(x: np.ndarray, channels: int, height: int, width: int, kernel: int, out: np.ndarray) -> None:
    """Images [n, CHW] -> their patches [nQ, K], whose numbers have the order of torch's weights: C, k, k."""
    row = 0
    for i in range(len(x)):
        image = x[i].reshape((channels, height, width))
        for top in range(height - kernel + 1):
            for left in range(width - kernel + 1):
                column = 0
                for c in range(channels):
                    for dy in range(kernel):
                        for dx in range(kernel):
                            out[row, column] = image[c, top + dy, left + dx]
                            column += 1
                row += 1


@compiled
def convolve(
    x: np.ndarray, channels: int, height: int, width: int, kernel: int, weight: int, bias: int, y: np.ndarray
) -> None:
    """Write the convolution of images to y.

    Args:
        x: images, float32 [n, CHW].
        weight, bias: the addresses of weights [M, K] and biases [M].
        y: float32 [n, QM].
    """
    terms, rows = channels * kernel * kernel, places(height, width, kernel)
    m = y.shape[1] // rows
    patches = np.empty((_TOGETHER * rows, terms), np.float32)
    for begin in range(0, len(x), _TOGETHER):
        few = x[begin : begin + _TOGETHER]
        _write_patches(few, channels, height, width, kernel, patches)
        to = address(y) + 4 * begin * y.shape[1]
        product(address(patches), terms, 1, weight, 1, terms, bias, 0, to, m, len(few) * rows, terms, m, False)


@compiled
def convolve_back(
    x: np.ndarray, channels: int, height: int, width: int, kernel: int, by_y: np.ndarray, fresh: bool, by_weight: int
) -> None:
    """Add the gradient by weights to by_weight or, if it is to be fresh, write it: sample by sample, given the one by
    y. Arguments as for convolve."""
    terms, rows = channels * kernel * kernel, places(height, width, kernel)
    m = by_y.shape[1] // rows
    patches = np.empty((_TOGETHER * rows, terms), np.float32)
    turned = np.empty((terms, m), np.float32)  # as wide as a tile, which makes the product twice as fast
    sums = address(turned)
    for j in range(m):
        for k in range(terms):
            turned[k, j] = np.float32(0) if fresh else load(by_weight + 4 * (j * terms + k))
    for begin in range(0, len(x), _TOGETHER):
        few = x[begin : begin + _TOGETHER]
        _write_patches(few, channels, height, width, kernel, patches)
        given = address(by_y) + 4 * begin * by_y.shape[1]
        product(address(patches), 1, terms, given, m, 1, sums, m, sums, m, terms, len(few) * rows, m, False)
    for j in range(m):
        for k in range(terms):
            store(by_weight + 4 * (j * terms + k), turned[k, j])
