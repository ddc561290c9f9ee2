"""Atomic writes of files, errors about places that cannot be used, and locks against simultaneous writers."""

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
    """Write a file atomically: after a crash, it has its old contents or the new ones, but never a part of them."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk, every byte matters
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
    """Each complete line of a file with one JSON object per line, and the object; None for a line that is damaged, for
    example by a power failure. An incomplete last line is skipped, since another process may be writing it."""
    for line in data.split(b"\n")[:-1]:
        found = None
        with contextlib.suppress(ValueError):
            found = json.loads(line)
        yield line + b"\n", found if isinstance(found, dict) else None


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Explain why a path that the user named cannot be written.

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


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Explain why a path that the user named cannot be read.

    Raises:
        SettingsError: the file system refuses it.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise SettingsError(
            f"Cannot read {error.filename or path}: {why}. Give another path, or make it readable."
        ) from error


def is_full(error: BaseException | None) -> bool:
    """Whether an error was caused by a full disk, a quota, or a limit on file sizes (ulimit -f)."""
    reasons = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
    while error is not None:
        told = str(error) if isinstance(error, RuntimeError) else ""  # a worker's error arrives as text
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
    """Hold an open file's lock. Yields False if another process still holds it after this many seconds. The system
    releases the lock when this process ends in any way, even if processes that it forked live on.

    Uses flock and not lockf: a process loses lockf's locks as soon as it closes the file anywhere, for example after
    copying the folder.

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
    """Release the locks in a process that was forked from this one, for example by an environment. It shares the open
    files, and thus the locks."""
    if _locks:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in _locks:
            os.dup2(nowhere, descriptor, inheritable=False)  # not closed, since its owner may still close it
        os.close(nowhere)
        _locks.clear()


os.register_at_fork(after_in_child=_release_locks)


def open_in(path: Path) -> list[int]:
    """The processes of this machine that have a file open and that this process may see."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), path.stat()):
                found.add(int(link.parts[2]))
    return sorted(found)


def locked_within(file: int, seconds: float, *, shared: bool = False) -> bool:
    """Lock an open file, shared or exclusively. Returns False if another process held the lock for this many seconds.
    The system releases the lock when this process ends in any way.

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
