"""Child processes, which ignore Ctrl-C and end with their parent, and signals that request this process to stop."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import math
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
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.system.output import print_line

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHOWING = 0.3
"""Seconds that a process has to print its stack, so that two processes do not print at once."""
_NOTICING = 1.0
"""Seconds that code which waits for a process's answer has to report the process's death in more detail."""

_CLOSED = 5.0
"""Seconds that a process has to end after it has closed its pipe, so that its exit code is known."""
_OTHER_FILES = 512
"""Files that a process opens in addition to its connections to other processes."""

_ECHO = 1.0
"""Seconds in which a further SIGTERM counts as a part of the first request. `timeout` sends one to the process and one
to its group, and a shutdown also signals processes that forward the signal."""
_CTRL_C_ECHO = 0.05
"""The same for SIGINT. It is shorter than the time between two keystrokes of an impatient user."""
_ENDING = 10.0
"""Seconds that a process has to clean up after a request to end at once."""
_INTERRUPTED = 130
"""Exit code of a process that ends on request."""

_report_loss: Callable[[str], Any] | None = None
_before: dict[int, Any] = {}
"""By signal number: the handler before this process installed its own."""
_forking = threading.local()
"""In `mask`: the signals that a thread had blocked before it began to fork."""


def start(target: Callable[..., Any], args: tuple[Any, ...], name: str) -> Any:
    """Start a child process that runs target(*args).

    The child ignores Ctrl-C, which also reaches children, SIGTERM and SIGHUP, since the parent decides when it ends.
    Programs that the child starts do not ignore them. The child ends as soon as the parent is gone. It prints its stack
    when it crashes, and on request by show_stack.
    """
    resource_tracker.ensure_running()  # otherwise it would start below, and unblock the signals
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(_Behavior(), target, *args), name=name)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except BaseException:  # a signal that came meanwhile may raise KeyboardInterrupt, and nobody else knows the process
        if process.pid is not None:
            process.kill()
            process.join()
        raise
    return process


class _Behavior:
    """Sets the child's behavior when it is unpickled. The target is unpickled later, since its import of torch takes
    seconds."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _behave, (os.getpid(),)


def _run(_: None, target: Callable[..., Any], *args: Any) -> None:
    target(*args)


def _behave(parent: int) -> None:
    die_with_parent(parent)
    ignore(_STOPS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    atexit.register(gc.freeze)  # with torch loaded, the garbage collection at exit takes half a second
    if sys.stderr is not None:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=False)


def _ignore(number: int, frame: object) -> None:
    """A handler that does nothing. Programs that this process starts would inherit SIG_IGN, so that terminate() would
    not end them."""


def ignore(numbers: Iterable[int]) -> None:
    """Make this process, but not the programs that it starts, ignore signals."""
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            _before[number] = signal.signal(number, _ignore)
            signal.siginterrupt(number, False)  # native code may not expect interrupted calls


def ignores(number: int) -> bool:
    """Whether ignore set the current handler of a signal."""
    return signal.getsignal(number) is _ignore


def _before_fork() -> None:
    if _before:
        # Until the child has its own handlers. Before, a signal to the child would run this process's handlers.
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def _after_fork() -> None:
    if (mask := _forking.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forked() -> None:
    """Restore the previous signal handlers in a process that was forked from this one, perhaps by an environment."""
    if _before:
        signal.set_wakeup_fd(-1)
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked)


@contextlib.contextmanager
def handling_stops(handle: Callable[[int], None], *, ctrl_c: bool = True) -> Iterator[None]:
    """Handle the signals that request this process to stop: Ctrl-C, a shutdown and, unless the process runs under
    nohup, a closed terminal.

    Args:
        handle: called with the signal's number.
        ctrl_c: whether to include Ctrl-C.
    """
    numbers = [number for number in _STOPS if ctrl_c or number != signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    outside = dict(_before)
    # None: a program in which Python is embedded handles the signal, and Python could not restore its handler.
    handlers = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}
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
        patient: whether a SIGTERM never counts as a second request.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self._echoes: dict[int, float] = {signal.SIGINT: _CTRL_C_ECHO, signal.SIGTERM: math.inf if patient else _ECHO}
        self._first: float | None = None

    def insists(self, number: int) -> bool:
        """Record a signal. Returns whether it is a further request, so that the process should end at once. After the
        first signal, every Ctrl-C and every SIGTERM is one, unless it was sent together with the first request."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return now - self._first > self._echoes.get(number, math.inf)


@contextlib.contextmanager
def ending_for_certain(at_once: Callable[[int], bool]) -> Iterator[None]:
    """Start a thread that ends this process if it is still running long after a SIGTERM that requests it to end at
    once. The process may hang in native code, where Python handles no signals, or in an environment's close.

    Args:
        at_once: whether the signal of this number requests the process to end at once.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            insist = [at_once(number) for number in os.read(reading, 64) if number in _STOPS]
            if any(insist) and not ended.wait(_ENDING):
                print_line(
                    f"This process is still running {_ENDING:g} seconds after SIGTERM, and is killed now.", sys.stderr
                )
                os._exit(_INTERRUPTED)
        os.close(reading)

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        with contextlib.suppress(BrokenPipeError):  # the thread has already seen the end
            os.write(writing, b"\0")  # wakes up the thread
        os.close(writing)


