"""The server of forks.py: imports what takes long, and forks for one process as long as that one lives.

A process that has begun to compute can no longer be forked. So each fork gets another server, which is forked with it
and serves what it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import os
import pickle
import resource
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import numpy as np
from forks import FAILED, HIGH, KIND, LIMITS, MARK, NO_MARK, Forks, Order, prctl
from numba.core.registry import cpu_target

_IMPORTS = (
    *("torch.distributed", "gymnasium.envs.classic_control", "gymnasium.vector", "ale_py", "envpool"),
    *("lockstep.cli.train", "lockstep.sweep.child", "lockstep.launchers.launch", "lockstep.portable.mode"),
)
_ROOT = Path(__file__).parents[1]
_PATIENCE = 60.0
"""Seconds until a fork gives up waiting for its parent."""
DEATH = 1
"""PR_SET_PDEATHSIG: the signal that a process gets when its parent ends."""


def main() -> None:
    channel, parent, path = socket.socket(fileno=_moved(int(sys.argv[1]))), int(sys.argv[2]), sys.path[1:]
    prepare(_IMPORTS)
    order = _serve(channel, parent)
    try:
        _run([os.fsdecode(argument) for argument in order.arguments], order.flags, path)
        code = 0
    except SystemExit as exit:
        if not isinstance(exit.code, int | None):
            raise
        code = exit.code or 0
    end(code)


def prepare(modules: Iterable[str]) -> None:
    """Import what forks should not have to: this folder's lockstep, even if another one is installed."""
    sys.path.insert(1, str(_ROOT))
    for name in modules:
        with contextlib.suppress(ImportError):  # some are optional
            importlib.import_module(name)
    for context in (cpu_target.typing_context, cpu_target.target_context):
        context.refresh()  # type: ignore[attr-defined]  # which takes as long as importing numba
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all of the memory
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _serve(channel: socket.socket, parent: int) -> Order:
    """Returns in the forks."""
    prctl(DEATH, signal.SIGKILL)
    while os.getppid() == parent:
        message, files, _, _ = socket.recv_fds(channel, 1 << 20, 250)
        if not message:
            break
        if (between := os.fork()) == 0:
            if os.fork() != 0:
                os._exit(0)
            return begin(functools.partial(pickle.loads, message), files, channel)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)
    os._exit(0)


def begin(order: Callable[[], Order], files: list[int], channel: socket.socket) -> Order:
    """As become; but if that fails, say so and end this process."""
    try:
        return become(order(), files, channel)
    except BaseException:
        traceback.print_exc()
        channel.send(FAILED)
        os._exit(1)


def become(order: Order, files: list[int], channel: socket.socket) -> Order:
    """Make this process what it would be if its parent had started it."""
    if order.group is None:
        os.setsid()
    elif order.group != os.getpgrp():
        os.setpgid(0, order.group)
    ours, theirs = (socket.socket(fileno=_moved(end.detach())) for end in socket.socketpair(*KIND))
    this = os.getpid()
    if os.fork() == 0:
        ours.close()
        channel.close()
        _close_all_but(theirs.fileno())
        return _serve(theirs, this)
    theirs.close()
    for number, file in zip(order.files, [*map(_moved, files)], strict=True):
        os.dup2(file, number)
    _close_all_but(channel.fileno(), ours.fileno(), *order.files)
    os.chdir(order.folder)
    os.umask(order.umask)
    os.sched_setaffinity(0, order.cores)
    for limit, value in zip(LIMITS, order.limits, strict=True):
        if resource.getrlimit(limit) != value:
            resource.setrlimit(limit, value)
    os.environb.clear()
    os.environb.update(order.environment)
    tempfile.tempdir = None  # which depends on them
    _show(order)
    _open_standard_streams()
    np.random.seed()
    if (command_line := sys.modules.get("lockstep.cli.main")) is not None:
        command_line.BEGAN = time.perf_counter()  # type: ignore[attr-defined]  # budgets count from there
    for number in order.ignored:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN)
    Forks(ours).install()
    deadline = time.monotonic() + _PATIENCE
    while os.getppid() != order.parent:
        if not _lives(order.parent):  # as those who kill it wait for
            os._exit(1)
        assert time.monotonic() < deadline, "the process between them has not ended"
        time.sleep(0.0005)
    channel.send(str(this).encode())
    channel.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, order.blocked)
    return order


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _moved(file: int) -> int:
    try:
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH)
    finally:
        os.close(file)


def _close_all_but(*kept: int) -> None:
    for file in map(int, os.listdir("/proc/self/fd")):
        if file not in kept:
            with contextlib.suppress(OSError):  # of the folder itself
                os.close(file)


def _show(order: Order) -> None:
    """Make /proc show the command line, and the mark among the environment variables."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end, first, last = map(int, fields[45:49])
    line = b"".join(argument + b"\0" for argument in order.arguments)
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)
    name = f"{MARK}=".encode()
    mark = order.environment.get(name[:-1], NO_MARK.encode())
    assert len(mark) == len(NO_MARK)
    ctypes.memmove(first + ctypes.string_at(first, last - first).index(name) + len(name), mark, len(mark))


def _open_standard_streams() -> None:
    """As Python does when it begins."""
    for file, name in enumerate(("stdin", "stdout", "stderr")):
        before, stream = getattr(sys, f"__{name}__"), None
        if os.path.exists(f"/proc/self/fd/{file}"):
            raw = io.FileIO(file, "wb" if file else "rb", closefd=False)
            raw.name = f"<{name}>"
            at_once = before.write_through  # PYTHONUNBUFFERED
            buffer = raw if at_once else io.BufferedWriter(raw) if file else io.BufferedReader(raw)
            lines = not at_once and (file == 2 or raw.isatty())
            newline = "\n" if file else None
            stream = io.TextIOWrapper(buffer, before.encoding, before.errors, newline, lines, at_once)
            stream.mode = "w" if file else "r"  # type: ignore[attr-defined]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: list[str], flags: int, path: list[str]) -> None:
    """What Python does with a command line that begins with so many flags."""
    kind, what, *rest = words[1 + flags :]
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = ["" if kind == "-c" else os.getcwd(), *folders, *path]
    sys.orig_argv[:], sys.argv[:] = words, [kind, *rest]
    sys.modules["__main__"] = namespace = ModuleType("__main__")
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), namespace.__dict__)
    else:
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]


def end(code: int) -> None:
    """As Python does, except that it does not take all modules apart, which would copy their memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
