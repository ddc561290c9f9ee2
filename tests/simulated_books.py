"""What the simulated GPU writes down: where memory lies, what was run and copied, and what CUDA would refuse."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

import lockstep

CPU = torch.device("cpu")

KERNEL = "kernel"
FILL = "fill of new memory"
"""By deterministic algorithms, for memory that nothing was written to yet."""
SORTED = "kernel that sorts in order to be deterministic"
COPY = "copy on a GPU"
PEER = "copy between GPUs"
PINNED = "copy from pinned memory"
PAGEABLE = "copy from pageable memory"
STAGED = "copy gathered or cast on the host first"
"""Through new pageable memory, even if it came from pinned memory."""
BACK = "copy to the host"
SYNC = "sync"
"""The host waits for a GPU. Copies that it waits for count twice: as a copy, and as this."""
CAPTURE = "graph captured"
LAUNCH = "graph launch"
_CAPTURED = {KERNEL, FILL, SORTED, COPY, PEER, PINNED, BACK}
"""What a graph may contain."""

_LOCKSTEP, _TESTS = f"{Path(lockstep.__file__).parent}/", f"{Path(__file__).parent}/"
_INNER = (str(Path(torch.__file__).parent), f"{_TESTS}simulated_", contextlib.__file__, copy.__file__, "<")
"""How names of files begin whose lines are not the cause of anything."""
_PURGE = 20_000
"""Tensors that are made before records of freed memory are dropped."""

# These stay when the simulated GPU is uninstalled, since constants that lockstep caches outlive it.
_places: dict[int, tuple[StorageWeakRef, torch.device]] = {}
_pinned: dict[int, StorageWeakRef] = {}


@dataclass(frozen=True)
class Counts:
    """How often each kind of thing happened, and with how many bytes, by (kind, line of lockstep)."""

    times: Mapping[tuple[str, str], int] = field(default_factory=dict)
    bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> int:
        return sum(self.lines(kind).values())

    def __add__(self, other: Counts) -> Counts:
        return Counts(_sum(self.times, other.times, 1), _sum(self.bytes, other.bytes, 1))

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(_sum(self.times, earlier.times, -1), _sum(self.bytes, earlier.bytes, -1))

    def kinds(self) -> list[str]:
        """The most frequent first."""
        return sorted({kind for kind, _ in self.times}, key=lambda kind: -self[kind])

    def lines(self, kind: str) -> dict[str, int]:
        """How often each line did this, the most frequent first."""
        found = [(line, n) for (each, line), n in self.times.items() if each == kind]
        return dict(sorted(found, key=lambda item: -item[1]))

    def size(self, kind: str) -> int:
        """In bytes."""
        return sum(n for (each, _), n in self.bytes.items() if each == kind)

    def text(self, lines: int = 0) -> str:
        """A table, with this many lines of each kind."""
        rows = []
        for kind in self.kinds():
            size = f", {self.size(kind) / 1e6:.2f} MB" if self.size(kind) else ""
            rows.append(f"{self[kind]:8d} {kind}{size}")
            rows += [f"{n:16d} {line}" for line, n in list(self.lines(kind).items())[:lines]]
        return "\n".join(rows)


def _sum(a: Mapping[Any, int], b: Mapping[Any, int], sign: int) -> dict[Any, int]:
    total = collections.Counter(a)
    for key, n in b.items():
        total[key] += sign * n
    return {key: n for key, n in total.items() if n}


@dataclass(frozen=True)
class _Flight:
    """An asynchronous copy from or to pinned memory, which no one has waited for yet."""

    memory: Tensor
    """The pinned memory, as bytes."""
    content: Tensor
    """Its bytes when the copy began, or those that arrive when it ends."""
    arrives: bool
    line: str


class Books:
    """Of one process.

    Args:
        folder: where processes leave what the one that started them reports.
    """

    def __init__(self, gpus: int, folder: Path) -> None:
        self.gpus = gpus
        self.folder = folder
        self.current = 0
        """The GPU that `cuda` stands for."""
        self.thread = threading.local()
        self.tape: Any = None
        """Set while a graph is captured."""
        self.shared: Any = None
        """What other processes open (simulated_ipc.py)."""
        self.streams: Any = None
        """In which order they touch memory (simulated_streams.py)."""
        self.clocks: list[Any] = []
        """Of all streams."""
        self.launched = 0
        """Asynchronous copies so far."""
        self._registered: dict[int, int] = {}
        self._flights: dict[int, _Flight] = {}
        self._times: collections.Counter[tuple[str, str]] = collections.Counter()
        self._bytes: collections.Counter[tuple[str, str]] = collections.Counter()
        self._placed = 0

    # where memory lies

    def device(self, x: Tensor) -> torch.device:
        try:
            key = x.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # some kinds of tensors have no memory
            return CPU
        found = _places.get(key)
        return found[1] if found else CPU

    def memory(self, key: int) -> StorageWeakRef | None:
        """The storage at this address, if it lies on a GPU."""
        found = _places.get(key)
        return None if found is None else found[0]

    def put(self, x: Tensor, device: torch.device) -> Tensor:
        """Write down that new memory lies on this device."""
        storage = x.untyped_storage()
        if device.type == "cpu":
            _places.pop(storage._cdata, None)
            return x
        # The weak reference keeps the address from being used again.
        _places[storage._cdata] = (StorageWeakRef(storage), device)
        self._placed += 1
        if self._placed % _PURGE == 0:
            for key in [key for key, (memory, _) in [*_places.items()] if memory.expired()]:
                del _places[key]
            for key in [key for key, memory in [*_pinned.items()] if memory.expired()]:
                del _pinned[key]
        return x

    @contextlib.contextmanager
    def placing(self, device: torch.device | None) -> Iterator[None]:
        """Tensors that are made of no others lie on this device."""
        before = self.default
        self.thread.device = device if device is not None and device.type == "cuda" else None
        try:
            yield
        finally:
            self.thread.device = before

    @property
    def default(self) -> torch.device | None:
        """The GPU on which tensors that are made of no others lie now."""
        return getattr(self.thread, "device", None)

    def wanted(self, device: Any) -> torch.device:
        """A device with its number."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return device
        index = self.current if device.index is None else device.index
        if index >= self.gpus:
            self.refuse(f"CUDA error: invalid device ordinal: cuda:{index} of {self.gpus}")
        return torch.device("cuda", index)

    def pin(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        _pinned[storage._cdata] = StorageWeakRef(storage)
        return x

    def is_pinned(self, x: Tensor) -> bool:
        storage = _pinned.get(x.untyped_storage()._cdata)
        if storage is not None and not storage.expired():
            return True
        at = x.data_ptr()
        return any(begin <= at < begin + size for begin, size in self._registered.items())

    def register(self, begin: int, size: int) -> None:
        """Pin memory that torch did not allocate."""
        self._registered[begin] = size

    def unregister(self, begin: int) -> None:
        self._registered.pop(begin, None)

    # what happened

    @property
    def counts(self) -> Counts:
        return Counts(dict(self._times), dict(self._bytes))

    def note(self, kind: str, size: int = 0) -> None:
        """Raises RuntimeError if a graph that is being captured cannot contain this."""
        if self.tape is not None:
            if kind not in _CAPTURED:
                self.refuse(f"{kind} while a graph is captured")
            return  # captured, but not run
        at = (kind, line())
        self._times[at] += 1
        self._bytes[at] += size

    def fault(self, text: str) -> None:
        """Write down what CUDA refuses, or what may give other numbers on it."""
        with open(self.folder / f"faults-{os.getpid()}.txt", "a") as file:
            file.write(f"{text} [{line()}]\n")

    def refuse(self, text: str, error: type[Exception] = RuntimeError) -> None:
        """Raises error, as torch does on CUDA."""
        self.fault(text)
        raise error(f"{text} (simulated GPU, {line()})")

    def wait(self, until: int | None = None, known: Mapping[int, int] | None = None) -> None:
        """The host waits for a GPU.

        Args:
            until: for the first asynchronous copies. None: for all.
            known: by stream, up to which of its times. None: for all that this thread's streams were given.
        """
        self.note(SYNC)
        self.settle(until)
        self.streams.waited(known)

    def settle(self, until: int | None = None) -> None:
        """End the first asynchronous copies, without a sync of their own."""
        for number in [n for n in self._flights if until is None or n < until]:
            flight = self._flights.pop(number)
            with unseen():
                if flight.arrives:
                    flight.memory.copy_(flight.content)
                elif not torch.equal(flight.memory, flight.content):
                    self.fault(f"pinned memory was overwritten before its copy was waited for: {flight.line}")

    def departs(self, source: Tensor) -> None:
        """An asynchronous copy from pinned memory began."""
        with unseen():
            memory = _bytes(source)
            self._launch(_Flight(memory, memory.clone(), False, line()))

    def arrives(self, target: Tensor) -> None:
        """An asynchronous copy to pinned memory began. Until someone waits for it, the memory holds no numbers."""
        with unseen():
            memory = _bytes(target)
            self._launch(_Flight(memory, memory.clone(), True, line()))
            memory.fill_(255)

    def _launch(self, flight: _Flight) -> None:
        self._flights[self.launched] = flight
        self.launched += 1

    # several processes

    def leave(self) -> None:
        """Leave this process's counts for the one that started it."""
        self.settle()
        found = [[*key, n, self._bytes[key]] for key, n in self._times.items()]
        temporary = self.folder / f"counts-{os.getpid()}.part"
        temporary.write_text(json.dumps(found))
        temporary.rename(temporary.with_suffix(".json"))

    def total(self) -> Counts:
        """Of this process and of those that it started and that have ended."""
        total = self.counts
        for path in sorted(self.folder.glob("counts-*.json")):
            found = json.loads(path.read_text())
            times, sizes = ({(kind, line): row[i] for kind, line, *row in found} for i in (0, 1))
            total += Counts(times, sizes)
        return total

    def faults(self) -> dict[str, int]:
        """How often each happened, in this process and in those that it started."""
        self.settle()
        found: collections.Counter[str] = collections.Counter()
        for path in sorted(self.folder.glob("faults-*.txt")):
            found.update(path.read_text().splitlines())
        return dict(found)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Torch as it is, for the simulated GPU's own work."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def line() -> str:
    """The line that is running, of lockstep or another caller of torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inner(frame.f_code.co_filename):
        frame = frame.f_back
    return _line(frame.f_code, frame.f_lineno)


@functools.cache
def _is_inner(file: str) -> bool:
    return file.startswith(_INNER)


@functools.cache
def _line(code: CodeType, number: int) -> str:
    return f"{code.co_filename.removeprefix(_LOCKSTEP).removeprefix(_TESTS)}:{number} {code.co_name}"


def tensors(*parts: Any) -> list[Tensor]:
    """All in these lists, tuples and dictionaries."""
    found: list[Tensor] = []
    _collect(parts, found)
    return found


def _collect(parts: Iterable[Any], found: list[Tensor]) -> None:
    for x in parts:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            _collect(x, found)
        elif isinstance(x, dict):
            _collect(x.values(), found)


def _bytes(x: Tensor) -> Tensor:
    """The memory of a tensor without gaps."""
    return x.detach().as_strided((x.numel(),), (1,), x.storage_offset()).view(torch.uint8)
