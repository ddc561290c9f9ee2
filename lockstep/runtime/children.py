"""Child processes: deaf to Ctrl-C, never outliving their parent, and mourned in words."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

_STOPS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_SHOWING = 0.3
"""Seconds that a process gets to print where it stands, so that no two print at once."""
_NOTICING = 1.0
"""Seconds that whoever waits for a process's answer gets to say more of its death."""

_report_loss: Callable[[str], Any] | None = None


def start(process: BaseProcess) -> None:
    """Start a process that will call behave, and that hears no stop signal before it does."""
    resource_tracker.ensure_running()  # or it would be started now, and unblock the signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def behave() -> None:
    """What every child process begins with.

    It ignores Ctrl-C, which reaches children too, and SIGTERM: the parent decides when it ends. It ends as soon as the
    parent is gone. And it prints where it stands when it crashes, or is asked to by show_stack.
    """
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    die_with_parent()
    atexit.register(gc.freeze)  # with torch loaded, the collections while Python ends take half a second
    faulthandler.enable()
    signal.signal(signal.SIGUSR1, lambda *_: _show_stacks_of_children())
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)


def die_with_parent() -> None:
    """End this process as soon as the parent is gone, however that came about, and even if it went before this call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":  # the kernel does it even while the process is stopped, or hangs in native code
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def show_stack(process: BaseProcess, name: str) -> None:
    """Have a child process, and then its own children, print where they stand to standard error."""
    if process.pid is not None and process.is_alive():
        print(f"\n{name} (process {process.pid}) stands here:", file=sys.stderr, flush=True)
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_SHOWING)


def _show_stacks_of_children() -> None:
    for process in multiprocessing.active_children():
        show_stack(process, process.name)


def report_losses(report: Callable[[str], Any]) -> None:
    """Say what watch shall do in this process, from a thread of its own; without this it does nothing."""
    global _report_loss
    _report_loss = report


def watch(processes: Sequence[BaseProcess], what: str, noticed: Callable[[], bool]) -> None:
    """Report the first death among child processes, even while this one has nothing to ask them for long.

    Args:
        what: they are, as the report begins.
        noticed: whether somebody else has noticed the death, or has caused it; asked a moment after it.
    """

    def mourn() -> None:
        wait([process.sentinel for process in processes])
        time.sleep(_NOTICING)
        if not noticed() and _report_loss is not None:
            _report_loss(next(f"{what} {obituary(process)}" for process in processes if not process.is_alive()))

    threading.Thread(target=mourn, daemon=True).start()


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
