"""GPU memory that other processes of the machine can open. Tensors pass between processes without the CPU's memory.

The sending process owns the memory (OwnedMemory). Each reading process opens it by a handle of CUDA IPC (OpenedMemory).
GPUs wait for each other by events. Callers send a message after an event has been recorded, since its process may die
before that. A reader's host can still wait in the driver until the owner's GPU has finished its work: when it copies a
received tensor to the CPU, and when it closes memory, also to open new memory. If the owner dies meanwhile, the
supervisor of the processes must kill the reader.

https://docs.pytorch.org/docs/stable/notes/multiprocessing.html has torch's rules: the owner keeps shared memory as long
as a reader has it open, and cannot open its own handles.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from lockstep.system.output import print_line

_COUNTERS = Path("/dev/shm")
"""The folder of the files in which torch counts the readers of shared memory. Their names contain the number of the
process that shares it."""

_ENDING = 1.0
"""When a process ends, its pipes close at most this many seconds after its GPU memory is gone."""


class EventHandle(NamedTuple):
    """An event, for a process that opens it."""

    gpu: int
    handle: bytes


class Attempt:
    """Shares and opens memory as a trial. Errors are recorded and not raised, since there is another route."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """The first error."""

    def __call__(self, act: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Call a function. Returns None if it fails, or without a call if a positional argument is None."""
        try:
            return None if any(each is None for each in given) else act(*given, **options)
        except Exception as error:
            self.problem = self.problem or (str(error).strip().splitlines() or [type(error).__name__])[0]
            return None


def report_transfer(what: str, problem: str | None) -> None:
    """Print how tensors pass between processes.

    Args:
        what: the beginning of the sentence: the processes, and what they send or get.
        problem: why the memory of GPUs cannot be opened; None if it can.
    """
    route = (
        "from GPU to GPU (CUDA IPC)"
        if problem is None
        else f"through the CPU's memory, since CUDA IPC failed: {problem}"
    )
    print_line(f"{what} {route}", sys.stderr)


class OwnedMemory:
    """Memory on this process's GPU that others read. An event marks that the tensor in it is complete."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stored = _event(device)
        self._copied: list[torch.cuda.Event] = []
        """An event of each reader, which records it after it has copied the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def stored(self) -> EventHandle:
        """The event that each reader waits for."""
        return _handle(self._stored, self._device)

    def add_reader(self, copied: EventHandle) -> None:
        """From now on, wait for this reader, too, before the memory changes."""
        self._copied.append(_opened(copied))

    def reserve(self, size: int) -> bool:
        """Allocate memory for at least this many bytes if necessary. Returns whether it is new, so that readers need a
        handle."""
        if size <= self._memory.numel():
            return False
        self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return True

    def handle(self) -> Any:
        """A handle of the memory, for one reader."""
        return lend(self._memory)

    def put(self, data: Tensor) -> None:
        """Store uint8 [n]. Before, all readers must have announced that they copied the previous tensor."""
        stream = torch.cuda.current_stream(self._device)
        for copied in self._copied:
            stream.wait_event(copied)
        self._memory[: data.numel()].copy_(data)
        self._stored.record(stream)


class OpenedMemory:
    """Memory on another process's GPU, which may be this process's GPU, too."""

    def __init__(self, stored: EventHandle, device: torch.device) -> None:
        self._device = device
        self._stored, self._copied = _opened(stored), _event(device)
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def copied(self) -> EventHandle:
        """The event that the owner waits for."""
        return _handle(self._copied, self._device)

    def open(self, handle: Any) -> None:
        """Read this memory from now on."""
        self._memory = reductions.rebuild_cuda_tensor(*handle)

    def copy(self, into: Tensor) -> None:
        """Copy the tensor that the owner has announced into uint8 [n] on this process's GPU."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._stored)
        into.copy_(self._memory[: into.numel()], non_blocking=True)
        self._copied.record(stream)


def lend(x: Tensor) -> Any:
    """A handle of a GPU's tensor for one process, which must open it. The memory is kept until then, and its content
    must not change."""
    return reductions.reduce_tensor(x)[1]


def copy_of(handle: Any, device: torch.device) -> Tensor:
    """A copy, on this process's GPU, of a tensor that another process lends. The GPU waits until it is complete."""
    return reductions.rebuild_cuda_tensor(*handle).to(device, copy=True)


@contextmanager
def opening_from(pipe: Connection) -> Iterator[None]:
    """Raise ConnectionError if memory cannot be opened because its owner, at the other end of the pipe, has ended."""
    try:
        yield
    except RuntimeError as error:
        deadline = time.monotonic() + _ENDING
        try:
            while (left := deadline - time.monotonic()) > 0 and pipe.poll(left):
                pipe.recv_bytes()  # drop messages that it sent before, since this process fails in any case
        except (EOFError, OSError):
            raise ConnectionError("Connection closed by peer") from error
        raise


def collect() -> None:
    """Free shared memory that no process has open any more."""
    torch.cuda.ipc_collect()


def counters(process: int) -> set[Path]:
    """The files that torch keeps for a process, and leaves behind if the process is killed; empty if it has ended.
    Contains only files that the process has mapped, since containers that share /dev/shm may have processes of the same
    number.

    Args:
        process: the number of the process.
    """
    try:
        lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    own = f"{_COUNTERS}/torch_{process}_"
    return {Path(path) for line in lines if (path := line.split(maxsplit=5)[-1]).startswith(own)}


def forget(files: Iterable[Path]) -> None:
    """Delete the counters of a process that was killed or ends without torch's cleanup."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _event(device: torch.device) -> torch.cuda.Event:
    """An event for other processes. It is recorded once, so that it exists on this device and processes can wait for
    it."""
    event = torch.cuda.Event(interprocess=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _handle(event: torch.cuda.Event, device: torch.device) -> EventHandle:
    assert device.index is not None
    return EventHandle(device.index, event.ipc_handle())


def _opened(event: EventHandle) -> torch.cuda.Event:
    opened: Any = torch.cuda.Event.from_ipc_handle(torch.device("cuda", event.gpu), event.handle)
    return opened
