"""Groups of processes that compute together and exchange tensors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from lockstep.distributed.shared_memory import SharedMemory

_PATIENCE = timedelta(days=1)
"""Timeout of gloo's operations."""
MEETING = timedelta(minutes=15)
"""Time that processes may take to find each other. If one dies before, the others notice only after this time."""
SMALL = 65_536
"""Bytes. The time of an exchange of at most this size hardly depends on the size."""


class Group:
    """A group of a single process, and the interface of larger groups."""

    rank = 0
    size = 1
    groups = 1
    """The number of groups that the processes are divided into, each with its own collectors
    (lockstep.core.shards.block)."""
    shared: SharedMemory | None = None
    """Memory that all processes map, for learners that do not wait for each other; None if they cannot share any."""
    collected: SharedMemory | None = None
    """Memory that all processes map, for collectors (lockstep.collectors.preemption); None likewise."""

    def __init__(self) -> None:
        self.waited = 0.0
        """Seconds spent in exchanges with other processes, including transfers, since this was last set to 0."""
        self.waiting = False
        """Whether this process is in such an exchange now."""
        self.on_devices = False
        """Whether GPU tensors can be sent directly. Otherwise only CPU tensors can be sent."""

    def open_devices(self, device: torch.device) -> str | None:
        """From now on, send GPU tensors without the CPU's memory, if all processes can. All of them must call this.

        Args:
            device: this process's device. The other processes compute on devices of the same kind.

        Returns:
            Why the processes cannot do this; None if they can, or if nothing is sent from GPU to GPU.
        """

    def send(self, value: Tensor, to: int) -> None:
        """Send a tensor to another rank, which receives it by recv."""
        raise AssertionError("a single process has no peer to send to")

    def recv(self, into: Tensor, origin: int) -> None:
        """Receive a tensor of the same shape and type from another rank."""
        raise AssertionError("a single process has no peer to receive from")

    def exchange(self, value: Tensor, into: Tensor, peer: int) -> None:
        """Send a tensor to a peer and receive one from it, which calls this, too. Their sizes may differ."""
        raise AssertionError("a single process has no peer")

    def swap(self, value: Tensor, peer: int) -> Tensor:
        """Send a tensor to a peer, and return the peer's tensor of the same shape and type. The next exchange with this
        peer may overwrite its memory."""
        into = torch.empty_like(value)
        self.exchange(value, into, peer)
        return into

    def gather(self, value: Any) -> list[Any] | None:
        """Every process's value, in order of rank, at rank 0; None elsewhere."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, at every process."""
        return value

    def barrier(self) -> None:
        """Wait for all processes."""

    def close(self) -> None:
        """Leave the group."""

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time of an exchange as waiting."""
        begin = time.perf_counter()
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
            self.waited += time.perf_counter() - begin


def meeting_point(host: str, port: int = 0) -> tuple[Store, tuple[str, int]]:
    """The meeting point of the processes of a GlooGroup. The first process makes it on its own host, and the others
    join.

    Args:
        port: the port of the meeting point to join; 0 makes one on any free port.

    Returns:
        The store, with its host and port.
    """
    store = dist.TCPStore(host, port, is_master=port == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    return store, (host, store.port)


CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
"""Error texts that mean that another process is gone."""


class PeerGone(RuntimeError):
    """Another process of the group is gone or cannot be reached any more."""


@contextmanager
def _noticing_losses() -> Iterator[None]:
    """Raise PeerGone when gloo reports that a peer is gone."""
    try:
        yield
    except RuntimeError as error:
        if any(phrase in str(error) for phrase in CONSEQUENCES):
            raise PeerGone(str(error)) from error
        raise


class GlooGroup(Group):
    """Processes connected point to point by torch.distributed's gloo backend.

    Every operation fails at once when a peer is gone, since gloo reports closed connections. Operations wait for a peer
    that is only slow (it evaluates, or writes to a busy disk). The supervisor sees progress and decides whether a peer
    stalls.

    Raises:
        RuntimeError: not all processes came within MEETING.
        PeerGone: a process was gone when they connected, or later.
    """

    def __init__(self, meeting: str | Store, rank: int, size: int, groups: int = 1) -> None:
        super().__init__()
        if isinstance(meeting, str):
            meeting, rank, size = next(rendezvous(meeting, rank, size, timeout=MEETING))
            meeting.set(f"here-{rank}", "")  # torchrun's store does not wait until all have joined it
            meeting.wait([f"here-{each}" for each in range(size)], MEETING)
            meeting.set_timeout(_PATIENCE)
        with _noticing_losses():
            dist.init_process_group("gloo", None, _PATIENCE, size, rank, meeting)
        self.rank, self.size, self.groups = dist.get_rank(), dist.get_world_size(), groups

    def send(self, value: Tensor, to: int) -> None:
        with self._waiting():
            dist.send(value, to)

    def recv(self, into: Tensor, origin: int) -> None:
        with self._waiting():
            dist.recv(into, origin)

    def exchange(self, value: Tensor, into: Tensor, peer: int) -> None:
        with self._waiting():
            works = []
            if value.numel():
                works.append(dist.isend(value, peer))
            if into.numel():
                works.append(dist.irecv(into, peer))
            for work in works:
                assert work is not None
                work.wait()

    def gather(self, value: Any) -> list[Any] | None:
        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._waiting():
            dist.gather_object(value, gathered, dst=0)
        return gathered

    def broadcast(self, value: Any) -> Any:
        values = [value]
        with self._waiting():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        with self._waiting():
            dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with super()._waiting(), _noticing_losses():
            yield
