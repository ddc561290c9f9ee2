"""How kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def kernel(function: FunctionT) -> FunctionT:
    """Compile a function at its first call, and keep the machine code in a file for later processes.

    Division by zero gives an infinity, as IEEE 754 has it. A check for it would keep loops from being vectorized.
    """
    return njit(error_model="numpy", nogil=True, cache=True)(function)  # type: ignore[no-any-return]
