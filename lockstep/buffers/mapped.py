"""Memory maps of the arrays of an .npz file. Processes of one machine share the pages that they read."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO

import numpy as np

_LOCAL_HEADER = 30
"""Bytes of a zip file's local header before the name (APPNOTE.TXT of PKWARE, section 4.3.7)."""


def read_arrays(path: Path, only: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by name. Other files in it are ignored.

    Uncompressed arrays, as numpy.savez writes them, are memory maps: the system keeps one copy of their pages for all
    processes, and drops it when memory is short. Others are read into memory.

    A write to a map is private to this process. The file must not be overwritten while maps exist.

    Args:
        only: names of the arrays to read; None for all.

    Raises:
        OSError, ValueError, AttributeError, TypeError, BadZipFile: the file cannot be read as an .npz file.
    """
    mapped = mapped_arrays(path, only)
    with np.load(path, allow_pickle=False) as file:
        names = file.files if only is None else [name for name in file.files if name in only]
        found = {name: mapped[name] if name in mapped else file[name] for name in names}
    return {name: x for name, x in found.items() if isinstance(x, np.ndarray)}


def mapped_arrays(path: Path, only: Collection[str] | None) -> dict[str, np.ndarray]:
    """The arrays of read_arrays that are maps. Their contents are not read yet. Raises the same errors."""
    with zipfile.ZipFile(path) as file, path.open("rb") as raw:
        plain = [info for info in file.infolist() if not info.compress_type and info.filename.endswith(".npy")]
        stored = {info.filename.removesuffix(".npy"): info for info in plain}
        found = {name: _map(path, raw, info) for name, info in stored.items() if only is None or name in only}
    return {name: x for name, x in found.items() if x is not None}


def _map(path: Path, raw: IO[bytes], info: zipfile.ZipInfo) -> np.ndarray | None:
    """A map of a stored member; None if this is not an array in C order without objects, or if it is empty."""
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
