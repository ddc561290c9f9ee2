"""Ends runs on signals after a checkpoint, and with an error if they stall."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lockstep.config.layout import Layout
from lockstep.distributed.groups import Group
from lockstep.system import children
from lockstep.system.output import print_line
from lockstep.system.supervision import StallDetector, is_unattended
from lockstep.training.context import RunStatus


@contextlib.contextmanager
def stopping_on_signals(status: RunStatus) -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a stop request. A later SIGINT or SIGTERM ends the process at once,
    and so does the first one while the run starts.

    A later SIGHUP is ignored, and so is a signal that arrives together with the first request: a shutdown sends them to
    every process, and the parent process may forward its own. In an unattended run, every further SIGTERM is
    ignored, since the parent process may forward it late, and ends the run itself if necessary.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received, overseen = (children.Requests(patient=is_unattended()) for _ in range(2))
    ended = False

    def handle(number: int) -> None:
        nonlocal ended
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            children.forget_terminal()
        if received.insists(number):
            raise KeyboardInterrupt
        if status.stop_requested() or ended:
            return
        if not status.begun():
            ended = True
            print_line(f"{name}: stopped before the first iteration.", sys.stderr)
            raise KeyboardInterrupt
        status.request_stop()
        print_line(
            f"{name}: checkpoint and stop after this iteration; a further Ctrl-C stops at once, as does a further "
            "SIGTERM.",
            sys.stderr,
        )

    def at_once(number: int) -> bool:
        insists = overseen.insists(number)
        return number == signal.SIGTERM and (insists or not status.begun())

    with children.handling_stops(handle), children.ending_for_certain(at_once):
        yield


@contextlib.contextmanager
def watched(
    fail: Callable[[str], Any],
    status: RunStatus,
    stall_timeout: float,
    group: Group | None = None,
    environments: int = 0,
) -> Iterator[None]:
    """Watch the calling thread for stalls, in another thread. Waiting for other processes of its group is not a stall.

    Args:
        fail: called with the error message if the calling thread stalls.
        environments: the number of environments of this process, which take time to make.
    """
    ended, stall = threading.Event(), StallDetector(stall_timeout, environments)
    arguments = (fail, status, ended, stall, threading.get_ident(), group or Group())
    threading.Thread(target=_watch_thread, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch_thread(
    fail: Callable[[str], Any],
    status: RunStatus,
    ended: threading.Event,
    stall: StallDetector,
    thread: int,
    group: Group,
) -> None:
    while not ended.wait(1.0):
        if group.waiting:
            stall.moved()
        now = status.steps()
        patience = stall.too_long(now, started=now > 0)
        if patience is not None:
            stack = "".join(traceback.format_stack(sys._current_frames().get(thread)))
            fail(
                f"This process has made no progress for {patience:g} seconds (Layout.stall_timeout), after {now} "
                f"steps. Its stack is:\n{stack}To allow longer, use stall_timeout=SECONDS in its layout."
            )


def no_progress(patience: float, steps: Mapping[str, Any], layout: Layout) -> str:
    """The error of a run whose processes, here with their numbers of steps, have made no progress for this many
    seconds. Their stacks have been printed."""
    counts = ", ".join(f"{name} {count}" for name, count in steps.items())
    longer = dataclasses.replace(layout, stall_timeout=Layout.stall_timeout)
    return (
        f"No process has made progress for {patience:g} seconds (Layout.stall_timeout); their step counts are: "
        f"{counts}. Their stacks are printed above: one hangs, and the others wait for it. To allow more time, use "
        f"--layout {longer},stall_timeout=SECONDS."
    )
