"""CUDA IPC on a simulated GPU: memory and events that other processes open.

Shared memory is a mapped file. A GPU runs kernels later than the host launches them, so memory of another process may
only be touched after what that process did to it before, which events say. To find out whether they do, each process
counts its accesses, an event carries the counts that it comes after, and memory remembers its last accesses: vector
clocks (Lamport 1978, Mattern 1989).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from simulated_books import Books, tensors, unseen
from simulated_streams import learn, unordered
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_UNORDERED = "before an event said that the other process was done with it"


class Shared:
    """What this process has shared or opened."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.known: dict[str, int] = {}
        """By process: which of its accesses this process's GPU comes after."""
        self._names = itertools.count()
        self._memory: dict[int, tuple[StorageWeakRef, Path]] = {}
        """By the address of a storage: its file of accesses."""
        self.refusal = ""
        """Why handles cannot be opened, if they cannot."""

    @property
    def _me(self) -> str:
        return str(os.getpid())

    def new(self, kind: str) -> Path:
        """A file that other processes can find."""
        return self._books.folder / f"{kind}-{self._me}-{next(self._names)}"

    def share(self, x: Tensor) -> Tensor:
        """Move a tensor's memory to a file. Views that were made before stay where they are."""
        self._reachable(x)
        file = self.new("memory")
        with unseen():
            content, device = x.clone(), self._books.device(x)
            mapped = _mapped(file, x.nbytes)
            x.set_(mapped.view(x.dtype).untyped_storage(), 0, x.shape, x.stride())
            x.copy_(content)
        self._books.put(x, device)
        self._follow(x, file)
        return x

    def handle(self, x: Tensor) -> tuple[Any, ...]:
        """As the arguments that torch.multiprocessing.reductions.reduce_tensor returns for torch on CUDA."""
        if self._file(x) is None:
            self.share(x)
        file = self._file(x)
        return self._me, str(file), x.dtype, tuple(x.shape), self._books.device(x).index, dict(self.known)

    def opened(
        self, owner: str, file: str, dtype: torch.dtype, shape: tuple[int, ...], index: int, known: dict[str, int]
    ) -> Tensor:
        """As torch.multiprocessing.reductions.rebuild_cuda_tensor: it waits for what its owner did before."""
        self.may_open(owner)
        with unseen():
            x = _mapped(Path(file), torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)
        self._books.put(x, self._books.wanted(index))
        self._follow(x, Path(file))
        with _held(Path(file).with_suffix(".accesses")) as accesses:
            accesses["opened"] = True
        self.learn(known)
        return x

    def may_open(self, owner: str) -> None:
        """Refuse handles as CUDA does."""
        if owner == self._me:
            self._books.refuse("CUDA error: a handle was opened by the process that made it")
        if not _lives(owner):
            self._books.refuse("CUDA error: a handle was opened of a process that has ended")
        if self.refusal:
            raise RuntimeError(self.refusal)

    def learn(self, known: dict[str, int]) -> None:
        """The GPU comes after these accesses from now on."""
        learn(self.known, known)

    def check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Notice what a kernel reads and writes."""
        if not self._memory:
            return
        arguments = func._schema.arguments
        given = [*zip(arguments, args), *((each, kwargs[each.name]) for each in arguments if each.name in kwargs)]
        for argument, value in given:
            for x in tensors(value):
                if self._file(x) is not None:
                    self.accessed(x, writes=argument.is_write)

    def accessed(self, x: Tensor, *, writes: bool) -> None:
        """Note an access, and a fault if it may come before the one of another process that it needs."""
        file = self._file(x)
        assert file is not None
        with _held(file.with_suffix(".accesses")) as accesses:
            last = accesses.setdefault("writer", {}), accesses.setdefault("readers", {})
            earlier = [*last[0].items(), *(last[1].items() if writes else ())]
            late = unordered(earlier, self.known)
            unread = writes and bool(last[0]) and not last[1] and accesses.get("opened")
            if late or unread:
                self._books.fault(f"memory of a GPU was {'reused' if writes else 'read'} {_UNORDERED}")
            self.known[self._me] = self.known.get(self._me, 0) + 1
            now = {self._me: self.known[self._me]}
            if writes:
                accesses |= {"writer": now, "readers": {}}
            else:
                accesses["readers"] |= now

    def _follow(self, x: Tensor, file: Path) -> None:
        storage = x.untyped_storage()
        self._memory[storage._cdata] = StorageWeakRef(storage), file

    def _file(self, x: Tensor) -> Path | None:
        found = self._memory.get(x.untyped_storage()._cdata)
        return None if found is None else found[1]

    def _reachable(self, x: Tensor) -> None:
        if self._books.device(x).type != "cuda":
            self._books.refuse("_share_cuda_: only available on CUDA")
        if self._books.tape is not None:
            self._books.refuse("memory is shared while a graph is captured")


class Handles:
    """The handles of events, which are files, too."""

    @staticmethod
    def write(file: Path, known: dict[str, int]) -> None:
        with _held(file) as content:
            content.clear()
            content |= known

    @staticmethod
    def read(file: Path) -> dict[str, int]:
        with _held(file) as content:
            return dict(content)


@contextlib.contextmanager
def _held(file: Path) -> Iterator[dict[str, Any]]:
    """The content of a JSON file, which others wait for."""
    with open(file, "a+") as opened:
        fcntl.lockf(opened, fcntl.LOCK_EX)
        opened.seek(0)
        text = opened.read()
        content = json.loads(text) if text else {}
        yield content
        opened.seek(0)
        opened.truncate()
        opened.write(json.dumps(content))
        opened.flush()


def _mapped(file: Path, size: int) -> Tensor:
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)


def _lives(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
