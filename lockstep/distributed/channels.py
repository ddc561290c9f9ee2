"""Channels between the collectors and learners of one machine: a pipe for each pair, and shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from lockstep.distributed.shared_memory import SharedMemory
from lockstep.system.children import allow_files


@dataclass(frozen=True)
class Channels:
    """One process's ends. Messages are small: rollouts and parameters stay in shared memory."""

    role: Literal["collector", "learner"]
    index: int
    """The number of this process among those of its role on this machine. The first learner sends versions and
    requests to the collectors, for all learners of the machine."""
    collects: list[range]
    """The shards of each collector."""
    learns: list[range]
    """The batch slots of each learner."""
    peers: list[Connection]
    """Pipes to every process of the other role."""
    rollouts: list[SharedMemory]
    """The buffers of each collector."""
    versions: SharedMemory
    """The newest versions, written by the first learner."""
    admission: SharedMemory
    """The Admission of free-running processes; with preemption, the counts of SharedPreemption."""

    @property
    def collectors(self) -> int:
        """The number of collectors on this machine."""
        return len(self.rollouts)

    def send(self, message: Any, to: int) -> None:
        """Send to one process of the other role. This blocks only if tens of messages are unread.

        Raises:
            ConnectionError: that process is gone.
        """
        try:
            self.peers[to].send(message)
        except OSError:
            raise self._gone(to) from None

    def receive(self, origins: Sequence[int], *, block: bool = True) -> list[tuple[int, Any]]:
        """All messages that have arrived from any of the origins, each with its sender. block: wait for at least one.

        Raises:
            ConnectionError: one of the origins is gone.
        """
        ready = wait([self.peers[origin] for origin in origins], timeout=None if block else 0)
        messages = []
        for origin in origins:
            if self.peers[origin] in ready:
                try:
                    messages.append((origin, self.peers[origin].recv()))
                    while self.peers[origin].poll():
                        messages.append((origin, self.peers[origin].recv()))
                except (EOFError, OSError):
                    if not messages:  # otherwise the caller handles earlier messages first
                        raise self._gone(origin) from None
        return messages

    def _gone(self, index: int) -> ConnectionError:
        other = "learner" if self.role == "collector" else "collector"
        return ConnectionError(f"Connection closed by peer: {other} {index}")

    def close(self) -> None:
        """Close this process's ends."""
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.close()
        for memory in (*self.rollouts, self.versions, self.admission):
            memory.close()


def open_channels(context: Any, collects: list[range], learns: list[range]) -> tuple[list[Channels], list[Channels]]:
    """The ends of all learners and of all collectors. The process that starts them makes these.

    Args:
        collects: the shards of each collector.
        learns: the batch slots of each learner.
    """
    collectors, learners = len(collects), len(learns)
    allow_files(2 * collectors * learners + collectors + 2)
    pipes = [[context.Pipe() for _ in range(learners)] for _ in range(collectors)]
    rollouts, shared = [SharedMemory() for _ in range(collectors)], (SharedMemory(), SharedMemory())
    of_learners = [
        Channels("learner", i, collects, learns, [pipes[c][i][0] for c in range(collectors)], rollouts, *shared)
        for i in range(learners)
    ]
    of_collectors = [
        Channels("collector", c, collects, learns, [pipes[c][i][1] for i in range(learners)], rollouts, *shared)
        for c in range(collectors)
    ]
    return of_learners, of_collectors
