"""The arithmetic with which a model acts and learns: torch's, or portable operations."""

from __future__ import annotations

import contextlib
from typing import Any

from lockstep.models.base import PolicyModel


def arithmetic(model: PolicyModel) -> contextlib.AbstractContextManager[Any]:
    """The context for all computations with a model: portable operations if its experiment is portable and kernels do
    not compute everything, otherwise torch's operations."""
    return portable_operations() if model.portable_operations else contextlib.nullcontext()


def portable_operations() -> contextlib.AbstractContextManager[Any]:
    """A context in which torch's operations have identical bits on every CPU."""
    from lockstep.portable.mode import PortableArithmetic  # imports Numba

    return PortableArithmetic()
