"""The context of every process of a run, in addition to its job: connections to the others, and the run's status."""

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
    """A process's connections to the other processes of its run."""

    group: Group = dataclasses.field(default_factory=Group)
    """The group of all learners."""
    channels: Channels | None = None
    """Its channels to the other role, in a split layout on one machine."""
    inbox: Inbox | None = None
    """A learner's messages from and to collectors, in a split layout on several machines."""
    store: Store | None = None
    """The parameters of learners on several machines, if gradients are asynchronous."""
    counts: DistantCounts | None = None
    """The counts of collected rollouts on several machines, if late rollouts are preempted."""

    @property
    def of_collector(self) -> Channels | None:
        """The channels of a process that only collects; None in a learner."""
        return self.channels if self.channels is not None and self.channels.role == "collector" else None


class RunStatus:
    """The status of a running run, which its processes share: whether it should stop, whether it has begun, and each
    process's heartbeat.

    Args:
        shared: `2 + processes` numbers that all processes of the run share.
        rank: the number of this process among them.
    """

    def __init__(self, shared: SharedCounts | None = None, rank: int = 0) -> None:
        self._shared, self._rank = shared, rank
        self._counts: Any = [0, 0, 0] if shared is None else shared.values
        """Whether a stop was requested, whether the first iteration has begun, and each process's steps."""

    def request_stop(self) -> None:
        """Request a checkpoint and a clean end after the current iteration."""
        self._counts[0] = 1

    def stop_requested(self) -> bool:
        """Whether request_stop was called."""
        return bool(self._counts[0])

    def begin(self) -> None:
        """Record that the first iteration begins. From now on, a stop writes a checkpoint."""
        self._counts[1] = 1

    def begun(self) -> bool:
        """Whether begin was called."""
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
"""The function that every process of a run calls (lockstep.training.loops.work)."""
