"""The arithmetic in which a model computes, acts and learns."""

from __future__ import annotations

import contextlib
from typing import Any

from lockstep.models.base import PolicyModel


def arithmetic(model: PolicyModel) -> contextlib.AbstractContextManager[Any]:
    """The context for everything that is computed with a model: portable operations if its experiment asks for them and
    no kernels compute all of it, otherwise torch's own."""
    return portable_operations() if model.portable_operations else contextlib.nullcontext()


def portable_operations() -> contextlib.AbstractContextManager[Any]:
    """A context in which torch's operations have identical bits on every CPU."""
    from lockstep.portable.mode import PortableArithmetic  # which needs Numba

    return PortableArithmetic()
