"""A group of processes on one machine. Pipes carry messages, and large tensors pass through shared memory.

This is several times as fast as sockets for large tensors, and even faster for small tensors. Tensors that both sides
exchange pass through shared memory without receipts. A tensor that one side sends passes through the pipe if it is
small. GPU tensors pass through the GPUs' memory if all processes can open each other's.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.distributed import device_memory
from lockstep.distributed.device_memory import Attempt, EventHandle, OpenedMemory, OwnedMemory
from lockstep.distributed.groups import SMALL, Group
from lockstep.distributed.shared_memory import SharedMemory
from lockstep.system.children import allow_files
from lockstep.system.machine import cores_of_the_run

_SPIN = 100e-6
"""Seconds that a process polls for an answer before it sleeps. Waking up takes about as long."""
_TENSOR, _STORED, _PLACED, _RECEIPT, _SWAPPED, _OBJECT = b"t", b"s", b"d", b"a", b"x", b"o"
"""Kinds of messages: a tensor's bytes; the size of a tensor in shared memory; the size of a tensor on a GPU, with a
handle if the memory is new; the receipt of a stored tensor; an exchanged tensor in shared memory; a pickled object."""
_ALIGNMENT = 64
"""Alignment of memory for exchanged tensors, in bytes."""
_TRIAL = 4096
"""Bytes that processes exchange as a trial of GPU memory."""


@dataclass(frozen=True)
class Ends:
    """One process's ends of its connections to the others."""

    rank: int
    size: int
    """Number of processes in the group."""
    pipes: dict[int, Connection]
    """By the rank of the other process, as the memories below."""
    outgoing: dict[int, SharedMemory]
    """Memory for large tensors that this process sends."""
    incoming: dict[int, SharedMemory]
    """Memory for large tensors that the other process sends."""
    exchanged: dict[int, SharedMemory]
    """Memory that both processes of a connection write and read."""
    shared: SharedMemory
    """As Group.shared."""
    collected: SharedMemory
    """As Group.collected."""
    groups: int = 1
    """As Group.groups."""

    def close(self) -> None:
        """Close the ends. The process that started the others calls this, since it does not need them."""
        of_pairs = (*self.outgoing.values(), *self.incoming.values(), *self.exchanged.values())
        memories = (*of_pairs, self.shared, self.collected)
        for end in (*self.pipes.values(), *memories):
            end.close()


def join(context: Any, size: int, pairs: set[tuple[int, int]], groups: int = 1) -> list[Ends]:
    """The ends of the connections among `size` processes, which are passed to them when they start.

    Args:
        pairs: pairs of ranks that communicate. Rank 0 communicates with all in any case.
        groups: as Group.groups.
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
    """Processes of one machine, connected by pipes and shared memory.

    Every operation raises ConnectionError when a peer is gone.
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
            with contextlib.suppress(ConnectionError):  # peers may have ended
                self._leave_devices()
        for peer in self._peers.values():
            peer.pipe.close()
        for memory in (self.shared, self.collected):
            if memory is not None:
                memory.close()

    def _leave_devices(self) -> None:
        """Close the other processes' GPU memory, and free this process's when they have closed it."""
        for peer in self._peers.values():
            peer.opened = None
            peer.put(None)
        for peer in self._peers.values():
            peer.get()
            peer.owned = None
        device_memory.collect()


