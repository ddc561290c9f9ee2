"""Memory that processes share, and that the system frees with the last of them, however they end.

It has no name in a file system, so it cannot be left behind, and the limits of /dev/shm do not apply to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Alignment in bytes of torch's own allocations: kernels may choose their code path by alignment."""


class Arena:
    """Allocates tensors from one buffer, one after the other. Without a buffer it only counts their bytes.

    Processes that ask for the same tensors in the same order get the same memory.
    """

    def __init__(self, buffer: Tensor | None = None) -> None:
        self._buffer = buffer
        self.size = 0
        """Bytes given out so far."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """The next tensor. Fresh memory is zero; nothing is cleared here."""
        begin = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.size = begin + math.prod(shape) * dtype.itemsize
        if self._buffer is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._buffer[begin : self.size].view(dtype).view(shape)


class PrivateArena(Arena):
    """Allocates tensors of this process alone; pinned ones can be copied to a GPU while it computes."""

    def __init__(self, *, pinned: bool = False) -> None:
        super().__init__()
        self._pinned = pinned

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._pinned)


class SharedMemory:
    """An anonymous file, passed to child processes when they start (as an argument of Process).

    The process that starts them need not know its size: each process maps as much as it needs, and the file grows.
    """

    _descriptor = -1

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = _anonymous_file()
        self._descriptor = descriptor

    def map(self, layout: Callable[[Arena], Any], *, pinned: bool = False) -> Any:
        """Map the tensors that layout allocates from an arena; every process must give the same layout.

        pinned: whether this process will copy it to and from a GPU.
        """
        count = Arena()
        layout(count)
        size = max(1, count.size)
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)
        buffer = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
        if pinned:
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), size, 0))
        return layout(Arena(buffer))

    def numbers(self, count: int) -> Any:
        """A ctypes array of this many whole numbers, in this memory."""
        kind = ctypes.c_uint64 * count
        os.ftruncate(self._descriptor, ctypes.sizeof(kind))
        return kind.from_buffer(mmap.mmap(self._descriptor, ctypes.sizeof(kind)))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes that call this out; the lock disappears with the process."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file; existing mappings stay."""
        descriptor, self._descriptor = self._descriptor, -1  # first, since two threads may close it at the same time
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._descriptor),)


class PrivateMemory:
    """Memory of one process, which its threads use as processes use SharedMemory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def map(self, layout: Callable[[Arena], Any]) -> Any:
        """New tensors, as layout allocates them."""
        return layout(PrivateArena())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads that call this out."""
        with self._lock:
            yield


class SharedCounts:
    """Whole numbers, initially 0, that processes share; passed to them like SharedMemory."""

    def __init__(self, count: int, memory: SharedMemory | None = None) -> None:
        self._memory = SharedMemory() if memory is None else memory
        self.values: Any = self._memory.numbers(count)
        """Read and write them by index."""

    def close(self) -> None:
        """Pass it to no more processes; existing mappings stay."""
        self._memory.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedCounts, (len(self.values), self._memory)


def _received(descriptor: Any) -> SharedMemory:
    return SharedMemory(descriptor.detach())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lockstep")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
