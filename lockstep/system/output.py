"""Output to the user. A run continues if its output no longer has a reader."""

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
    """Raised by the command line's parser after it has printed help or an error."""


def print_line(text: str, stream: TextIO | None) -> None:
    """Print a line. If the stream's reader is gone, as `tee` is after Ctrl-C, or its disk is full, this and all later
    output is discarded."""
    if stream is None:
        return
    try:
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            print(text.encode(stream.encoding, "replace").decode(stream.encoding), file=stream, flush=True)
    except (BlockingIOError, RuntimeError):
        # The pipe is full and no reader waits, or a signal handler has interrupted a write. This line is lost, but the
        # next one may arrive.
        pass
    except (OSError, ValueError):  # ValueError: the stream was closed
        silence(stream)


def print_warning(text: str) -> None:
    """Warn the user, on standard error."""
    print_line(f"warning: {text}", sys.stderr)


def add_note(error: BaseException, text: str) -> None:
    """Let a traceback of an error end with this text. In Python 3.10, errors have no notes, so it is printed now."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        print_line(text, sys.stderr)


def silence(stream: IO[str]) -> None:
    """Discard all further writes to a stream, so that Python raises no error when it shuts down."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, descriptor)
        finally:
            os.close(nowhere)


def reserve_streams() -> None:
    """Redirect standard streams that were closed at the start of this process to os.devnull. Otherwise a file or pipe
    would get their numbers and receive the output of libraries and child processes."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(nowhere, True)


def own_streams() -> None:
    """Make Python print to duplicated descriptors, since an environment may close or redirect descriptors 1 and 2, for
    example to silence a simulator."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if isinstance(stream, io.TextIOWrapper) and stream.fileno() == number:
                stream.flush()
                setattr(sys, name, _like(stream, os.dup(number)))


def _like(stream: io.TextIOWrapper, descriptor: int) -> TextIO:
    """A stream like another one that prints to a descriptor, and does not close it."""
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115 - open as long as the process lives
    return io.TextIOWrapper(
        raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )


@contextlib.contextmanager
def keeping_streams() -> Iterator[None]:
    """Restore Python's standard streams at the end, since users' code may replace or close them."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    numbers = {}
    for name, stream in before.items():
        with contextlib.suppress(OSError, ValueError, AttributeError):  # some streams have no file
            numbers[name] = stream.fileno()
    try:
        yield
    finally:
        for name, stream in before.items():
            if name in numbers and isinstance(stream, io.TextIOWrapper) and stream.closed:
                stream = _like(stream, numbers[name])
            setattr(sys, name, stream)


class PatientConsole(Console):
    """A console that survives the loss of its reader. rich's own console would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)


def on_terminal() -> bool:
    """Whether standard output is a terminal that supports drawing."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def reader_gone() -> bool:
    """Whether standard output is a pipe or a socket without a reader."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # it is not a file
        return False
