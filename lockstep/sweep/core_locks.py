"""Locks on cores, which keep the sweeps of one machine from using the same cores."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_PATIENCE = 1.0
"""Seconds to wait while another sweep chooses its cores."""


class CoreLocks:
    """The cores that one sweep has taken on its machine. A lock is the name of an abstract socket: every process can
    list these names, and a name disappears with its process. Containers with their own network do not see each other's.

    Args:
        machine: sweeps with the same name see each other.
    """

    def __init__(self, machine: str = "lockstep-sweep") -> None:
        self._machine, self._own = machine, secrets.token_hex(8)
        self._held: dict[int, socket.socket] = {}

    def __enter__(self) -> CoreLocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back(list(self._held))

    def take(self, choose: Callable[[Counter[int]], tuple[int, ...]]) -> tuple[tuple[int, ...], bool]:
        """Lock the cores that choose returns, given how many other sweeps use each. Returns the cores, and whether
        another sweep uses any of them."""
        with self._alone():
            others = self._others()
            cores = choose(others)
            for core in cores:
                if claim := _socket(f"{self._machine}/{core}/{self._own}"):
                    self._held[core] = claim
        return cores, any(others[core] for core in cores)

    def give_back(self, cores: Iterable[int]) -> None:
        """Release these cores."""
        for core in cores:
            if core in self._held:
                self._held.pop(core).close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock that allows only one sweep at a time to choose cores."""
        deadline = time.monotonic() + _PATIENCE
        while (lock := _socket(self._machine)) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        with lock or contextlib.nullcontext():
            yield

    def _others(self) -> Counter[int]:
        try:
            lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return Counter()
        names = [line.partition(f"@{self._machine}/")[2].split("/") for line in lines if f"@{self._machine}/" in line]
        return Counter(int(core) for core, whose in names if whose != self._own)


def _socket(name: str) -> socket.socket | None:
    """A socket with this name, which no other process can bind meanwhile; None if the name is taken or the system
    refuses."""
    try:
        made = socket.socket(socket.AF_UNIX)
    except OSError:
        return None
    try:
        made.bind(f"\0{name}")
    except OSError:
        made.close()
        return None
    return made
