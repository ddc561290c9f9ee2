"""Asks every process of a run on a Ray cluster about its node, and compares the nodes."""

from __future__ import annotations

import time
from typing import Any

from lockstep.launchers.ray.actors import call
from lockstep.launchers.ray.outcomes import fail, outcome, raised
from lockstep.launchers.ray.platforms import Platforms
from lockstep.launchers.ray.requests import Process
from lockstep.system.output import print_warning
from lockstep.training.job import Job

_AGAIN = 0.1
"""Seconds before an unreachable process is asked again."""
_ANSWERING = 20.0
"""Seconds that processes have to answer after the run is over."""


class Nodes:
    """The nodes of an attempt's processes."""

    def __init__(self, ray: Any, job: Job) -> None:
        self._ray, self._platforms = ray, Platforms(job)
        self._asked: dict[Any, tuple[Process, int | None]] = {}
        """By reference to the answer: the process, and its rank among the learners if it is one."""

    @property
    def open(self) -> list[Any]:
        """References to the answers that are missing."""
        return list(self._asked)

    def ask(self, process: Process, learner: int | None) -> None:
        """Ask a process, which need not have started. learner: its rank if it is a learner."""
        self._asked[call(process.handle, "node")] = process, learner

    def answered(self, ref: Any) -> None:
        """Compare the node of a process with learner 0's.

        Raises:
            SettingsError: the nodes must compute alike, but do not.
        """
        process, learner = self._asked.pop(ref)
        node, error = outcome(self._ray, ref)
        if (cause := raised(self._ray, error)) is not None:
            fail(cause)
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            time.sleep(_AGAIN)
            self.ask(process, learner)
        elif error is None and learner == 0:
            self._platforms.first(node)
        elif error is None:
            self._platforms.other(process.name, learner is not None, node)

    def finish(self) -> None:
        """Compare the remaining nodes, since a short run may end before all processes have answered. Warn about
        processes that do not answer now.

        Raises:
            SettingsError: as `answered`.
        """
        for ref, (process, learner) in list(self._asked.items()):
            if learner is None and not (process.delivered or process.answered):  # it has not started
                del self._asked[ref]
        until = time.monotonic() + _ANSWERING
        while self._asked and (left := until - time.monotonic()) > 0:
            for ref in self._ray.wait(self.open, num_returns=1, timeout=left, fetch_local=False)[0]:
                self.answered(ref)
        if self._asked:
            names = ", ".join(process.name for process, _ in self._asked.values())
            what = "no node was" if any(learner == 0 for _, learner in self._asked.values()) else "their nodes were not"
            print_warning(f"{names} did not answer in time, so {what} compared with learner 0's.")
