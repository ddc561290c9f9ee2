"""The streams of simulated GPUs, and whether what they do to memory is ordered.

A GPU runs the kernels of a stream in order, and those of two streams at any time, unless one stream or the host waits
for the other. Here all run in the order of their launch, so that a missing wait changes no number. To find it, each
stream has a vector clock, and memory remembers the times of its last accesses, as FastTrack does for threads (Flanagan
and Freund 2009).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from simulated_books import Books, tensors
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

K = TypeVar("K")
_UNORDERED = "before its stream waited for another one that"


def learn(known: dict[K, int], other: Mapping[K, int]) -> None:
    """Come after all that the other comes after, too."""
    for each, time in other.items():
        if known.get(each, 0) < time:
            known[each] = time


def unordered(accesses: Iterable[tuple[K, int]], *known: Mapping[K, int]) -> bool:
    """Whether there is an access, by whom and when, that no clock knows."""
    return any(all(clock.get(each, 0) < time for clock in known) for each, time in accesses)


class Clock:
    """Of a stream.

    Args:
        index: of its GPU.
    """

    def __init__(self, books: Books, index: int) -> None:
        books.clocks.append(self)
        self.index = index
        self.number = len(books.clocks)
        self.known = {self.number: 1}
        """By stream: up to which of its times this one comes after it. Its own is the present."""

    def tell(self) -> dict[int, int]:
        """What those know who wait for all that the stream was given so far."""
        told = dict(self.known)
        self.known[self.number] += 1
        return told


class Accesses:
    """The last ones to a storage."""

    __slots__ = ("at", "memory", "readers", "writer")

    def __init__(self, memory: StorageWeakRef) -> None:
        self.memory = memory
        """Keeps the address from being used again."""
        self.writer, self.at = 0, 0
        """The stream that wrote it, and when; 0: none."""
        self.readers: dict[int, int] = {}
        """By stream that has read it since: when."""


@dataclass
class Capture:
    """A graph, and what it does to memory."""

    origin: Clock
    thread: int = field(default_factory=threading.get_ident)
    members: set[Clock] = field(default_factory=set)
    """Streams that are captured, since they wait for the first, directly or not."""
    accesses: dict[int, Accesses] = field(default_factory=dict)
    """By the address of a storage. All earlier ones have ended, since the host waits before a capture."""
    launched: list[Accesses] | None = None
    """What the same storages remember of launches and of all else."""


class Moment(NamedTuple):
    """What an event marks."""

    known: dict[int, int]
    capture: Capture | None
    """The graph that it is part of."""


class _Current(threading.local):
    """Each thread's own."""

    def __init__(self, defaults: Sequence[Clock]) -> None:
        self.streams = list(defaults)


