"""Text for whoever watches. Nobody watching any more is no reason to end a run."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO


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
    except (OSError, ValueError):  # ValueError: it was closed
        silence(stream)


def silence(stream: TextIO) -> None:
    """Let whatever is written to a stream from now on go nowhere, lest Python complains while it shuts down."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # it is no file at all
        return False
