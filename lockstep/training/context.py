"""What every process of a run receives in addition to its job: its links to the others, and the run's status."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lockstep.collectors.preemption import DistantCounts
from lockstep.distributed.channels import Channels
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import SharedCounts
from lockstep.learners.parameter_store import Store
from lockstep.training.job import Job, Result
from lockstep.transport.inbox import Inbox


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """How a process reaches the other processes of its run."""

    group: Group = dataclasses.field(default_factory=Group)
    """The learners."""
    channels: Channels | None = None
    """Its channels to the other role, in a split layout on one machine."""
    inbox: Inbox | None = None
    """A learner's messages from and to collectors, in a split layout on several machines."""
    store: Store | None = None
    """Keeps the parameters of learners on several machines, if gradients are asynchronous."""
    counts: DistantCounts | None = None
    """Says which collected rollouts are late, on several machines, if these are preempted."""


class RunStatus:
    """What processes say of a run while it goes on: whether it is to stop, whether it has begun, and their heartbeats.

    Args:
        shared: `2 + processes` numbers that all processes of the run share.
        rank: of this process among them.
    """

    def __init__(self, shared: SharedCounts | None = None, rank: int = 0) -> None:
        self._shared, self._rank = shared, rank
        self._counts: Any = [0, 0, 0] if shared is None else shared.values
        """Whether a stop was requested, whether the first iteration has begun, and each process's steps."""

    def request_stop(self) -> None:
        """Ask for a checkpoint and a clean end after the current iteration."""
        self._counts[0] = 1

    def stop_requested(self) -> bool:
        return bool(self._counts[0])

    def begin(self) -> None:
        """Record that the first iteration begins: from now on there is something to save."""
        self._counts[1] = 1

    def begun(self) -> bool:
        return bool(self._counts[1])

    def heartbeat(self) -> None:
        """Count one step of progress."""
        self._counts[2 + self._rank] += 1

    def steps(self) -> int:
        """Steps so far."""
        return int(self._counts[2 + self._rank])

    def progress(self) -> list[int]:
        """Steps of every process so far."""
        return list(self._counts[2:])

    def __reduce__(self) -> tuple[Any, ...]:
        return RunStatus, (self._shared, self._rank)


Work = Callable[[Job, WorkerContext, RunStatus], Result | None]
"""What every process of a run does (lockstep.training.loops.work)."""
