"""Runs everything in the calling process."""

from __future__ import annotations

import contextlib

from lockstep.launchers.watching import stopping_on_signals, watched
from lockstep.system.supervision import stall_handler
from lockstep.training.context import RunStatus, Work, WorkerContext
from lockstep.training.job import Job, Result


def run_inline(work: Work, job: Job) -> Result:
    """Run everything in the calling process, so that a debugger can step through it."""
    status, fail = RunStatus(), stall_handler()
    stall_timeout, environments = job.layout.stall_timeout, job.environments_each
    watching = contextlib.nullcontext() if fail is None else watched(fail, status, stall_timeout, None, environments)
    with stopping_on_signals(status), watching:
        result = work(job, WorkerContext(), status)
    assert result is not None, "learners return a result"
    return result
