"""Settings of Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def objects_frozen() -> Iterator[None]:
    """Exclude all existing objects from garbage collections until the end.

    Torch and Numba have hundreds of thousands of objects that live as long as the process. Scanning them again and
    again took a tenth of the time of small iterations. Garbage is collected first, since it would otherwise stay. This
    does nothing if the user's program has frozen objects itself.
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
