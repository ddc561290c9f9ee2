"""Text for whoever watches. Nobody watching any more is no reason to end a run."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import IO, TextIO

from rich.console import Console


class Explained(SystemExit):
    """Raised by the command line's parser once it has told the user all there is to say: help, or a mistake."""


def tell(text: str, stream: TextIO | None) -> None:
    """Print a line. If its reader has gone, as `tee` does at Ctrl-C, or the disk behind it is full, whatever follows is
    written nowhere."""
    if stream is None:
        return
    try:
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            print(text.encode(stream.encoding, "replace").decode(stream.encoding), file=stream, flush=True)
    except (BlockingIOError, RuntimeError):
        # A full pipe that nobody waits for, or, in a signal's handler, one that is being waited for: this line is lost,
        # the next may arrive.
        pass
    except (OSError, ValueError):  # ValueError: it was closed
        silence(stream)


def silence(stream: IO[str]) -> None:
    """Let whatever is written to a stream from now on go nowhere, lest Python complains while it shuts down."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, descriptor)
        finally:
            os.close(nowhere)


def reserve_streams() -> None:
    """Let standard streams that were closed when this process began lead nowhere: a file or a pipe that took their
    numbers would get what libraries and child processes print."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
            os.set_inheritable(nowhere, True)


def own_streams() -> None:
    """Have Python print to descriptors of its own: an environment may close descriptors 1 and 2, or lead them
    elsewhere, as to silence a simulator."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if isinstance(stream, io.TextIOWrapper) and stream.fileno() == number:
                stream.flush()
                setattr(sys, name, _like(stream, os.dup(number)))


def _like(stream: io.TextIOWrapper, descriptor: int) -> TextIO:
    """A stream that prints to a descriptor, and does not close it."""
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115 - kept as long as the process lives
    return io.TextIOWrapper(
        raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )


@contextlib.contextmanager
def keeping_streams() -> Iterator[None]:
    """Bring Python's standard streams back at the end, whatever users' code has made of them."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    numbers = {}
    for name, stream in before.items():
        with contextlib.suppress(OSError, ValueError, AttributeError):  # some lead to no file
            numbers[name] = stream.fileno()
    try:
        yield
    finally:
        for name, stream in before.items():
            if name in numbers and isinstance(stream, io.TextIOWrapper) and stream.closed:
                stream = _like(stream, numbers[name])
            setattr(sys, name, stream)


class PatientConsole(Console):
    """A console whose reader may go: rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)


def on_terminal() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def reader_gone() -> bool:
    """Whether standard output is a pipe, or a socket, that nobody reads any more."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # it is no file at all
        return False
