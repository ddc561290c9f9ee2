"""Supervision of processes: detecting that they stall, and the error that says how a worker failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

_STARTUP = 120.0
"""Seconds that a process may take to import everything and make its environments, whatever the stall timeout is."""
_BETWEEN_LOOKS = 5.0
"""Of the time between two looks at a process's progress, the seconds that count as waiting for it."""

_stall_handler: Callable[[str], Any] | None = None


class WorkerError(RuntimeError):
    """A worker raised, died or stalled; the text holds its traceback or signal."""


class StallDetector:
    """Measures how long there has been no progress.

    The time between two looks counts as a few seconds at most: a watcher that did not look for longer was suspended
    itself, as by Ctrl-Z, and so were the processes that it watches.

    Args:
        stall_timeout: seconds that a process may show no progress.
    """

    def __init__(self, stall_timeout: float) -> None:
        self._stall_timeout = stall_timeout
        self._progress: object = None
        self._waited, self._looked = 0.0, time.monotonic()

    def moved(self) -> None:
        """There was progress."""
        self._waited, self._looked = 0.0, time.monotonic()

    def too_long(self, progress: object = None, *, started: bool, grace: float = 0.0) -> float | None:
        """The timeout in seconds once it and the grace have passed, else None. Call this about every second.

        Args:
            progress: a value that changes with progress, such as a count of steps.
            started: whether there has been progress before.
        """
        if progress != self._progress:
            self._progress = progress
            self.moved()
        now = time.monotonic()
        self._waited += min(now - self._looked, _BETWEEN_LOOKS)
        self._looked = now
        patience = self._stall_timeout if started else max(self._stall_timeout, _STARTUP)
        return patience if self._waited > patience + grace else None


@contextlib.contextmanager
def unattended(fail: Callable[[str], Any]) -> Iterator[None]:
    """Watch inline runs, too, from a thread. If one makes no progress for the layout's stall_timeout, fail is called,
    which has to end the process. This is not the default, since a person may have stopped a run in a debugger."""
    global _stall_handler
    _stall_handler = fail
    try:
        yield
    finally:
        _stall_handler = None


def stall_handler() -> Callable[[str], Any] | None:
    """What `unattended` was given; None outside of it."""
    return _stall_handler


def is_unattended() -> bool:
    """Whether `unattended` is in force."""
    return _stall_handler is not None
