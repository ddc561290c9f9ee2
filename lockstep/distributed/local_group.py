"""A group of processes on one machine: pipes carry messages, and large tensors pass through shared memory.

Several times as fast as sockets for large tensors, and even faster for the small ones that cheap environments exchange
at every iteration. Tensors that both sides exchange pass through memory without receipts; others that are sent pass
through the pipe if they are small. Tensors of GPUs pass through the GPUs' memory where all processes can open each
other's.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.distributed import device_memory
from lockstep.distributed.device_memory import Attempt, EventHandle, Inbox, Outbox
from lockstep.distributed.groups import SMALL, Group
from lockstep.distributed.shared_memory import SharedMemory
from lockstep.system.children import allow_files
from lockstep.system.machine import cores_of_the_run

_SPIN = 100e-6
"""Seconds that a process polls for an answer before it sleeps until it arrives: waking up takes about as long."""
_TENSOR, _STORED, _PLACED, _RECEIPT, _SWAPPED, _OBJECT = b"t", b"s", b"d", b"a", b"x", b"o"
"""Kinds of messages: a tensor's bytes, the size of a tensor in shared memory, the same on a GPU with a handle if the
memory is new, the receipt that it was taken out, an exchanged tensor in shared memory, and a pickled object."""
_ALIGNMENT = 64
"""Of memory for exchanged tensors, in bytes."""
_TRIAL = 4096
"""Bytes that processes exchange before they trust each other's GPUs."""


@dataclass(frozen=True)
class Ends:
    """One process's ends of its connections to the others."""

    rank: int
    size: int
    """Number of processes in the group."""
    pipes: dict[int, Connection]
    """By the rank of the other process."""
    outgoing: dict[int, SharedMemory]
    incoming: dict[int, SharedMemory]
    exchanged: dict[int, SharedMemory]
    """What both processes of a connection write and read."""
    shared: SharedMemory
    """Memory of all processes, for learners."""
    collected: SharedMemory
    """Memory of all processes, for collectors."""
    groups: int = 1
    """As of Group."""

    def close(self) -> None:
        """Close them in the process that started the others, which does not need them."""
        of_pairs = (*self.outgoing.values(), *self.incoming.values(), *self.exchanged.values())
        memories = (*of_pairs, self.shared, self.collected)
        for end in (*self.pipes.values(), *memories):
            end.close()


def join(context: Any, size: int, pairs: set[tuple[int, int]], groups: int = 1) -> list[Ends]:
    """The connections among `size` processes, to be passed to them when they start.

    Args:
        pairs: of ranks that communicate, in addition to rank 0, which communicates with all.
        groups: as of Group.
    """
    shared, collected = SharedMemory(), SharedMemory()
    ends = [Ends(rank, size, {}, {}, {}, {}, shared, collected, groups) for rank in range(size)]
    joined = sorted({(min(pair), max(pair)) for pair in pairs} | {(0, rank) for rank in range(1, size)})
    allow_files(5 * len(joined))
    for a, b in joined:
        ends[a].pipes[b], ends[b].pipes[a] = context.Pipe()
        ends[a].outgoing[b] = ends[b].incoming[a] = SharedMemory()
        ends[b].outgoing[a] = ends[a].incoming[b] = SharedMemory()
        ends[a].exchanged[b] = ends[b].exchanged[a] = SharedMemory()
    return ends


