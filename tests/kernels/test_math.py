"""The functions of kernels/math.py: their errors, their edges, and identical bits whatever the CPU."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit

from lockstep.kernels import math as kernels

FLOAT32 = ("exp", "log", "tanh", "sigmoid", "softplus", "ndtri", "round", "floor", "sin32", "cos32", "sqrt")
FLOAT64 = ("sin", "cos")
DIGEST = "bab96dc7be4ffff2114543d7d16a874b8306d3f628ff6ca05418eaea03bafa50"
"""Of the results of all functions. No CPU, compiler or library may change it."""
EDGES = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1, -1, 88.72284, 88.7229, -103.97], np.float32)
LIBRARY = re.compile(
    r"\b_{0,2}(?:exp|log|log1p|expm1|tanh|sin|cos|sincos|pow|fmod|floor|round|rint|nearbyint|sqrt|fma)f?\b"
)


@functools.cache
def over_arrays(function: Any) -> Any:
    @njit(error_model="numpy")
    def loop(x: Any, out: Any) -> None:
        for i in range(len(x)):
            out[i] = function(x[i])

    return loop


def apply(name: str, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    over_arrays(getattr(kernels, name))(x, out)
    return out


def every(step: int) -> np.ndarray:
    """Every step-th float32 of all that there are, and the edges."""
    return np.concatenate([np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32).view(np.float32), EDGES])


def angles() -> np.ndarray:
    """float64 angles, also next to the zeros of sine and cosine. NumPy's powers would differ between CPUs."""
    random = np.random.default_rng(0)
    zeros = np.arange(-60_000, 60_000) * (np.pi / 2)
    small = np.ldexp(random.uniform(0.5, 1, 10_000), random.integers(-996, 1, 10_000))
    return np.concatenate([random.uniform(-1e5, 1e5, 200_000), small, zeros, np.nextafter(zeros, 9e9), EDGES])


def digest() -> str:
    result = hashlib.sha256()
    inputs = [(FLOAT32, every(49_999)), (FLOAT64, angles())]
    for names, x in inputs:
        for name in names:
            found = apply(name, x)
            found[np.isnan(found)] = np.nan  # IEEE 754 leaves their bits open
            result.update(found.tobytes())
    return result.hexdigest()


def ulps(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The errors of finite results, in units in the last place."""
    limits = np.finfo(found.dtype)
    size = np.maximum(np.abs(exact), np.longdouble(limits.tiny))
    unit = np.exp2(np.floor(np.log2(size)) - limits.nmant)
    return np.abs(found.astype(np.longdouble) - exact) / unit


def tail(p: np.ndarray) -> np.ndarray:
    """The inverse of the normal distribution function by Newton's method, in long doubles."""
    from math import erfc

    left = np.where(p < 0.5, p.astype(np.float64), 1 - p.astype(np.float64))
    x = np.sqrt(np.maximum(-2 * np.log(left) - np.log(np.maximum(-4 * np.pi * np.log(left), 1)), 0))
    for _ in range(60):
        upper = np.array([erfc(each / 2**0.5) / 2 for each in x])
        x = x + (upper - left) / (np.exp(-x * x / 2) / (2 * np.pi) ** 0.5)
    return np.where(p < 0.5, -x, x).astype(np.longdouble)


EXACT: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "exp": (np.exp, 1),
    "log": (np.log, 1),
    "tanh": (np.tanh, 6),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 3),
    "softplus": (lambda x: np.logaddexp(0, x), 3),
    "round": (np.rint, 0),
    "floor": (np.floor, 0),
    "sqrt": (np.sqrt, 0.5),
    "sin32": (np.sin, 0.501),
    "cos32": (np.cos, 0.501),
}
"""The function in higher precision, and the error that the docstring allows."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", EXACT)
def test_errors_are_as_stated_over_all_float32(name: str) -> None:
    function, allowed = EXACT[name]
    x = every(4_099)
    if name.endswith("32"):
        x = x[np.abs(x) <= 1e6]
    found, exact = apply(name, x), function(x.astype(np.longdouble))
    rounded = exact.astype(np.float32)
    assert np.array_equal(np.isnan(found), np.isnan(rounded))
    assert np.array_equal(np.isinf(found), np.isinf(rounded))
    assert np.array_equal(np.sign(found[np.isinf(found)]), np.sign(rounded[np.isinf(found)]))
    finite = np.isfinite(found)
    assert ulps(found[finite], exact[finite]).max() <= allowed


@pytest.mark.parametrize(("name", "function"), [("sin", np.sin), ("cos", np.cos)])
def test_errors_of_sine_and_cosine_in_float64(name: str, function: Callable[[np.ndarray], np.ndarray]) -> None:
    x = angles()
    x = x[np.abs(x) <= 1e6]
    found, exact = apply(name, x), function(x.astype(np.longdouble))
    away = np.abs(exact) > 1e-3  # nearer to zeros, long doubles know too little of pi
    assert ulps(found[away], exact[away]).max() <= 1
    assert np.abs(found - exact)[~away].max() < 1e-15


@pytest.mark.parametrize("name", ["sin", "cos", "sin32", "cos32"])
def test_angles_that_lost_their_turn_are_no_number(name: str) -> None:
    kind = np.float32 if name.endswith("32") else np.float64
    assert np.isnan(apply(name, np.array([1.01e6, -3e38, np.inf, np.nan], kind))).all()


def test_errors_of_the_inverse_normal_distribution() -> None:
    random = np.random.default_rng(0)
    p = np.concatenate([random.random(2_000), 10.0 ** random.uniform(-37, 0, 1_000), [0.075, 0.925, 0.49999, 1 - 6e-8]])
    p = p.astype(np.float32)
    p = p[p < 1]
    assert ulps(apply("ndtri", p), tail(p)).max() <= 5
    assert apply("ndtri", np.array([0, 1, 0.5], np.float32)).tolist() == [-np.inf, np.inf, 0]
    assert np.isnan(apply("ndtri", np.array([-1, 1.5, np.nan, np.inf], np.float32))).all()


@pytest.mark.parametrize("name", [*FLOAT32, *FLOAT64])
def test_loops_are_vectorized_and_call_no_library(name: str) -> None:
    loop = over_arrays(getattr(kernels, name))
    x = np.ones(8, np.float64 if name in FLOAT64 else np.float32)
    loop(x, x.copy())
    (code,) = loop.inspect_asm().values()
    assert not LIBRARY.search(code)
    if platform.machine() == "x86_64":
        assert re.search(r"\bv?(?:mul|add|sqrt)p[sd]\b", code)


def test_bits_are_the_same_here() -> None:
    assert digest() == DIGEST


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names CPUs of this architecture")
@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v3"])
def test_bits_are_the_same_on_other_cpus(cpu: str) -> None:
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    found = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [DIGEST]


if __name__ == "__main__":
    print(digest())
