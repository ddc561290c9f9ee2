"""A process that has imported torch and lockstep, and forks a run's process in milliseconds. A new Python takes seconds
to import them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import IO, Any, NamedTuple

from lockstep.sweep import child
from lockstep.sweep.queue import Queue
from lockstep.sweep.slots import Process
from lockstep.system import children

_IMPORTS = (
    *("lockstep.launchers.launch", "lockstep.launchers.inline", "lockstep.algorithms.kernel_table"),
    *("lockstep.learners.learner_table", "lockstep.portable.elementwise"),
    *("lockstep.envs.gymnasium", "lockstep.envs.envpool", "lockstep.envs.compiled_adapter"),
)
"""What many runs need. Some are optional."""
_ENTRY = "lockstep.sweep.template:serve"


class Order(NamedTuple):
    """What a forked process gets."""

    arguments: list[str]
    """Of child.main."""
    environment: dict[str, str]
    path: list[str]
    """Its sys.path."""


class Template:
    """Starts processes of runs as child.start does. The template process begins with the first run, and ends with this
    object's context."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._channel is not None:
            self._channel.close()  # which ends the process
            self._process.wait()

    def start(
        self, queue: Queue, name: str, cores: Iterable[int], environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start the process of a run. It ends when this process ends, and its output goes to the run's log."""
        with open(queue.log(name), "ab") as log:
            arguments = child.arguments(queue, name, cores)
            order = Order(arguments, dict(os.environ if environment is None else environment), sys.path)
            if process := self._fork(order, log):
                return Forked(process)
        return child.start(queue, name, cores, environment)  # which says in the log why lockstep cannot be imported

    def _fork(self, order: Order, log: IO[bytes]) -> int:
        """The forked process's id; 0 if there is none."""
        if self._process is None or self._process.poll() is not None:
            self._begin(log)
        assert self._channel is not None
        with os.fdopen(os.memfd_create("order"), "wb") as file, contextlib.suppress(OSError):
            pickle.dump(order, file)
            file.flush()
            with children.adopting_orphans():  # the fork becomes a child of this process
                socket.send_fds(self._channel, [b"\0"], [log.fileno(), file.fileno()])
                return int(self._channel.recv(32) or 0)
        return 0

    def _begin(self, log: IO[bytes]) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            file = theirs.fileno()
            self._process = child.new_python(_ENTRY, [str(file), str(os.getpid())], log, files=[file])


class Forked:
    """A process that a template has forked for this one. See slots.Process."""

    def __init__(self, process: int) -> None:
        self._process = process
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code as subprocess.Popen has it; None while the process runs."""
        return self._await(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the process's end. Returns the exit code."""
        code = self._await(0)
        assert code is not None
        return code

    def terminate(self) -> None:
        """Ask the process to stop."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        self._send(signal.SIGKILL)

    def _await(self, how: int) -> int | None:
        if self.returncode is None:
            process, status = os.waitpid(self._process, how)
            if process:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def _send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._process, number)


def serve(given: list[str]) -> int:
    """The template process: fork a process for each order. Returns in the forked processes, with a run's exit code.

    Args:
        given: the number of the socket to which the sweep sends orders, and the sweep's process id.
    """
    channel, parent = map(int, given)
    children.die_with_parent(parent)
    before = dict(os.environ)
    with socket.socket(fileno=channel) as orders:
        for name in _IMPORTS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        from numba.core.registry import cpu_target

        contexts: tuple[Any, ...] = (cpu_target.typing_context, cpu_target.target_context)
        for context in contexts:
            context.refresh()  # otherwise every run's first kernel would: it takes as long as importing Numba
        sys.stdout.flush()
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)  # the log belongs to the first run
        os.close(nowhere)
        gc.collect()
        gc.freeze()  # a collection in a forked process would copy the memory
        while True:
            message, files, _, _ = socket.recv_fds(orders, 1, 2)
            if not message:
                os._exit(0)
            if forked := _fork_twice():
                orders.send(str(forked).encode())
                for file in files:
                    os.close(file)
            else:
                break
    log, order = files
    return _run(log, order, before)


def _fork_twice() -> int:
    """Fork a process that becomes a child of this one's parent, since the process between them ends. Returns its id; 0
    in the process itself."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        this = os.getpid()
        process = os.fork()
        if process == 0:
            os.close(reading)
            os.close(writing)
            while os.getppid() == this:
                time.sleep(0.0005)
            return 0
        os.write(writing, str(process).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(between, 0)
    with os.fdopen(reading, "rb") as answer:
        return int(answer.read())


def _run(log: int, order: int, before: dict[str, str]) -> int:
    """Become the process of a run, and run it. Returns the exit code.

    Args:
        before: the environment variables before the imports, which have set others.
    """
    os.setsid()
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    os.lseek(order, 0, os.SEEK_SET)
    with os.fdopen(order, "rb") as file:
        given: Order = pickle.load(file)
    for name in before.keys() - given.environment.keys():
        os.environ.pop(name, None)
    os.environ.update(dict(given.environment.items() - before.items()))
    sys.path[:] = given.path
    return child.main(given.arguments)
