"""Products add their terms in order, each with a single rounding, whatever the shapes and strides."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.kernels.products import Matrix, panel_product, panels_of, product, products

SHAPES = [
    (1, 1, 1),
    (2, 3, 5),
    (6, 9, 16),
    (7, 64, 17),
    (8, 8, 32),
    (13, 70, 48),
    (20, 300, 33),
    (27, 70, 75),
    (40, 9, 1),
    (75, 70, 5),
    (32, 70, 130),  # computed as columns if those of b do not lie together
    (16, 70, 130),  # the same with slim tiles
    (16, 5, 67),
    (64, 9, 256),
    (9, 70, 192),  # many columns, which are not copied: with few rows
    (75, 30, 192),  # and with few terms
    (5, 0, 4),
]


def in_order(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c + a @ b, one term after the other. Long doubles hold these products and sums before they are rounded."""
    total = c.copy()
    for p in range(a.shape[1]):
        total = (total + a[:, p : p + 1].astype(np.longdouble) * b[p]).astype(np.float32)
    return total


def strides(x: np.ndarray) -> tuple[int, ...]:
    return tuple(stride // 4 for stride in x.strides)


def matrix(x: np.ndarray) -> Matrix:
    row, column = strides(x)
    return x.ctypes.data, row, column


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_adds_term_by_term(shape: tuple[int, int, int], turned: tuple[bool, bool]) -> None:
    (n, k, m), random = shape, np.random.default_rng(0)
    a, b = (random.standard_normal(size, np.float32) for size in ((n, k), (k, m)))
    wide = random.standard_normal((n, m + 3), np.float32)
    c, around = wide[:, :m], wide[:, m:].copy()
    expected = in_order(a, b, c)
    a, b = (np.asfortranarray(x) if turn else x for x, turn in zip((a, b), turned, strict=True))
    to = c.ctypes.data, strides(c)[0]
    product(1, matrix(a), matrix(b), to, to, (n, k, m), False)
    np.testing.assert_array_equal(c, expected)
    np.testing.assert_array_equal(wide[:, m:], around)


@pytest.mark.parametrize("slices", [2, 4, 8])
@pytest.mark.parametrize(("n", "k", "m"), [(27, 4, 192), (19, 7, 75), (75, 60, 192)])
def test_products_of_slices_are_added_up_as_a_tree(slices: int, n: int, k: int, m: int) -> None:
    random = np.random.default_rng(2)
    a, b = (random.standard_normal(size, np.float32) for size in ((slices, n, k), (slices, k, m)))
    start, c = random.standard_normal(m, np.float32), np.zeros((n, m), np.float32)
    sums = [in_order(*each, np.tile(start, (n, 1))) for each in zip(a, b, strict=True)]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    joined = np.hstack(list(a))
    of_b = b.ctypes.data, m, 1
    product(slices, matrix(joined), of_b, (start.ctypes.data, 0), (c.ctypes.data, m), (n, k, m), False)
    np.testing.assert_array_equal(c, sums[0])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1]])
def test_panels_serve_several_products(shape: tuple[int, int, int], turned: bool) -> None:
    (n, k, m), random = shape, np.random.default_rng(0)
    b, bias = random.standard_normal((k, m), np.float32), random.standard_normal(m, np.float32)
    held = np.asfortranarray(b) if turned else b
    panels = panels_of(matrix(held), k, m)
    for rows in (n, 2 * n + 1):
        a, wide = random.standard_normal((rows, k), np.float32), random.standard_normal((rows, m + 3), np.float32)
        around = wide[:, m:].copy()
        panel_product((a.ctypes.data, k), panels, (bias.ctypes.data, 0), (wide.ctypes.data, m + 3), rows, m)
        np.testing.assert_array_equal(wide[:, :m], in_order(a, b, np.tile(bias, (rows, 1))))
        np.testing.assert_array_equal(wide[:, m:], around)


def test_several_products_may_share_a_matrix() -> None:
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(size, np.float32) for size in ((3, 7, 5), (5, 18)))
    c = np.zeros((3, 7, 18), np.float32)
    products(3, (35, 0, 126), matrix(a[0]), matrix(b), (c.ctypes.data, 18), (7, 5, 18))
    np.testing.assert_array_equal(c, [in_order(each, b, np.zeros((7, 18), np.float32)) for each in a])
