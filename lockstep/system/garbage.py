"""Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def sparing() -> Iterator[Callable[[], None]]:
    """Gives a function that leaves all objects that exist out of later garbage collections, until the end.

    Torch and Numba have hundreds of thousands that live as long as the process. To look through them again and again
    took a tenth of the time of small iterations. The function collects garbage first, which would otherwise stay. It
    does nothing if the caller's program has spared objects itself.
    """
    own = gc.get_freeze_count() == 0

    def spare() -> None:
        if own:
            gc.collect()
            gc.freeze()

    try:
        yield spare
    finally:
        if own:
            gc.unfreeze()
