"""The lock of a run's folder. It prevents two processes from training the same run."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from lockstep.config.settings import SettingsError
from lockstep.run.files import locked, open_in, writing
from lockstep.system.output import print_warning

_GLANCE = 0.5
"""Seconds that a sweep may hold the lock while it checks whether the run is being trained."""


class RunBusy(SettingsError):
    """Another process is training the run."""


@contextlib.contextmanager
def run_lock(folder: Path, *, warn: bool) -> Iterator[None]:
    """Prevent other processes from writing a run at the same time. The system releases the lock when the process ends.

    Args:
        warn: whether to print a warning if the file system has no locks.

    Raises:
        RunBusy: another process is writing the run.
    """
    path = folder / ".lock"
    with writing(folder):
        opened = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - closed below
    with contextlib.ExitStack() as held:
        file = held.enter_context(opened)
        mine = True
        try:
            mine = held.enter_context(locked(file, _GLANCE))
        except OSError as error:  # a file system without locks
            if warn:
                print_warning(f"{folder} cannot be locked ({error}): train it in one process at a time.")
        if not mine:
            file.seek(0)
            raise RunBusy(f"{folder} is being trained by another process{_holder(path, file.read())}")
        with contextlib.suppress(OSError):  # on a full disk, the lock still works
            file.truncate(0)
            file.write(f"{os.getpid()} {socket.gethostname()}\n")
            file.flush()
        yield


def _holder(path: Path, noted: str) -> str:
    """The process that holds the lock, by its entry in the lock file, and advice."""
    number, _, host = noted.strip().partition(" ")
    advice = ". Wait until it has ended, or stop it with Ctrl-C or SIGTERM, before resuming the run."
    if not number.isdecimal():
        return advice
    if host != socket.gethostname():
        return f", {number} on {host}{advice}"
    if Path("/proc", number).exists():
        return f", {number}{advice}"
    left = ", ".join(str(process) for process in open_in(path) if process != os.getpid()) or "unknown to this one"
    return (
        f": {number}, which trained it, has ended, but a process that it started still holds the lock ({left}). End "
        "that process before resuming the run."
    )