class LocalGroup(Group):
    """Processes of one machine, joined by pipes and shared memory.

    Every operation fails instead of waiting when a peer is gone.
    """

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        self.rank, self.size, self.groups = ends.rank, ends.size, ends.groups
        self.shared, self.collected = ends.shared, ends.collected
        spin = _SPIN if self.size <= cores_of_the_run() else 0.0
        self._peers = {
            rank: _Peer(
                pipe,
                ends.outgoing[rank],
                ends.incoming[rank],
                _Places(ends.exchanged[rank], own=int(self.rank > rank)),
                spin,
            )
            for rank, pipe in ends.pipes.items()
        }

    def open_devices(self, device: torch.device) -> str | None:
        if self.size == 1 or device.type == "cpu":
            return None
        peers, attempt = self._peers.values(), Attempt()
        with self._waiting():
            for peer in peers:
                peer.put(attempt(peer.offer_device, device, self.rank))
            for peer in peers:
                peer.put(attempt(peer.open_device, device, peer.get()))
            for peer in peers:
                attempt(peer.add_reader, peer.get())
            for rank, peer in self._peers.items():
                attempt(peer.try_device, device, rank)
        problems = self.gather(attempt.problem)
        problem = self.broadcast(problems and next((each for each in problems if each), None))
        self.on_devices = problem is None
        if problem is not None:
            self._leave_devices()
        return problem

    def send(self, value: Tensor, to: int) -> None:
        with self._waiting():
            self._peers[to].send(value)

    def recv(self, into: Tensor, origin: int) -> None:
        with self._waiting():
            self._peers[origin].receive(into)

    def exchange(self, value: Tensor, into: Tensor, peer: int) -> None:
        with self._waiting():
            if value.device.type == "cpu":
                _bytes(into).copy_(self._peers[peer].swap(_bytes(value.contiguous()), into.nbytes))
                return
            if value.numel():
                self._peers[peer].send(value)
            if into.numel():
                self._peers[peer].receive(into)

    def swap(self, value: Tensor, peer: int) -> Tensor:
        if value.device.type != "cpu":
            return super().swap(value, peer)
        with self._waiting():
            data = self._peers[peer].swap(_bytes(value.contiguous()), value.nbytes)
        return data.view(value.dtype).view(value.shape)

    def gather(self, value: Any) -> list[Any] | None:
        with self._waiting():
            if self.rank:
                self._peers[0].put(value)
                return None
            return [value, *(self._peers[rank].get() for rank in range(1, self.size))]

    def broadcast(self, value: Any) -> Any:
        with self._waiting():
            if self.rank:
                return self._peers[0].get()
            for rank in range(1, self.size):
                self._peers[rank].put(value)
            return value

    def barrier(self) -> None:
        self.gather(None)
        self.broadcast(None)

    def close(self) -> None:
        if self.on_devices:
            with contextlib.suppress(ConnectionError):  # they have left
                self._leave_devices()
        for peer in self._peers.values():
            peer.pipe.close()
        for memory in (self.shared, self.collected):
            if memory is not None:
                memory.close()

    def _leave_devices(self) -> None:
        """Close the others' memory, and free this process's once they have closed it."""
        for peer in self._peers.values():
            peer.inbox = None
            peer.put(None)
        for peer in self._peers.values():
            peer.get()
            peer.outbox = None
        device_memory.collect()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin


