"""Multiplication and addition with a single rounding, by the CPU's instruction and without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from lockstep.kernels.instructions import fma, fused_by_float64, instruction

COUNT = 200_000


@instruction
def without_instruction(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return fused_by_float64(builder, *arguments)

    return a(a, b, c), generate


@njit(error_model="numpy")
def fused(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(len(a)):
        out[i] = fma(a[i], b[i], c[i])


@njit(error_model="numpy")
def fused_without(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(len(a)):
        out[i] = without_instruction(a[i], b[i], c[i])


WAYS = [fused, fused_without]


@pytest.mark.parametrize("way", WAYS)
def test_fma_rounds_once(way: Any) -> None:
    # 24929 * 673 = 2**24 + 1 lies in the middle between two float32: what is added decides, however small it is.
    a = np.array([3, 24929, 24929, 24929, -24929, np.inf, 2**64], np.float32)
    b = np.array([5, 673, 673, 673, 673, 0, 2**64], np.float32)
    c = np.array([7, 0, 2**-40, -(2**-40), -(2**-40), 1, -np.inf], np.float32)
    out = np.empty_like(a)
    way(a, b, c, out)
    expected = [22, 2**24, 2**24 + 2, 2**24, -(2**24) - 2, np.nan, -np.inf]
    np.testing.assert_array_equal(out, np.array(expected, np.float32))


def test_fma_of_float64_rounds_once() -> None:
    a, out = np.full(1, 1 + 2.0**-30), np.empty(1)
    fused(a, a, np.full(1, -(1 + 2.0**-29)), out)
    assert out[0] == 2.0**-60


def hard(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Any bits at all; products that lie in the middle between two numbers, with something small added; and results
    that are denormal."""
    signs = draw.choice([-1.0, 1.0], COUNT)
    any_a, any_b, any_c = draw.integers(0, 2**32, (3, COUNT), np.uint64).astype(np.uint32).view(np.float32)
    a, b = 1 + draw.integers(0, 2**12, (2, COUNT)) / 2**12
    c = signs * 2.0 ** draw.integers(-60, 60, COUNT)
    small_a, small_b = 2.0 ** draw.integers(-80, -60, (2, COUNT)) * (1 + draw.random((2, COUNT)))
    small_c = signs * draw.integers(0, 2**25, COUNT).astype(np.uint32).view(np.float32)
    columns = (any_a, a, small_a), (any_b, b, small_b), (any_c, c, small_c)
    return tuple(np.concatenate(column, dtype=np.float32) for column in columns)  # type: ignore[return-value]


def test_bits_do_not_depend_on_the_instruction() -> None:
    given = hard(np.random.default_rng(0))
    found = [np.empty_like(given[0]) for _ in WAYS]
    for way, out in zip(WAYS, found, strict=True):
        way(*given, out)
        out[np.isnan(out)] = np.nan  # IEEE 754 leaves their bits open
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))
    a, b, c = (x[COUNT:].astype(np.float64) for x in given)  # without the ones that overflow
    assert ((a * b + c).astype(np.float32) != found[0][COUNT:]).sum() > 100, "these inputs are hard"