def forget_terminal() -> None:
    """Stop printing to a terminal. It may be gone, and then printing would raise an error."""
    descriptors = {1, 2}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptors.add(stream.fileno())
    with open(os.devnull, "wb") as nowhere:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(nowhere.fileno(), descriptor)


def allow_files(more: int) -> int:
    """Raise this process's limit of open files (ulimit -n) so that it can open `more` files, as far as the system
    allows.

    Returns:
        How many files this process can open in addition to those that are open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    needed = opened + more + _OTHER_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft - opened


def pin(process: Any, index: int, count: int) -> None:
    """Pin process number `index` of `count`, which was just started, to its share of this process's cores."""
    cores = sorted(os.sched_getaffinity(0))
    workers = min(count, len(cores))
    begin, end = (len(cores) * (index % workers + i) // workers for i in (0, 1))
    with contextlib.suppress(ProcessLookupError):  # its death is reported elsewhere
        os.sched_setaffinity(process.pid, cores[begin:end])


def yield_to_others(process: Any, nice: int) -> None:
    """Raise the niceness of a process that was just started above this one's. Its threads and children inherit it.

    Args:
        nice: the difference, 0 to 19. The system limits niceness to 19.
    """
    if nice:
        with contextlib.suppress(ProcessLookupError):  # its death is reported elsewhere
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel end this process as soon as the parent is gone for any reason, even if this process hangs in
    native code.

    Args:
        parent: the parent's process id, if multiprocessing does not know it yet.
    """
    if parent is None:
        process = multiprocessing.parent_process()
        assert process is not None and process.pid is not None
        parent = process.pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """A context in which descendants of this process become its children when their parents end."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def show_stack(process: BaseProcess, name: str) -> None:
    """Make a child process print its stack to standard error."""
    if process.pid is not None and process.is_alive():
        print_line(f"\n{name} (process {process.pid}), stack:", sys.stderr)
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_SHOWING)


def first_answers(
    processes: Sequence[BaseProcess],
    pipes: Sequence[Connection],
    missing: Iterable[int],
    others: Sequence[Any] = (),
    timeout: float = 1.0,
) -> tuple[dict[int, Any], dict[int, str]]:
    """Wait until one of several child processes answers or ends, or until the timeout.

    Args:
        processes: all child processes.
        pipes: for each process, the pipe through which it sends its answer.
        missing: the indices of those that have not answered.
        others: further objects whose readiness ends the wait.
        timeout: seconds.

    Returns:
        The answers that have arrived, and the death reports of processes that ended without one, by index.
    """
    missing = list(missing)
    wait([*others, *(end for i in missing for end in (pipes[i], processes[i].sentinel))], timeout)
    answers, deaths = {}, {}
    for i in missing:
        gone = not processes[i].is_alive()  # check this first, since a message sent before its death still counts
        try:
            if pipes[i].poll():
                answers[i] = pipes[i].recv()
            elif gone:
                deaths[i] = death_report(processes[i])
        except (EOFError, OSError):  # OSError: it died before it read its messages
            processes[i].join(_CLOSED)
            deaths[i] = death_report(processes[i])
    return answers, deaths


def report_losses(report: Callable[[str], Any]) -> None:
    """Set the function that `watch` calls in this process from a separate thread. Without one, `watch` does nothing."""
    global _report_loss
    _report_loss = report


def watch(processes: Sequence[BaseProcess], what: str, noticed: Callable[[], bool]) -> None:
    """Report the first death among child processes, even if this process does not communicate with them for a long
    time.

    Args:
        what: describes the processes. The report begins with it.
        noticed: whether other code has noticed or caused the death. It is called a moment after the death.
    """

    def report_death() -> None:
        wait([process.sentinel for process in processes])
        time.sleep(_NOTICING)
        if not noticed() and _report_loss is not None:
            _report_loss(next(f"{what} {death_report(process)}" for process in processes if not process.is_alive()))

    threading.Thread(target=report_death, daemon=True).start()


def signal_name(number: int) -> str:
    """The name of a signal; real-time signals have none."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


def death_report(process: BaseProcess) -> str:
    """Describes how a process ended. The subject of the sentence is missing: it is the process's name."""
    code = process.exitcode
    if code is not None and code < 0:
        name = signal_name(-code)
        hint = " (the system may have run out of memory: see dmesg)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return (
        f"ended without a message, with exit code {code}. Its last output is above. A script that starts "
        'processes must be a file that calls lockstep below if __name__ == "__main__":'
    )
