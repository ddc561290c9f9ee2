"""Calls functions in a forked copy of this process, so that they do not change this process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from lockstep.system.children import die_with_parent

_CLEANING_UP = 3.0
"""Seconds that the copy has to clean up after a request to end."""


def call_in_fork(function: Callable[[], Any], seconds: float) -> tuple[bool, Any]:
    """Call a function in a forked copy of this process, which prints nothing. The result must be a JSON value.

    Returns:
        Whether the function returned in time, and its result. False and None if it raised, ended its process or took
        longer, and on systems without fork.
    """
    if not hasattr(os, "fork"):
        return False, None
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # otherwise the copy would print it again
    parent = os.getpid()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about locks of other threads: if one is held, the call times out
        child = os.fork()
    if not child:
        try:
            try:
                _copy(function, writing, parent)
            finally:
                os._exit(0)
        finally:  # SIGTERM may raise in the line above
            os._exit(0)
    os.close(writing)
    told = b""
    try:
        deadline = time.monotonic() + seconds
        ready = select.poll()  # select() fails for descriptors from 1024 on
        ready.register(reading, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and ready.poll(1000 * left):
            part = os.read(reading, 2**16)
            told += part
            if not part or told.endswith(b"\n"):  # a process that the function has forked may keep the pipe open
                break
        return (True, json.loads(told)) if told.endswith(b"\n") else (False, None)
    finally:
        os.close(reading)
        _end(child, asked=not told.endswith(b"\n"))


def _end(child: int, *, asked: bool) -> None:
    """End the copy and everything that the function started in its process group.

    Args:
        asked: whether to first request the copy to end, so that it also ends processes in other groups.
    """
    try:
        deadline = time.monotonic() + _CLEANING_UP
        if asked:
            os.kill(child, signal.SIGTERM)
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        for end in (os.killpg, os.kill):  # the copy may have no group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _copy(function: Callable[[], Any], writing: int, parent: int) -> None:
    os.setsid()
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # runs the function's cleanup
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - they may not be files, as in notebooks
    text = json.dumps(function()) + "\n"
    with open(writing, "wb") as file:
        file.write(text.encode())
