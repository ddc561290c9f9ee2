"""Memory that processes share. The system frees it when the last of them ends in any way.

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
"""Alignment of torch's own allocations, in bytes. Kernels may choose their code path by alignment."""


class Arena:
    """Allocates tensors from one buffer, one after the other. Without a buffer it only counts their bytes.

    Processes that allocate the same tensors in the same order from shared memory get the same memory.
    """

    def __init__(self, buffer: Tensor | None = None) -> None:
        self._buffer = buffer
        self.size = 0
        """Bytes allocated so far."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate the next tensor. New memory is zero. This does not clear used memory."""
        begin = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.size = begin + math.prod(shape) * dtype.itemsize
        if self._buffer is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._buffer[begin : self.size].view(dtype).view(shape)


class PrivateArena(Arena):
    """Allocates private tensors of this process. Pinned tensors can be copied to a GPU while it computes."""

    def __init__(self, *, pinned: bool = False) -> None:
        super().__init__()
        self._pinned = pinned

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._pinned)


class SharedMemory:
    """An anonymous file, passed to child processes when they start (as an argument of Process).

    The process that starts them need not know the file's size: each process maps as much as it needs, and the file
    grows.
    """

    _descriptor = -1

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = _anonymous_file()
        self._descriptor = descriptor

    def map(self, layout: Callable[[Arena], Any], *, pinned: bool = False) -> Any:
        """Map the tensors that `layout` allocates from an arena. Every process must use the same layout.

        Args:
            layout: allocates the tensors; it is called twice.
            pinned: whether to pin the memory, for copies to and from a GPU.

        Returns:
            The result of layout.
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
        """Hold a lock that excludes other processes. The system releases it when the process ends."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file. Existing mappings stay valid."""
        descriptor, self._descriptor = self._descriptor, -1  # first, since two threads may close it at the same time
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._descriptor),)


class PrivateMemory:
    """Memory of one process, with the interface of SharedMemory for its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def map(self, layout: Callable[[Arena], Any]) -> Any:
        """Allocate new tensors with layout."""
        return layout(PrivateArena())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock that excludes other threads."""
        with self._lock:
            yield


class SharedCounts:
    """Whole numbers, initially 0, that processes share. They are passed to processes like SharedMemory."""

    def __init__(self, count: int, memory: SharedMemory | None = None) -> None:
        self._memory = SharedMemory() if memory is None else memory
        self.values: Any = self._memory.numbers(count)
        """Read and write them by index."""

    def close(self) -> None:
        """Close the file, so that no more processes can get it. Existing mappings stay valid."""
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
