"""Cores that the sweeps of one machine leave to each other."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_PATIENCE = 1.0
"""Seconds that another sweep may take to choose."""


class CoreLocks:
    """The cores that one sweep has taken of its machine. A claim is the name of a socket, in no file: all processes can
    list these, and it goes with its own. Containers with networks of their own do not see each other's.

    Args:
        machine: sweeps with the same see each other.
    """

    def __init__(self, machine: str = "lockstep-sweep") -> None:
        self._machine, self._own = machine, secrets.token_hex(8)
        self._held: dict[int, socket.socket] = {}

    def __enter__(self) -> CoreLocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back(list(self._held))

    def take(self, choose: Callable[[Counter[int]], tuple[int, ...]]) -> tuple[tuple[int, ...], bool]:
        """Claim the cores that are chosen, given how many other sweeps have each; these, and whether any has one."""
        with self._alone():
            others = self._others()
            cores = choose(others)
            for core in cores:
                if claim := _socket(f"{self._machine}/{core}/{self._own}"):
                    self._held[core] = claim
        return cores, any(others[core] for core in cores)

    def give_back(self, cores: Iterable[int]) -> None:
        """Leave these to others."""
        for core in cores:
            if core in self._held:
                self._held.pop(core).close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other sweep chooses."""
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
    """One with this name, which no other has meanwhile; None if one has, or the system refuses."""
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
