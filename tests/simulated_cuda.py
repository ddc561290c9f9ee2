"""What stands in for torch.cuda's functions and classes on a simulated GPU."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from simulated_books import CAPTURE, LAUNCH, Books, tensors, unseen
from simulated_ipc import Handles
from simulated_streams import Capture, Clock, Moment
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "Simulated GPU"
_MEMORY = 80 << 30


class Event:
    """Marks how many asynchronous copies were launched, and when; and, for other processes, what came before.

    Args:
        file: what other processes read of it, if they can.
    """

    def __init__(self, books: Books, file: Path | None = None) -> None:
        self._books = books
        self._file = file
        self._launched = 0
        self._time = 0.0
        self._moment: Moment | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._launched, self._time = self._books.launched, time.perf_counter()
        self._moment = self._books.streams.mark(self._or_current(stream))
        if self._file is not None:
            Handles.write(self._file, self._books.shared.known)

    def ipc_handle(self) -> bytes:
        if self._file is None:
            self._books.refuse("CUDA error: an event without interprocess=True has no handle")
        return f"{os.getpid()} {self._file}".encode()

    def synchronize(self) -> None:
        self._books.wait(self._launched, self._known)

    def query(self) -> bool:
        """Whether all is done, which it then is."""
        self._books.settle(self._launched)
        self._books.streams.waited(self._known)
        return True

    def wait(self, stream: Stream | None = None) -> None:
        """A stream waits, not the host."""
        if self._moment is not None:
            self._books.streams.wait(self._or_current(stream), self._moment)
        if self._file is not None:
            self._books.shared.learn(Handles.read(self._file))

    def elapsed_time(self, end: Event) -> float:
        """In milliseconds."""
        return 1000 * (end._time - self._time)

    def _or_current(self, stream: Stream | None) -> Stream:
        return self._books.streams.current(self._books.current) if stream is None else stream

    @property
    def _known(self) -> dict[int, int]:
        return {} if self._moment is None else self._moment.known


class Stream(Clock):
    """Its kernels run one after the other."""

    def __init__(self, books: Books, device: Any = None) -> None:
        self._books = books
        self.device = books.wanted("cuda" if device is None else device)
        super().__init__(books, self.device.index)
        self._before: list[Clock] = []

    def wait_stream(self, stream: Stream) -> None:
        """A stream waits, not the host."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self._books) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._books.wait(known=self.tell())

    def query(self) -> bool:
        """Whether all is done, which it then is."""
        self._books.settle()
        self._books.streams.waited(self.tell())
        return True

    def __enter__(self) -> Stream:
        self._before.append(self._books.streams.enter(self))
        return self

    def __exit__(self, *reason: object) -> None:
        self._books.streams.enter(self._before.pop())


class _Tape(TorchDispatchMode):
    """Notes the calls of kernels, and how memory was before them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As Kernels says."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = [*zip(arguments, args), *((each, kwargs[each.name]) for each in arguments if each.name in kwargs)]
        with unseen():
            for argument, value in given:
                if argument.is_write:
                    for x in tensors(value):
                        self._before.setdefault(x.untyped_storage()._cdata, (x, _memory(x).clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        """Give memory the content that it had: what is captured does not run."""
        with unseen():
            for x, content in self._before.values():
                _memory(x).copy_(content)


class CUDAGraph:
    """Repeats kernels on the same memory."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._tape = _Tape()
        self._capture: Capture | None = None

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self._books.note(CAPTURE)
        streams = self._books.streams
        self._capture = streams.begin(streams.current(self._books.current))
        self._books.tape = self._tape = _Tape()
        self._tape.__enter__()

    def capture_end(self) -> None:
        self._tape.__exit__(None, None, None)
        self._books.tape = None
        self._tape.undo()
        self._books.streams.end()

    def replay(self) -> None:
        self._books.note(LAUNCH)
        self._books.streams.launch(self._capture)
        with unseen(), torch.no_grad():
            for func, args, kwargs, result in self._tape.calls:
                for held, new in zip(tensors(result), tensors(func(*args, **kwargs)), strict=True):
                    if held.untyped_storage()._cdata != new.untyped_storage()._cdata:
                        held.copy_(new)

    def reset(self) -> None:
        self._tape = _Tape()


class _Graph:
    """As torch.cuda.graph: captures what happens in its block."""

    def __init__(self, graph: CUDAGraph, books: Books, stream: Stream) -> None:
        self._graph = graph
        self._books = books
        self._stream = stream
        self._leave = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._books.wait()
        self._books.streams.waited_for_all(self._stream.index)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._stream)
            self._graph.capture_begin()
            self._leave = stack.pop_all()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._leave:
            self._graph.capture_end()


def stand_ins(books: Books) -> dict[str, Callable[..., Any]]:
    """By their names in torch.cuda."""
    streams = books.streams

    def set_device(device: Any) -> None:
        books.current = books.wanted(device).index

    def number(device: Any = None) -> int:
        return books.wanted("cuda" if device is None else device).index

    def synchronize(device: Any = None) -> None:
        books.wait()
        streams.waited_for_all(number(device))

    def properties(device: Any = None) -> SimpleNamespace:
        number(device)
        return SimpleNamespace(
            name=NAME,
            major=9,
            minor=0,
            total_memory=_MEMORY,
            multi_processor_count=132,
            max_threads_per_multi_processor=2048,
            warp_size=32,
            L2_cache_size=50 << 20,
            is_integrated=0,
            is_multi_gpu_board=0,
            uuid=f"simulated-{number(device)}",
        )

    class OwnEvent(Event):
        def __init__(
            self,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> None:
            if enable_timing and interprocess:
                books.refuse("CUDA error: events of several processes keep no time")
            super().__init__(books, books.shared.new("event") if interprocess else None)

        @classmethod
        def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
            owner, _, file = handle.decode().partition(" ")
            books.wanted(device)
            books.shared.may_open(owner)
            return Event(books, Path(file))

    runtime = SimpleNamespace(
        cudaHostRegister=lambda pointer, size, flags: books.register(pointer, size) or 0,
        cudaHostUnregister=lambda pointer: books.unregister(pointer) or 0,
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda *args: True,
        "device_count": lambda: books.gpus,
        "current_device": lambda: books.current,
        "set_device": set_device,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (properties(device).major, properties(device).minor),
        "can_device_access_peer": lambda device, peer: True,
        "mem_get_info": lambda device=None: (_MEMORY, _MEMORY),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "synchronize": synchronize,
        "cudart": lambda: runtime,
        "check_error": lambda code: None,
        "Event": OwnEvent,
        "ipc_collect": lambda: None,
        "Stream": lambda device=None, *args, **kwargs: Stream(books, device),
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "current_stream": lambda device=None: streams.current(number(device)),
        "default_stream": lambda device=None: streams.defaults[number(device)],
        "CUDAGraph": lambda *args, **kwargs: CUDAGraph(books),
        "graph": lambda graph, pool=None, stream=None, **kwargs: _Graph(graph, books, stream or Stream(books)),
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: books.tape is not None,
    }


def _memory(x: Tensor) -> Tensor:
    """All memory that a tensor is a view of, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
