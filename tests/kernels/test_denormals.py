"""Denormal numbers at full speed: the bits are those of the plain operations, which NumPy rounds as IEEE 754 says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from lockstep.kernels import optimizers
from lockstep.kernels.denormals import denormal, root, shrunk

LEAST = np.float32(2.0**-149)


@njit(error_model="numpy")
def computed(factor: Any, x: Any, products: Any, roots: Any, small: Any) -> None:
    for i in range(len(x)):
        products[i], roots[i], small[i] = shrunk(factor, x[i]), root(abs(x[i])), denormal(x[i])


@pytest.mark.parametrize("factor", [0.0, 0.25, 0.5, 0.9, 0.95, 0.999, 1.0])
def test_denormals_have_the_bits_of_plain_operations(factor: float) -> None:
    draw = np.random.default_rng(5)
    bits = np.concatenate([np.arange(2_000), draw.integers(0, 1 << 24, 50_000), draw.integers(0, 0x7F800000, 50_000)])
    x = (bits.astype(np.uint32) | (draw.integers(0, 2, len(bits)).astype(np.uint32) << 31)).view(np.float32)
    products, roots, small = np.empty_like(x), np.empty_like(x), np.empty(len(x), np.bool_)
    computed(np.float32(factor), x, products, roots, small)
    np.testing.assert_array_equal(products.view(np.uint32), (np.float32(factor) * x).view(np.uint32))
    np.testing.assert_array_equal(roots, np.sqrt(np.abs(x)))
    np.testing.assert_array_equal(small, np.abs(x) < np.float32(2.0**-126))


def test_adam_of_denormal_moments_is_that_of_its_formula() -> None:
    # 0.9 * 5 = 4.5 is rounded to 4, the even one, and so is 0.9 * 4 = 3.6. A parameter of 0 moves by 4 * 2**-149 / eps.
    first, second = np.array([5, -5, 5, 4], np.float32) * LEAST, np.array([500, 500, 0, 501], np.float32) * LEAST
    x, none = np.array([0.5, -0.5, 0.0, 0.0], np.float32), np.zeros(4, np.float32)
    optimizers.adam(x, none, np.float32(1), np.float32(1), 1.0, first, second, 10**6, 1.0, 0.9, 0.999, 1e-8)
    np.testing.assert_array_equal(first / LEAST, [4, -4, 4, 4])
    np.testing.assert_array_equal(second / LEAST, [500, 500, 0, 500])
    np.testing.assert_array_equal(x[:2], [0.5, -0.5])
    np.testing.assert_allclose(x[2:], -4 * 2.0**-149 / 1e-8, rtol=1e-6)
