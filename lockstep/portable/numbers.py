"""Functions that decide bits: in portable arithmetic where that is used, and NumPy's or torch's elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


class _Uses(threading.local):
    """Contexts of portable arithmetic that a thread is in."""

    count = 0


_uses = _Uses()


def enter(change: int) -> None:
    """Count a context of this thread that begins (1) or ends (-1)."""
    _uses.count += change


@contextlib.contextmanager
def portable_numbers() -> Iterator[None]:
    """A context in which these functions are portable. Torch's operations stay as they are."""
    enter(1)
    try:
        yield
    finally:
        enter(-1)


def tensor_exp(x: Tensor) -> Tensor:
    """e**x of a float32 tensor."""
    if not _uses.count or x.requires_grad:
        return torch.exp(x)
    from lockstep.portable import elementwise

    return elementwise.exp(x)


def tensor_tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent of a float32 tensor."""
    if not _uses.count or x.requires_grad:
        return torch.tanh(x)
    from lockstep.portable import elementwise

    return elementwise.tanh(x)


def tanh(x: np.ndarray) -> np.ndarray:
    """The hyperbolic tangent of a float32 array."""
    if not _uses.count:
        return np.tanh(x)
    from lockstep.portable import loops  # which needs Numba, and that takes a second to import

    x = np.ascontiguousarray(x, np.float32)
    out = np.empty_like(x)
    loops.tanh(x.ctypes.data, out.ctypes.data, x.size)
    return out


def power(x: np.ndarray, exponent: float) -> np.ndarray:
    """x to a power, for a float64 array of positive numbers; portable with the precision of float32."""
    if not _uses.count:
        return x**exponent
    from lockstep.portable import loops

    base = np.ascontiguousarray(x, np.float32)
    exponents, out = np.full_like(base, exponent), np.empty_like(base)
    loops.power(base.ctypes.data, exponents.ctypes.data, out.ctypes.data, base.size)
    return out.astype(np.float64)


def ndtri(x: Tensor) -> Tensor:
    """Quantiles of the standard normal distribution, for a float32 tensor that has no gradient."""
    if not _uses.count:
        return torch.special.ndtri(x)
    from lockstep.portable import elementwise

    return elementwise.ndtri(x)