class _Peer:
    """The connection between this process and another one."""

    def __init__(
        self, pipe: Connection, outgoing: SharedMemory, incoming: SharedMemory, places: _Places, spin: float
    ) -> None:
        self.pipe, self._places, self._spin = pipe, places, spin
        self._outgoing, self._incoming = _Buffer(outgoing), _Buffer(incoming)
        self.outbox: Outbox | None = None
        self.inbox: Inbox | None = None
        self._free = True
        """Whether the last stored tensor has been taken out."""
        self._swaps = 0
        """Tensors exchanged so far."""
        self._unread: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(pipe.fileno(), select.POLLIN)

    def send(self, value: Tensor) -> None:
        data = _bytes(value.contiguous())
        on_gpu = data.device.type != "cpu"
        if data.numel() <= SMALL and not on_gpu:
            self._write(_TENSOR + data.numpy().tobytes())
            return
        while not self._free:
            if message := self._read():
                self._unread.append(message)
        if on_gpu:
            assert self.outbox is not None, "the group has not opened its devices"
            handle = self.outbox.handle() if self.outbox.reserve(data.numel()) else None
            self.outbox.put(data)
            self._free = False
            self._write(_PLACED + pickle.dumps((data.numel(), handle)))
            return
        self._outgoing.at_least(data.numel())[: data.numel()] = data
        self._free = False
        self._write(_STORED + data.numel().to_bytes(8, "little"))

    def receive(self, into: Tensor) -> None:
        message = self._next()
        data = _bytes(into)
        if message[:1] == _TENSOR:
            data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8, offset=1))
            return
        if message[:1] == _PLACED:
            size, handle = pickle.loads(memoryview(message)[1:])
            assert self.inbox is not None and size == data.numel()
            if handle is not None:
                with device_memory.opening_from(self.pipe):
                    self.inbox.open(handle)
            self.inbox.copy(data)
        else:
            assert message[:1] == _STORED and int.from_bytes(message[1:], "little") == data.numel()
            data.copy_(self._incoming.at_least(data.numel())[: data.numel()])
        with contextlib.suppress(OSError):  # it may have ended after its last message
            self.pipe.send_bytes(_RECEIPT)

    def swap(self, data: Tensor, size: int) -> Tensor:
        """Exchange the bytes of tensors through memory for two of each side, and return those of the other process.
        They stay there until the next exchange begins. No receipt is needed: a process that begins the next one has
        read these, and only the one after that overwrites them.

        Args:
            size: how many the other process gives.
        """
        if (larger := max(data.numel(), size)) > self._places.size:  # for both processes alike
            self._meet()  # the other one has read what will lie elsewhere
            self._places.grow(larger)
        place, self._swaps = self._swaps % 2, self._swaps + 1
        self._places.own[place, : data.numel()] = data.numpy()
        self._meet()
        return torch.from_numpy(self._places.others[place, :size])

    def _meet(self) -> None:
        """Wait until the other process does."""
        self._write(_SWAPPED)
        message = self._next()
        assert message == _SWAPPED

    def offer_device(self, device: torch.device, rank: int) -> tuple[EventHandle, Any]:
        """Make memory for what is sent to the other process, with its sender's rank in it, and let it be opened."""
        self.outbox = Outbox(device)
        self.outbox.reserve(_TRIAL)
        offer = self.outbox.stored, self.outbox.handle()
        self.outbox.put(torch.full((_TRIAL,), rank % 256, dtype=torch.uint8, device=device))
        return offer

    def open_device(self, device: torch.device, offer: tuple[EventHandle, Any]) -> EventHandle:
        """Open the other process's memory. Returns what its owner has to wait for."""
        stored, handle = offer
        self.inbox = Inbox(stored, device)
        self.inbox.open(handle)
        return self.inbox.copied

    def add_reader(self, copied: EventHandle) -> None:
        assert self.outbox is not None
        self.outbox.add_reader(copied)

    def try_device(self, device: torch.device, rank: int) -> None:
        """Raise RuntimeError unless the other process's rank arrives."""
        if self.inbox is None:
            return
        into = torch.empty(_TRIAL, dtype=torch.uint8, device=device)
        self.inbox.copy(into)
        if (into.cpu() != rank % 256).any():
            raise RuntimeError("memory of another process's GPU holds other numbers than it stored")

    def put(self, value: Any) -> None:
        self._write(_OBJECT + pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def get(self) -> Any:
        message = self._next()
        assert message[:1] == _OBJECT
        return pickle.loads(memoryview(message)[1:])

    def _next(self) -> bytes:
        """The next message that is not a receipt."""
        if self._unread:
            return self._unread.popleft()
        while not (message := self._read()):
            pass
        return message

    def _read(self) -> bytes:
        """Read one message; empty if it was a receipt."""
        deadline = time.perf_counter() + self._spin
        while not self._poll.poll(0):
            if time.perf_counter() > deadline:
                self._poll.poll()
                break
            os.sched_yield()
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise ConnectionError("Connection closed by peer") from None
        if message == _RECEIPT:
            self._free = True
            return b""
        return message

    def _write(self, message: bytes) -> None:
        try:
            self.pipe.send_bytes(message)
        except OSError:
            raise ConnectionError("Connection closed by peer") from None


class _Buffer:
    """Shared memory for a large tensor, mapped as far as it has been needed."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory, self._mapped = memory, torch.empty(0, dtype=torch.uint8)

    def at_least(self, size: int) -> Tensor:
        """uint8 [size or more]"""
        if self._mapped.numel() < size:
            self._mapped = self._memory.map(lambda arena: arena.zeros((size,), torch.uint8))
        return self._mapped


class _Places:
    """Shared memory for two tensors of each of two processes.

    Args:
        own: which of them this process is.
    """

    def __init__(self, memory: SharedMemory, own: int) -> None:
        self._memory, self._own = memory, own
        self.size = 0
        """Bytes of a place."""
        self.own = self.others = np.empty((2, 0), np.uint8)
        """uint8 [2, size] of each process."""

    def grow(self, least: int) -> None:
        """Map places of at least this many bytes. They lie elsewhere then."""
        self.size = -(-max(least, SMALL) // _ALIGNMENT) * _ALIGNMENT
        both = self._memory.map(lambda arena: arena.zeros((2, 2, self.size), torch.uint8)).numpy()
        self.own, self.others = both[self._own], both[1 - self._own]


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: uint8 [its bytes]."""
    return tensor.detach().view(-1).view(torch.uint8)
