"""The number of threads with which NumPy and SciPy compute products, in their library OpenBLAS.

The bits of large products depend on it. By default, it is the number of cores that the process may use, so it depends
on the machine and on whether a layout pins processes to cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

_VARIABLE = "OPENBLAS_NUM_THREADS"
"""The environment variable that OpenBLAS reads when it is loaded."""
_TORCH = str(Path(torch.__file__).parent)
"""Torch's own libraries begin with this. torch.set_num_threads sets their threads."""


def set_threads(threads: int) -> None:
    """Set the number of threads of products, also for libraries that are loaded later."""
    os.environ[_VARIABLE] = str(threads)
    for _, write in _loaded():
        write(threads)


@contextlib.contextmanager
def threads_restored() -> Iterator[None]:
    """Restore the number of threads afterwards."""
    variable, before = os.environ.get(_VARIABLE), [(write, read()) for read, write in _loaded()]
    try:
        yield
    finally:
        for write, threads in before:
            write(threads)
        if variable is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = variable


def _loaded() -> list[tuple[Callable[[], int], Callable[[int], None]]]:
    """The functions that read and write the number of threads, of every OpenBLAS in this process except torch's."""
    maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "openblas" in line}
    found = []
    for path in sorted(paths):
        if path.startswith(_TORCH):
            continue
        with contextlib.suppress(OSError):  # a file that is no library
            library = ctypes.CDLL(path)
            for prefix in ("", "scipy_"):
                for suffix in ("", "64_"):  # of libraries with indices of 64 bits
                    names = (f"{prefix}openblas_{what}_num_threads{suffix}" for what in ("get", "set"))
                    with contextlib.suppress(AttributeError):
                        read, write = (getattr(library, name) for name in names)
                        found.append((read, write))
    return found
