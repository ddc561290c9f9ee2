"""Cores and GPUs that the sweeps of one machine leave to each other."""

from __future__ import annotations

import socket
from collections.abc import Iterable


class Claims:
    """What one sweep has taken of its machine. A claim is a name that the system gives to one socket at a time, in no
    file: it goes with the process. Containers with networks of their own do not see each other's."""

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back(list(self._held))

    def taken(self, name: str) -> bool:
        """Whether another sweep has this."""
        if name in self._held:
            return False
        claim = _claim(name)
        if claim is not None:
            claim.close()
        return claim is None

    def take(self, names: Iterable[str]) -> None:
        """Claim these, as far as other sweeps have not."""
        for name in names:
            if name not in self._held and (claim := _claim(name)) is not None:
                self._held[name] = claim

    def give_back(self, names: Iterable[str]) -> None:
        """Leave these to others."""
        for name in names:
            if name in self._held:
                self._held.pop(name).close()


def _claim(name: str) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0lockstep-sweep/{name}")
    except OSError:
        claim.close()
        return None
    return claim
