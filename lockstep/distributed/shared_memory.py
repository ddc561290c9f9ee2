"""Memory that processes share, and that the system frees with the last of them, however they end.

It has no name in a file system, so nothing can be left behind, and the limits of /dev/shm do not apply to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes: where torch's own allocations begin, since kernels may choose their code path by alignment."""


class Arena:
    """Gives out tensors of one buffer, one behind the other. Without a buffer it only counts their bytes.

    Processes that ask for the same tensors in the same order get the same memory.
    """

    def __init__(self, buffer: Tensor | None = None) -> None:
        self._buffer = buffer
        self.size = 0
        """Bytes given out so far."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """The next tensor. The memory is zero until somebody writes to it; nothing is cleared here."""
        begin = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.size = begin + math.prod(shape) * dtype.itemsize
        if self._buffer is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._buffer[begin : self.size].view(dtype).view(shape)


class PrivateArena(Arena):
    """Gives out tensors of this process alone; pinned ones can be copied to a GPU while it computes."""

    def __init__(self, *, pinned: bool = False) -> None:
        super().__init__()
        self._pinned = pinned

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._pinned)


class SharedMemory:
    """An anonymous file, handed to child processes when they are started (as an argument of Process).

    Whoever starts them need not know its size: each process maps as much as it says, and the file grows to that.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = _anonymous_file()
        self._descriptor = descriptor

    def map(self, layout: Callable[[Arena], Any], *, pinned: bool = False) -> Any:
        """What layout allocates from an arena, in this memory; every process must give the same layout.

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
        """A ctypes array of as many whole numbers, in this memory."""
        kind = ctypes.c_uint64 * count
        os.ftruncate(self._descriptor, ctypes.sizeof(kind))
        return kind.from_buffer(mmap.mmap(self._descriptor, ctypes.sizeof(kind)))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out that ask for the same; the lock goes with the process."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Forget the file; what is mapped stays."""
        descriptor, self._descriptor = self._descriptor, -1  # first: threads may close it at the same time
        if descriptor >= 0:
            os.close(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._descriptor),)


class SharedCounts:
    """Whole numbers, all 0 at first, that processes share; handed to them as SharedMemory is."""

    def __init__(self, count: int, memory: SharedMemory | None = None) -> None:
        self._memory = SharedMemory() if memory is None else memory
        self.values: Any = self._memory.numbers(count)
        """To be read and written by index."""

    def close(self) -> None:
        """Hand it to no more processes; what is mapped stays."""
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
