"""Python processes that begin with torch imported, which takes each of them two seconds otherwise.

The first one that a test or lockstep starts makes a server (fork_server.py), which imports what takes long, and forks.
A fork becomes what was asked for: a child of whoever asked, in its session, folder and limits, with the environment
variables, files and signals that it would have, which runs the same command line. So lockstep starts, watches and ends
its processes as always, and so do they what they start.

Others begin as always: those of tests marked with `real_processes`, all under `pytest --real-processes`, those of other
command lines, and those whose environment variables differ in one that an import might read.
"""

from __future__ import annotations

import _posixsubprocess
import ctypes
import itertools
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "LOCKSTEP_TEST_MARK"
"""The environment variable by which tests find a run's processes; its values have as many letters as NO_MARK."""
NO_MARK = "0" * 32
HIGH = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 4096)
"""Our files have larger numbers than those that a process asks for."""
LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
FAILED = b"failed"
prctl = ctypes.CDLL(None).prctl
_SERVER = Path(__file__).with_name("fork_server.py")
_PR_SET_CHILD_SUBREAPER = 36
_READ = (
    *("ATEN_", "DNNL_", "GLIBC_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NPY_", "NUMBA_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PYTHON", "TORCH_", "TZ"),
)
"""Beginnings of the environment variables that may be read before a fork is made."""
_MODULES = (b"lockstep", b"submitit.core._submit")
"""What is run with `python -m`: lockstep, and Slurm's jobs."""
_CODE = (b"from multiprocessing.spawn import spawn_main;", b"import sys; sys.path[:] = sys.argv.pop(1)")
"""Beginnings of what lockstep runs with `python -c`: its workers, and a sweep's runs."""
ROOM = 8192
"""Bytes of a command line for /proc to show."""
_exec: Callable[..., int] = _posixsubprocess.fork_exec


@dataclass(frozen=True)
class Order:
    """What a process gets from the one that starts it."""

    parent: int
    arguments: list[bytes]
    flags: int
    """How many of them, after the first, are flags of Python, which the server has, too."""
    environment: dict[bytes, bytes]
    folder: bytes
    files: list[int]
    """Numbers of the files that are sent with the order."""
    ignored: list[int]
    blocked: list[int]
    group: int | None
    """None in a new session."""
    cores: set[int]
    limits: list[tuple[int, int]]
    """In the order of LIMITS."""
    umask: int


def _environment() -> dict[bytes, bytes]:
    """The variables that children inherit, among them those of libraries, which os.environ does not know."""
    variables = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    pairs = itertools.takewhile(bool, map(variables.__getitem__, itertools.count()))
    return dict(pair.split(b"=", 1) for pair in pairs)


class Forks:
    """Starts this process's children, in the place of what subprocess and multiprocessing call.

    Args:
        server: a connection to this process's own; by default one is started when it is needed.
    """

    def __init__(self, server: socket.socket | None = None) -> None:
        self.real = False
        """Whether all begin as always."""
        self._server, self._process = server, None
        self._owner, self._session, self._lock = os.getpid(), os.getsid(0), threading.Lock()
        self._environment = _environment()
        """The server's."""

    def install(self) -> None:
        _posixsubprocess.fork_exec = self
        if hasattr(subprocess, "_fork_exec"):
            subprocess._fork_exec = self  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
        if self._process is not None:
            self._process.wait()

    def __call__(self, *given: Any) -> int:
        """As _posixsubprocess.fork_exec. Returns the child's process id."""
        arguments, _, close, keep, folder, variables, read, _, _, write, _, error, _, ready, _, alone, *rest = given
        arguments = [os.fsencode(argument) for argument in arguments]
        flags = [os.fsencode(flag) for flag in subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
        skipped = len(flags) if arguments[1 : 1 + len(flags)] == flags else 0
        environment = _environment() if variables is None else dict(each.split(b"=", 1) for each in variables)
        ordinary = close and all(value in (None, -1) or isinstance(value, bool) for value in rest)
        if self.real or not (ordinary and self._can([arguments[0], *arguments[1 + skipped :]], environment)):
            return _exec(*given)
        files = {0: read, 1: write, 2: error, **{number: number for number in keep if number != ready}}
        files = {number: number if file == -1 else file for number, file in files.items()}
        files = {number: file for number, file in files.items() if os.path.exists(f"/proc/self/fd/{file}")}
        assert max(files, default=0) < HIGH, f"file {max(files)} of the new process would replace one of the server's"
        order = Order(
            parent=os.getpid(),
            arguments=arguments,
            flags=skipped,
            environment=environment,
            folder=os.path.join(os.getcwdb(), os.fsencode(folder or b"")),
            files=[*files],
            ignored=[number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
            blocked=[*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            group=None if alone else os.getpgrp(),
            cores=os.sched_getaffinity(0),
            limits=[resource.getrlimit(limit) for limit in LIMITS],
            umask=int(Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0], 8),
        )
        return self._ask(order, [*files.values()])

    def _can(self, arguments: list[bytes], environment: dict[bytes, bytes]) -> bool:
        """Whether the server can fork for this command line."""
        python, kind, what, *_ = *arguments, b"", b""
        known = (kind == b"-m" and what in _MODULES) or (kind == b"-c" and what.startswith(_CODE))
        known &= python == os.fsencode(sys.executable) and sum(map(len, arguments)) + len(arguments) < ROOM
        differing = {os.fsdecode(name) for name, _ in environment.items() ^ self._environment.items()} - {"PYTHONPATH"}
        same = self._owner == os.getpid() and self._session == os.getsid(0)  # else it is not the server's parent
        return known and same and not any(name.startswith(_READ) for name in differing)

    def _ask(self, order: Order, files: list[int]) -> int:
        with self._lock:
            self._server = self._server or self._start()
            prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the fork becomes this process's child when the one between them ends
            try:
                socket.send_fds(self._server, [pickle.dumps(order)], files)
                answer = self._server.recv(64)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if answer in (b"", FAILED):
            raise OSError("The server could not fork; its output says why.")
        return int(answer)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(*KIND)
        arguments = [sys.executable, str(_SERVER), str(theirs.fileno()), str(os.getpid()), "x" * ROOM]
        environment = {name: value for name, value in self._environment.items() if name != b"PYTHONPATH"}
        environment[MARK.encode()] = NO_MARK.encode()
        null = subprocess.DEVNULL
        with theirs:
            self._process = subprocess.Popen(
                arguments, stdin=null, stdout=null, env=environment, pass_fds=[theirs.fileno()]
            )
        return ours
