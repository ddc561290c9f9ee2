"""Memory of a GPU that other processes of the machine open: tensors pass between processes without the CPU's memory.

The process that sends owns the memory, an Outbox; each process that reads it opens it, as an Inbox, by a handle of CUDA
IPC. GPUs wait for each other by events. Callers' messages say that an event was recorded, since its process may have
died before. A host can still wait in the driver until the owner's GPU has done what it began: when it copies what it
read to the CPU, and when it closes memory, also to open more. If the owner dies meanwhile, whoever watches the
processes has to kill this one. https://docs.pytorch.org/docs/stable/notes/multiprocessing.html has torch's rules: the
owner keeps what it shares for as long as a reader has it open, and cannot open its own handles.
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
"""Where torch counts the readers of what a process shares, in files with the process's number in their names."""

_ENDING = 1.0
"""Seconds between the end of a process's GPU memory and the end of its pipes, at most."""


class EventHandle(NamedTuple):
    """An event, for a process that opens it."""

    gpu: int
    handle: bytes


class Attempt:
    """Shares and opens memory as a trial: whatever goes wrong, there is another way."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """What went wrong first."""

    def __call__(self, act: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Call a function. Returns None if that fails, or if something that it needs is lacking (None)."""
        try:
            return None if any(each is None for each in given) else act(*given, **options)
        except Exception as error:
            self.problem = self.problem or (str(error).strip().splitlines() or [type(error).__name__])[0]
            return None


def report_transfer(what: str, problem: str | None) -> None:
    """Print how tensors pass from process to process.

    Args:
        what: who passes what.
        problem: why GPUs' memory cannot be opened; None if it can.
    """
    route = (
        "from GPU to GPU (CUDA IPC)"
        if problem is None
        else f"through the CPU's memory, since CUDA IPC failed: {problem}"
    )
    print_line(f"{what} {route}", sys.stderr)


class Outbox:
    """Memory on this process's GPU that others read. Its event says that the tensor in it is complete."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stored = _event(device)
        self._copied: list[torch.cuda.Event] = []
        """Of each reader: recorded after it has copied the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def stored(self) -> EventHandle:
        """For each reader's Inbox."""
        return _handle(self._stored, self._device)

    def add_reader(self, copied: EventHandle) -> None:
        """Wait for this reader, too, before the memory changes."""
        self._copied.append(_opened(copied))

    def reserve(self, size: int) -> bool:
        """Have memory for so many bytes. Returns whether it is new, so that readers need a handle."""
        if size <= self._memory.numel():
            return False
        self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return True

    def handle(self) -> Any:
        """A handle of the memory, for one reader."""
        return lend(self._memory)

    def put(self, data: Tensor) -> None:
        """Store uint8 [n]. The caller knows that all readers have said that they copied what was there before."""
        stream = torch.cuda.current_stream(self._device)
        for copied in self._copied:
            stream.wait_event(copied)
        self._memory[: data.numel()].copy_(data)
        self._stored.record(stream)


class Inbox:
    """Memory of another process's GPU, which may be this process's GPU, too."""

    def __init__(self, stored: EventHandle, device: torch.device) -> None:
        self._device = device
        self._stored, self._copied = _opened(stored), _event(device)
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def copied(self) -> EventHandle:
        """For the owner."""
        return _handle(self._copied, self._device)

    def open(self, handle: Any) -> None:
        """Read this memory from now on."""
        self._memory = reductions.rebuild_cuda_tensor(*handle)

    def copy(self, into: Tensor) -> None:
        """Copy what the owner has said to be stored into uint8 [n] on this process's GPU."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._stored)
        into.copy_(self._memory[: into.numel()], non_blocking=True)
        self._copied.record(stream)


def lend(x: Tensor) -> Any:
    """A handle of a GPU's tensor, for one process, which must open it. Its memory stays until then, and so must its
    content."""
    return reductions.reduce_tensor(x)[1]


def copy_of(handle: Any, device: torch.device) -> Tensor:
    """A copy of what another process lends, on this process's GPU. The GPU waits until the tensor is complete."""
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
                pipe.recv_bytes()  # it was sent before the end, and this process fails in any case
        except (EOFError, OSError):
            raise ConnectionError("Connection closed by peer") from error
        raise


def collect() -> None:
    """Free memory that was shared, and that no process has open any more."""
    torch.cuda.ipc_collect()


def counters(process: int) -> set[Path]:
    """The files that torch keeps for a process, and would leave behind if it did not exit by itself; empty if it has
    ended. Only those that it has mapped: containers that share /dev/shm may have processes of the same number.

    Args:
        process: its number.
    """
    try:
        lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    own = f"{_COUNTERS}/torch_{process}_"
    return {Path(path) for line in lines if (path := line.split(maxsplit=5)[-1]).startswith(own)}


def forget(files: Iterable[Path]) -> None:
    """Delete the counters of a process that was killed, or ends at once without torch's cleaning up."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _event(device: torch.device) -> torch.cuda.Event:
    """An event for other processes. It is recorded here, so that it exists on this device and may be waited for."""
    event = torch.cuda.Event(interprocess=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _handle(event: torch.cuda.Event, device: torch.device) -> EventHandle:
    assert device.index is not None
    return EventHandle(device.index, event.ipc_handle())


def _opened(event: EventHandle) -> torch.cuda.Event:
    opened: Any = torch.cuda.Event.from_ipc_handle(torch.device("cuda", event.gpu), event.handle)
    return opened
