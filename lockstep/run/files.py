"""Files that a crash cannot leave half written, and that two processes do not write at once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lockstep.config.settings import SettingsError

_locks: set[int] = set()
"""Descriptors of the files that this process has locked."""


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that its name holds the old contents or the new ones, never a part of them."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk even this much is missed
        raise
    os.replace(partial, path)


def set_aside(path: Path, why: str) -> Path:
    """Rename a file or folder to `<name>.<why>`, or to `<name>.<why>-2` and so on if that exists."""
    target, number = path.with_name(f"{path.name}.{why}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{why}-{number}")
    return path.rename(target)


def read_objects(data: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each complete line of a file that holds a JSON object a line, with the object; None where it is damaged, as by a
    power failure. What follows the last line's end is left out: it may be being written."""
    for line in data.split(b"\n")[:-1]:
        found = None
        with contextlib.suppress(ValueError):
            found = json.loads(line)
        yield line + b"\n", found if isinstance(found, dict) else None


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Explain why something that a user named cannot be written.

    Raises:
        SettingsError: the file system refuses it.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        remedy = "make room there" if is_full(error) else "make this one writable"
        remedy = "choose a shorter name" if error.errno == errno.ENAMETOOLONG else f"choose another place, or {remedy}"
        raise SettingsError(f"Cannot write {path}: {why}. {remedy.capitalize()}.") from error


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk, a quota, or a limit of file sizes (ulimit -f) is the reason of an error."""
    reasons = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
    while error is not None:
        told = str(error) if isinstance(error, RuntimeError) else ""  # of a worker process, whose error came as text
        if (isinstance(error, OSError) and error.errno in reasons) or any(os.strerror(n) in told for n in reasons):
            return True
        error = error.__cause__ or error.__context__
    return False


def sync(path: Path) -> None:
    """Make a file's contents, or a folder's entries, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(file: IO[Any], seconds: float) -> Iterator[bool]:
    """Hold an open file's lock; False if another process held it for so many seconds. The lock goes with this process,
    whatever ends that, and even if processes that it forked live on.

    flock rather than lockf, whose locks a process loses as soon as anything in it closes the file, as a tool does that
    copies the folder.

    Raises:
        OSError: the file system has no locks.
    """
    descriptor, mine = file.fileno(), locked_within(file.fileno(), seconds)
    if mine:
        _locks.add(descriptor)
    try:
        yield mine
    finally:
        _locks.discard(descriptor)


def _release_locks() -> None:
    """In a process that was forked from this one, as by an environment: it shares the open files, and with them the
    locks."""
    if _locks:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in _locks:
            os.dup2(nowhere, descriptor, inheritable=False)  # not closed: whoever knows the number may still close it
        os.close(nowhere)
        _locks.clear()


os.register_at_fork(after_in_child=_release_locks)


def open_in(path: Path) -> list[int]:
    """The processes of this machine that have a file open, as far as this one may see it."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), path.stat()):
                found.add(int(link.parts[2]))
    return sorted(found)


def locked_within(file: int, seconds: float, *, shared: bool = False) -> bool:
    """Lock an open file, with others that share the lock or alone; False if it stayed locked for so many seconds. The
    lock goes with its process, whatever ends that.

    Raises:
        OSError: the file system has no locks.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        else:
            return True
