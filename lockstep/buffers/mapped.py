"""Arrays of an .npz file that stay in the file: processes of one machine share what they read of it."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO

import numpy as np

_LOCAL_HEADER = 30
"""Bytes of a zip file's local header before the name (APPNOTE.TXT of PKWARE, section 4.3.7)."""


def read_arrays(path: Path, only: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by name. Uncompressed ones, as numpy.savez writes them, are memory maps: the system
    keeps one copy of their pages for all processes, and drops it when memory is short. Others are read.

    Writing to a map changes this process alone. The file must not be overwritten while maps exist.

    Args:
        only: names of the arrays to read; None for all.

    Raises:
        OSError, ValueError, AttributeError, TypeError, BadZipFile: it is no such file.
    """
    mapped = mapped_arrays(path, only)
    with np.load(path, allow_pickle=False) as file:
        names = file.files if only is None else [name for name in file.files if name in only]
        return {name: mapped[name] if name in mapped else file[name] for name in names}


def mapped_arrays(path: Path, only: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Those arrays of read_arrays that are maps, of which nothing is read yet. Raises the same errors."""
    with zipfile.ZipFile(path) as file, path.open("rb") as raw:
        stored = {info.filename.removesuffix(".npy"): info for info in file.infolist() if not info.compress_type}
        found = {name: _map(path, raw, info) for name, info in stored.items() if only is None or name in only}
    return {name: x for name, x in found.items() if x is not None}


def _map(path: Path, raw: IO[bytes], info: zipfile.ZipInfo) -> np.ndarray | None:
    """A stored member as a map; None if it is no array of numbers in C order, or empty."""
    raw.seek(info.header_offset)
    header = raw.read(_LOCAL_HEADER)
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    raw.seek(info.header_offset + _LOCAL_HEADER + name + extra)
    version = np.lib.format.read_magic(raw)
    if version != (1, 0):
        return None
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(raw)
    if fortran or dtype.hasobject or 0 in shape:
        return None
    return np.memmap(path, dtype, "c", raw.tell(), shape)
