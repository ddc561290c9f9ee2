"""Writes and checks the rows of metrics.jsonl: one for each iteration, and others for evaluations.

The ledger proves the results of a run. It does not contain the metrics, which depend on time. So a checkpoint contains
a seal of them: the size and the SHA-256 of the file so far.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.run import checkpoint
from lockstep.run.files import read_objects, reading, set_aside, write_whole
from lockstep.run.folder import RunFolder
from lockstep.run.rows import iteration_of, keep_rows


class Rows:
    """Appends rows to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        before = path.read_bytes() if path.exists() else b""
        self._file = path.open("ab")
        self._size, self._hash = len(before), hashlib.sha256(before)

    def append(self, row: str) -> None:
        """Write one row, which must be a single line, and flush it."""
        data = row.encode() + b"\n"
        self._file.write(data)
        self._file.flush()
        self._size += len(data)
        self._hash.update(data)

    def seal(self) -> dict[str, Any]:
        """Make the rows so far survive a power failure. Returns the seal for a checkpoint."""
        os.fsync(self._file.fileno())
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}

    def close(self) -> None:
        self._file.close()


def sealed(folder: RunFolder, saved: checkpoint.Checkpoint) -> bool:
    """Whether the rows up to a checkpoint have not changed since it was written."""
    with reading(folder.metrics):
        return "metrics" in saved.meta and folder.metrics.is_file() and _matches(folder.metrics, saved.meta["metrics"])


def fault(folder: RunFolder, iterations: int, found: Sequence[Path] = ()) -> str | None:
    """A sentence about a fault in the rows of the first iterations; None if each row exists once and is unchanged.

    Args:
        found: checkpoints whose seals the file must match, oldest first. Checkpoints of earlier versions have no seals.
    """
    try:
        data = folder.metrics.read_bytes()
    except OSError as error:
        return f"It cannot be read: {error.strerror}."
    wrong = _wrong_row(data, iterations)
    if wrong is not None:
        return wrong
    before = 0
    for done, seal in _seals(found):
        if not _matches(data, seal):
            return f"A row of iterations {before + 1} to {done}, or of an evaluation among them, was changed."
        if seal.get("damage"):
            return f"When the run was resumed, this damage was found: {seal['damage']}"
        before = done
    return None


def keep(folder: RunFolder, iterations: int, seal: dict[str, Any] | None) -> str | None:
    """Cut off the rows that a run resumed after this many iterations will repeat. A damaged file is set aside, and its
    readable rows are copied to a new file.

    Args:
        seal: the checkpoint's seal, if it has one.

    Returns:
        A sentence about lost or changed rows; None if there are none.
    """
    path = folder.metrics
    data = path.read_bytes() if path.is_file() else b""
    if seal is not None and _matches(data, seal):
        os.truncate(path, seal["bytes"])
        return seal.get("damage")
    damage = fault(folder, iterations)
    if seal is not None:
        damage = damage or f"A row of iterations 1 to {iterations}, or of an evaluation among them, was changed."
    if damage is None:
        keep_rows(path, iterations)
        return None
    if path.exists():
        set_aside(path, "damaged")
    kept = dict.fromkeys(line for line, row in read_objects(data) if iteration_of(row) in range(1, iterations + 1))
    write_whole(path, b"".join(kept))  # repeated lines are written once
    return seal.get("damage") if seal is not None and _matches(path, seal) else damage


def _wrong_row(data: bytes, iterations: int) -> str | None:
    due = 1
    for number, (_, row) in enumerate(read_objects(data), 1):
        done = iteration_of(row)
        if due > iterations and (done is None or done >= due):
            break  # a crash may have cut off the rest, which will be repeated
        if row is None or done is None:
            return f"Line {number} is damaged: it should be the row of iteration {due}."
        expected = due - 1 if "eval/score" in row else due  # an evaluation follows its iteration
        if done < expected:
            return f"Line {number} repeats iteration {done}."
        if done > expected:
            last = done if expected < due else done - 1
            return f"{_missing(due, last)} before line {number}."
        due = done + 1
    return None if due > iterations else f"{_missing(due, iterations)}."


def _missing(first: int, last: int) -> str:
    return f"Iteration {first} is missing" if first == last else f"Iterations {first} to {last} are missing"


def _matches(rows: bytes | Path, seal: dict[str, Any]) -> bool:
    data = rows.read_bytes() if isinstance(rows, Path) else rows
    return hashlib.sha256(data[: seal["bytes"]]).hexdigest() == seal["sha256"]


def _seals(found: Sequence[Path]) -> Iterator[tuple[int, dict[str, Any]]]:
    for path in found:
        with contextlib.suppress(checkpoint.CheckpointError):  # other code reports the damage
            saved = checkpoint.open_checkpoint(path, only=())
            if "metrics" in saved.meta:
                yield saved.iteration, saved.meta["metrics"]