class _Peer:
    """The connection between this process and another one."""

    def __init__(
        self, pipe: Connection, outgoing: SharedMemory, incoming: SharedMemory, places: _Places, spin: float
    ) -> None:
        self.pipe, self._places, self._spin = pipe, places, spin
        self._outgoing, self._incoming = _Buffer(outgoing), _Buffer(incoming)
        self.owned: OwnedMemory | None = None
        self.opened: OpenedMemory | None = None
        self._free = True
        """Whether the other process has read the last stored tensor."""
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
            assert self.owned is not None, "the group has not opened its devices"
            handle = self.owned.handle() if self.owned.reserve(data.numel()) else None
            self.owned.put(data)
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
            assert self.opened is not None and size == data.numel()
            if handle is not None:
                with device_memory.opening_from(self.pipe):
                    self.opened.open(handle)
            self.opened.copy(data)
        else:
            assert message[:1] == _STORED and int.from_bytes(message[1:], "little") == data.numel()
            data.copy_(self._incoming.at_least(data.numel())[: data.numel()])
        with contextlib.suppress(OSError):  # the sender may have ended after its last message
            self.pipe.send_bytes(_RECEIPT)

    def swap(self, data: Tensor, size: int) -> Tensor:
        """Exchange the bytes of tensors through shared memory with two places for each side. Returns the other
        process's bytes, which are valid until the next exchange begins. No receipt is needed: a process that begins the
        next exchange has read these bytes, and only the exchange after that overwrites them.

        Args:
            size: how many bytes the other process sends.
        """
        if (larger := max(data.numel(), size)) > self._places.size:  # the same in both processes
            self._meet()  # now the other process has read the old places
            self._places.grow(larger)
        place, self._swaps = self._swaps % 2, self._swaps + 1
        self._places.own[place, : data.numel()] = data.numpy()
        self._meet()
        return torch.from_numpy(self._places.others[place, :size])

    def _meet(self) -> None:
        """Wait until the other process calls this, too."""
        self._write(_SWAPPED)
        message = self._next()
        assert message == _SWAPPED

    def offer_device(self, device: torch.device, rank: int) -> tuple[EventHandle, Any]:
        """Allocate GPU memory for tensors that are sent to the other process, and store this process's rank in it.
        Returns the event and the handle that the other process needs to open it."""
        self.owned = OwnedMemory(device)
        self.owned.reserve(_TRIAL)
        offer = self.owned.stored, self.owned.handle()
        self.owned.put(torch.full((_TRIAL,), rank % 256, dtype=torch.uint8, device=device))
        return offer

    def open_device(self, device: torch.device, offer: tuple[EventHandle, Any]) -> EventHandle:
        """Open the other process's memory. Returns the event that its owner waits for."""
        stored, handle = offer
        self.opened = OpenedMemory(stored, device)
        self.opened.open(handle)
        return self.opened.copied

    def add_reader(self, copied: EventHandle) -> None:
        assert self.owned is not None
        self.owned.add_reader(copied)

    def try_device(self, device: torch.device, rank: int) -> None:
        """Raise RuntimeError if the other process's memory does not contain its rank."""
        if self.opened is None:
            return
        into = torch.empty(_TRIAL, dtype=torch.uint8, device=device)
        self.opened.copy(into)
        if (into.cpu() != rank % 256).any():
            raise RuntimeError("memory of another process's GPU does not contain the numbers that the process stored")

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
    """Shared memory for a large tensor, mapped up to the largest size that was needed."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory, self._mapped = memory, torch.empty(0, dtype=torch.uint8)

    def at_least(self, size: int) -> Tensor:
        """uint8 [size or more]"""
        if self._mapped.numel() < size:
            self._mapped = self._memory.map(lambda arena: arena.zeros((size,), torch.uint8))
        return self._mapped


class _Places:
    """Shared memory with places for two tensors of each of two processes.

    Args:
        own: the number of this process, 0 or 1.
    """

    def __init__(self, memory: SharedMemory, own: int) -> None:
        self._memory, self._own = memory, own
        self.size = 0
        """Bytes of a place."""
        self.own = self.others = np.empty((2, 0), np.uint8)
        """uint8 [2, size]: the places of this process and of the other one."""

    def grow(self, least: int) -> None:
        """Map places of at least this many bytes. Their addresses change."""
        self.size = -(-max(least, SMALL) // _ALIGNMENT) * _ALIGNMENT
        both = self._memory.map(lambda arena: arena.zeros((2, 2, self.size), torch.uint8)).numpy()
        self.own, self.others = both[self._own], both[1 - self._own]


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: uint8 [its bytes]."""
    return tensor.detach().view(-1).view(torch.uint8)
