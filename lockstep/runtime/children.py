"""Child processes: deaf to Ctrl-C, never outliving their parent, and mourned in words."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

_STOPS = (signal.SIGINT, signal.SIGTERM)


def start(process: BaseProcess) -> None:
    """Start a process that will call leave_signals_to_parent, and that hears no stop signal before it does."""
    resource_tracker.ensure_running()  # or it would be started now, and unblock the signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def leave_signals_to_parent() -> None:
    """Ignore Ctrl-C, which reaches children too, and SIGTERM: the parent decides when this process ends."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


def die_with_parent(cleanup: Callable[[], None] = lambda: None) -> None:
    """End this process as soon as the parent is gone, however that came about, and even if it went before this call."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        cleanup()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def obituary(process: BaseProcess) -> str:
    """How a process ended, to follow its name in a sentence."""
    code = process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (the system may have run out of memory: see dmesg)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return (
        f"ended without a word, with exit code {code}. What it printed last stands above; a script that starts "
        'processes needs its call below if __name__ == "__main__":'
    )
