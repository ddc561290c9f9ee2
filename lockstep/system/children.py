"""Child processes, which ignore Ctrl-C and never outlive their parent, and signals that ask to stop."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.system.output import tell

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_SHOWING = 0.3
"""Seconds that a process gets to print where it stands, so that no two print at once."""
_NOTICING = 1.0
"""Seconds that whoever waits for a process's answer gets to say more of its death."""

_OTHER_FILES = 512
"""Files that a process opens beside what joins it to others."""

_ECHO = 1.0
"""Seconds within which a further SIGTERM repeats the request before it: `timeout` sends one to a process and another to
its group, and a machine that shuts down sends one to whoever passes it on, too."""
_ENDING = 10.0
"""Seconds that a process gets to clean up once it was told to end at once."""
_INTERRUPTED = 130
"""Exit code of a process that was told to end."""

_report_loss: Callable[[str], Any] | None = None
_before: dict[int, Any] = {}
"""What signals did before this process handled them, by number."""
_forking = threading.local()
"""With the signals that the thread blocked before it began to fork."""


def start(target: Callable[..., Any], args: tuple[Any, ...], name: str) -> Any:
    """Start a child process that runs target(*args).

    It ignores Ctrl-C, which reaches children too, SIGTERM and SIGHUP: the parent decides when it ends. Programs that it
    starts do not ignore them. It ends as soon as the parent is gone. It prints its stack when it crashes, or
    when show_stack asks for it.
    """
    resource_tracker.ensure_running()  # or it would be started below, and unblock the signals
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(_Behaviour(), target, *args), name=name)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return process


class _Behaviour:
    """Begins when it is unpickled: before the target, for which torch is imported, which takes seconds."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _behave, (os.getpid(),)


def _run(_: None, target: Callable[..., Any], *args: Any) -> None:
    target(*args)


def _behave(parent: int) -> None:
    die_with_parent(parent)
    ignore(_STOPS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    atexit.register(gc.freeze)  # with torch loaded, the collections while Python ends take half a second
    if sys.stderr is not None:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=False)


def _ignore(number: int, frame: object) -> None:
    """Not SIG_IGN, which the programs that this process starts would inherit: terminate() would not end them."""


def ignore(numbers: Iterable[int]) -> None:
    """Have this process, but not the programs that it starts, ignore signals."""
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            _before[number] = signal.signal(number, _ignore)
            signal.siginterrupt(number, False)  # for native code, which may not expect that a call is interrupted


def ignores(number: int) -> bool:
    """Whether ignore was called for a signal, and has the last word."""
    return signal.getsignal(number) is _ignore


def _before_fork() -> None:
    if _before:
        # Until the child has its own handlers: one that is ended soon would take the signal for this process's.
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def _after_fork() -> None:
    if (mask := _forking.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forked() -> None:
    """In a process that was forked from this one, as by an environment: signals do there what they did before."""
    if _before:
        signal.set_wakeup_fd(-1)
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked)


@contextlib.contextmanager
def handling_stops(handle: Callable[[int], None], *, ctrl_c: bool = True) -> Iterator[None]:
    """Have signals handled that ask this process to stop: Ctrl-C, a shutdown, and a terminal that is closed, unless
    nohup wants that to be ignored.

    Args:
        handle: gets the signal's number.
        ctrl_c: whether Ctrl-C is among them.
    """
    numbers = [number for number in _STOPS if ctrl_c or number != signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    outside = dict(_before)
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    for number, handler in handlers.items():
        _before.setdefault(number, handler)
        signal.signal(number, lambda number, _: handle(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _before.clear()
        _before.update(outside)


class Requests:
    """The requests to stop that a process has received.

    Args:
        patient: a SIGTERM never asks once more.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self._patience = float("inf") if patient else _ECHO
        self._first: float | None = None

    def insists(self, number: int) -> bool:
        """Take note of a signal; whether it asks once more, so that the process is to end at once: as Ctrl-C does, and
        a SIGTERM that is not sent together with the first request."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return number == signal.SIGINT or (number == signal.SIGTERM and now - self._first > self._patience)


@contextlib.contextmanager
def ending_for_certain(at_once: Callable[[int], bool]) -> Iterator[None]:
    """Have a thread end this process if it goes on for long after a SIGTERM that asks for its end at once. It may stand
    in native code, where Python handles no signals, or in what an environment does at the end.

    Args:
        at_once: whether a signal asks for that.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            insist = [at_once(number) for number in os.read(reading, 64) if number in _STOPS]
            if any(insist) and not ended.wait(_ENDING):
                tell(f"This process has not ended {_ENDING:g} seconds after SIGTERM, and is ended now.", sys.stderr)
                os._exit(_INTERRUPTED)
        os.close(reading)

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        with contextlib.suppress(BrokenPipeError):  # it has seen that this is the end already
            os.write(writing, b"\0")  # which wakes the thread up
        os.close(writing)


def forget_terminal() -> None:
    """Print no more to a terminal, which may be gone: that would raise."""
    descriptors = {1, 2}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptors.add(stream.fileno())
    with open(os.devnull, "wb") as nowhere:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(nowhere.fileno(), descriptor)


def allow_files(more: int) -> None:
    """Raise this process's own limit of open files if so many more would not fit, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + more + _OTHER_FILES
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, needed), hard))


def pin(process: Any, index: int, count: int) -> None:
    """Keep a process that was just started, one of count, on its share of the cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    workers = min(count, len(cores))
    begin, end = (len(cores) * (index % workers + i) // workers for i in (0, 1))
    with contextlib.suppress(ProcessLookupError):  # whoever watches it will say so
        os.sched_setaffinity(process.pid, cores[begin:end])


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process as soon as the parent is gone, however that came about, and even while this
    process hangs in native code.

    Args:
        parent: its process id, where multiprocessing does not know it yet.
    """
    if parent is None:
        process = multiprocessing.parent_process()
        assert process is not None and process.pid is not None
        parent = process.pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before
        os._exit(1)


def show_stack(process: BaseProcess, name: str) -> None:
    """Have a child process print its stack to standard error."""
    if process.pid is not None and process.is_alive():
        tell(f"\n{name} (process {process.pid}), stack:", sys.stderr)
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_SHOWING)


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

    def report_death() -> None:
        wait([process.sentinel for process in processes])
        time.sleep(_NOTICING)
        if not noticed() and _report_loss is not None:
            _report_loss(next(f"{what} {death_report(process)}" for process in processes if not process.is_alive()))

    threading.Thread(target=report_death, daemon=True).start()


def death_report(process: BaseProcess) -> str:
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