class Streams:
    """Of one process.

    Args:
        defaults: each GPU's first stream.
    """

    def __init__(self, books: Books, defaults: Sequence[Any]) -> None:
        self._books = books
        self.defaults = defaults
        self._current = _Current(defaults)
        self._host: dict[int, int] = {}
        """What the host has waited for. All that it launches later comes after it."""
        self._accesses: dict[int, Accesses] = {}
        """By the address of a storage."""
        self._purge = 20_000
        """Storages that are remembered before freed ones are forgotten."""
        self._writes: dict[Any, tuple[list[int], list[str]]] = {}
        """By kernel: the arguments that it writes, by place and by name."""
        self._capture: Capture | None = None

    def current(self, index: int) -> Any:
        """This thread's stream of a GPU."""
        return self._current.streams[index]

    def enter(self, stream: Clock) -> Clock:
        """Make a stream this thread's. Returns which one was it before."""
        before = self._current.streams[stream.index]
        self._current.streams[stream.index] = stream
        return before

    # waiting

    def mark(self, stream: Clock) -> Moment:
        """The end of what a stream was given so far."""
        capture = self._capture
        return Moment(stream.tell(), capture if capture is not None and stream in capture.members else None)

    def wait(self, stream: Clock, moment: Moment) -> None:
        """A stream waits."""
        capture = self._capture
        if capture is not None:
            if moment.capture is capture:
                capture.members.add(stream)
            elif stream in capture.members:
                self._books.refuse("CUDA error: a captured stream waits for work that the graph does not contain")
        learn(stream.known, moment.known)

    def waited(self, known: Mapping[int, int] | None = None) -> None:
        """The host has waited for this, or for this thread's streams."""
        for each in [stream.tell() for stream in self._current.streams] if known is None else [known]:
            learn(self._host, each)

    def waited_for_all(self, index: int) -> None:
        """The host has waited for a GPU."""
        for clock in self._books.clocks:
            if clock.index == index:
                self.waited(clock.tell())

    # accesses

    def access(
        self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor], devices: list[torch.device], on: Any
    ) -> None:
        """Note what a kernel reads and writes on a GPU, and a fault if it may do so too early."""
        stream = self._current.streams[on.index]
        found = self._now(stream)
        written = self._writes.get(func)
        if written is None:
            arguments = [*enumerate(func._schema.arguments)]
            places = [i for i, each in arguments if each.is_write and not each.kwarg_only]
            written = self._writes[func] = places, [each.name for _, each in arguments if each.is_write]
        places, names = written
        if names:
            for x in tensors([args[i] for i in places if i < len(args)], [kwargs.get(name) for name in names]):
                if (each := self._of(found, x.untyped_storage()._cdata)) is not None:
                    self._write(stream, each)
        me, known = stream.number, stream.known
        now = known[me]
        for x, device in zip(given, devices):
            if device != on:
                if device.type != "cuda":
                    continue
                self._meet(stream, self._current.streams[device.index])
                now = known[me]
            key = x.untyped_storage()._cdata
            each = found.get(key) or self._of(found, key)
            if each is None:
                continue
            if each.at != now or each.writer != me:
                if each.at > known.get(each.writer, 0):
                    self._read(stream, each)
                each.readers[me] = now

    def made(self, x: Tensor, on: torch.device) -> None:
        """Note that a kernel made a tensor."""
        stream = self._current.streams[on.index]
        found = self._now(stream)
        key = x.untyped_storage()._cdata
        if key not in found and (each := self._of(found, key)) is not None:
            each.writer, each.at = stream.number, stream.known[stream.number]

    def _of(self, found: dict[int, Accesses], key: int) -> Accesses | None:
        """What a GPU's storage remembers."""
        each = found.get(key)
        if each is None and (memory := self._books.memory(key)) is not None:
            each = found[key] = Accesses(memory)
            if len(found) > self._purge:
                for old in [old for old, its in found.items() if its.memory.expired()]:
                    del found[old]
                self._purge = max(20_000, 2 * len(found))
        return each

    def _read(self, stream: Clock, each: Accesses) -> None:
        if each.writer != stream.number and unordered([(each.writer, each.at)], stream.known, self._host):
            self._books.fault(f"memory of a GPU was read {_UNORDERED} wrote it")

    def _write(self, stream: Clock, each: Accesses) -> None:
        known, me = stream.known, stream.number
        if each.writer != me and unordered([(each.writer, each.at)], known, self._host):
            self._books.fault(f"memory of a GPU was written {_UNORDERED} wrote it")
        if each.readers:
            if unordered(each.readers.items(), known, self._host):
                self._books.fault(f"memory of a GPU was written {_UNORDERED} read it")
            each.readers = {}
        each.writer, each.at = me, known[me]

    def _meet(self, a: Clock, b: Clock) -> None:
        """Two GPUs wait for each other before and after a copy between them."""
        learn(a.known, b.tell())
        learn(b.known, a.tell())

    # graphs

    def _now(self, stream: Clock) -> dict[int, Accesses]:
        """Where accesses are noted: what is captured does not run."""
        capture = self._capture
        if capture is None or capture.thread != threading.get_ident():
            return self._accesses
        if stream not in capture.members:
            self._books.fault("a kernel was launched during a capture by a stream that is not captured")
        return capture.accesses

    def begin(self, origin: Clock) -> Capture:
        """Begin to capture a graph."""
        if origin in self.defaults:
            self._books.refuse("CUDA graphs must be captured on a non-default stream.")
        self._capture = Capture(origin, members={origin})
        return self._capture

    def end(self) -> None:
        """Refuse a graph if its first stream does not wait for all others."""
        capture, self._capture = self._capture, None
        assert capture is not None
        last = {(each.writer, each.at) for each in capture.accesses.values()}
        last |= {reader for each in capture.accesses.values() for reader in each.readers.items()}
        if unordered((stream for stream in last if stream[0]), capture.origin.known):
            self._books.refuse("CUDA error: a captured stream has work that the graph's first stream did not wait for")

    def launch(self, graph: Capture) -> None:
        """A graph's accesses are those of the stream that it is launched on."""
        stream = self._current.streams[graph.origin.index]
        if graph.launched is None:
            graph.launched = []
            for key, captured in graph.accesses.items():
                each = self._accesses.setdefault(key, Accesses(captured.memory))
                graph.launched.append(each)
        me, now = stream.number, stream.known[stream.number]
        for each, captured in zip(graph.launched, graph.accesses.values(), strict=True):
            if captured.writer:
                self._write(stream, each)
            else:
                self._read(stream, each)
                each.readers[me] = now
