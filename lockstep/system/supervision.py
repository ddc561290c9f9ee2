"""Supervision of processes: a detector of stalls, and the error that reports how a worker failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

_STARTUP = 120.0
"""Seconds that a process may take to import everything and make its environments, regardless of the stall timeout."""
_ENVIRONMENT = 0.5
"""Additional seconds that it may take for each environment. ALE's games and Doom's engines take 0.15 seconds of a core.
"""
_BETWEEN_LOOKS = 5.0
"""Maximum number of seconds between two checks of progress that count as waiting."""

_stall_handler: Callable[[str], Any] | None = None


class WorkerError(RuntimeError):
    """A worker raised an error, died or stalled. The message contains its traceback or signal."""


class StallDetector:
    """Measures the time without progress.

    At most a few seconds count between two checks. If more time has passed, the watcher itself was suspended, for
    example by Ctrl-Z, together with the processes that it watches.

    Args:
        stall_timeout: seconds that a process may take without progress.
        environments: how many environments a process makes before its first step.
    """

    def __init__(self, stall_timeout: float, environments: int = 0) -> None:
        self._stall_timeout = stall_timeout
        self._start = max(stall_timeout, _STARTUP + _ENVIRONMENT * environments)
        self._progress: object = None
        self._waited, self._looked = 0.0, time.monotonic()

    def moved(self) -> None:
        """Record progress."""
        self._waited, self._looked = 0.0, time.monotonic()

    def too_long(self, progress: object = None, *, started: bool, grace: float = 0.0) -> float | None:
        """The timeout in seconds if it and the grace period have passed, else None. Call this about once a second.

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
        patience = self._stall_timeout if started else self._start
        return patience if self._waited > patience + grace else None


@contextlib.contextmanager
def unattended(fail: Callable[[str], Any]) -> Iterator[None]:
    """Watch inline runs, too, from a thread. If a run makes no progress for the layout's stall_timeout, call fail,
    which must end the process. This is not the default, since the user may have stopped a run in a debugger."""
    global _stall_handler
    _stall_handler = fail
    try:
        yield
    finally:
        _stall_handler = None


def stall_handler() -> Callable[[str], Any] | None:
    """The function that was passed to `unattended`; None outside of it."""
    return _stall_handler


def is_unattended() -> bool:
    """Whether `unattended` is active."""
    return _stall_handler is not None
