"""Reads and cuts metrics.jsonl, which has one row for each iteration, and others for evaluations."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from lockstep.config.settings import SettingsError
from lockstep.run.files import read_objects, reading, write_whole

_END = 2**16
"""The number of bytes at the end of metrics.jsonl that are read for its last rows."""


def read_rows(path: Path) -> list[dict[str, float | None]]:
    """The complete rows of metrics.jsonl.

    Raises:
        SettingsError: the file cannot be read, or a row is damaged.
    """
    with reading(path):
        data = path.read_bytes()
    found = []
    for number, (_, values) in enumerate(read_objects(data), 1):
        numbers = values is not None and all(x is None or isinstance(x, (int, float)) for x in values.values())
        if values is None or not numbers or iteration_of(values) is None:
            raise SettingsError(
                f"Line {number} of {path} is damaged: train did not write it. Remove the line, which only loses the "
                "metrics of one iteration."
            )
        found.append(values)
    return found


def diverged(path: Path) -> list[str]:
    """Names of the losses that are NaN or infinite in the last row of metrics.jsonl that has losses."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
        for _, values in reversed(list(read_objects(file.read()))):
            losses = [name for name in values or () if name.startswith("loss/")]
            if values and losses:
                return [name for name in losses if values[name] is None]
    return []


def keep_rows(path: Path, iterations: int) -> None:
    """Keep the rows of the first iterations, which a resumed run does not repeat. Damaged rows are removed."""
    if path.is_file():
        found = ((line, iteration_of(row)) for line, row in read_objects(path.read_bytes()))
        write_whole(path, b"".join(line for line, done in found if done is not None and done <= iterations))


def iteration_of(row: dict[str, Any] | None) -> int | None:
    """The number of iterations after which a row was written; None for a damaged row."""
    done = None if row is None else row.get("iteration")
    return done if isinstance(done, int) else None
