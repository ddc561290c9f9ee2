"""Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def objects_frozen() -> Iterator[None]:
    """Leave all objects that exist now out of garbage collections, until the end.

    Torch and Numba have hundreds of thousands that live as long as the process. To look through them again and again
    took a tenth of the time of small iterations. Garbage, which would otherwise stay, is collected first. Nothing
    happens if the caller's program has frozen objects itself.
    """
    own = gc.get_freeze_count() == 0
    if own:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()
