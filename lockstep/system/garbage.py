"""Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def spare_what_exists() -> None:
    """Leave all objects that exist out of later garbage collections.

    Torch and Numba have hundreds of thousands that live as long as the process. To look through them again and again
    took a tenth of the time of small iterations.
    """
    gc.freeze()


@contextlib.contextmanager
def collected_afterwards() -> Iterator[None]:
    """Undo spare_what_exists at the end, unless the caller's program spared objects itself."""
    before = gc.get_freeze_count()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()
