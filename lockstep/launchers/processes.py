"""Runs in child processes. This process watches them and reports why a run failed."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.core.shards import block
from lockstep.distributed.channels import Channels, open_channels
from lockstep.distributed.device_memory import counters, forget
from lockstep.distributed.groups import CONSEQUENCES, GlooGroup, Group, meeting_point
from lockstep.distributed.local_group import Ends, LocalGroup, join
from lockstep.distributed.shared_memory import SharedCounts
from lockstep.distributed.tree import partners
from lockstep.launchers.watching import no_progress, stopping_on_signals
from lockstep.system import children, machine
from lockstep.system.output import own_streams, print_line
from lockstep.system.supervision import StallDetector, WorkerError
from lockstep.training.context import RunStatus, Work, WorkerContext
from lockstep.training.job import Job, Result

_EXPLAINING = 2.0
"""Seconds that other processes have to report the cause of a broken connection or of a stall."""


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """A process to be started."""

    name: str
    """The name in messages to the user."""
    ends: Ends | None = None
    """Its connections to the other learners."""
    channels: Channels | None = None
    """Its connections to the other role, in a split layout."""
    meeting: Meeting | None = None
    """Its connection to the other learners, if they are in several groups that torchrun or srun started."""

    @property
    def only_collects(self) -> bool:
        """Whether it does not learn, and thus exchanges no gradients."""
        return self.ends is None and self.meeting is None


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The host and port where a learner meets those of other groups, and its rank among them."""

    host: str
    port: int
    rank: int
    size: int
    groups: int

    def join(self) -> Group:
        """Wait for all learners, and return their group."""
        return GlooGroup(meeting_point(self.host, self.port)[0], self.rank, self.size, self.groups)


class NoOtherGroups:
    """The interface to the other groups of a run's processes, for the process that starts one group. In this class,
    there are none. lockstep.launchers.spread has a subclass with others."""

    @property
    def connections(self) -> Sequence[Connection]:
        """Connections to wait for, in addition to this group's processes."""
        return ()

    @property
    def running(self) -> bool:
        """Whether other groups are still running."""
        return False

    def failure(self) -> str | None:
        """The failure of another group, if one has failed."""
        return None

    def moved(self, progress: object) -> bool:
        """Tell the others about progress of this group. Returns whether another group has made progress."""
        return False

    def ended(self) -> None:
        """Tell the others that all processes of this group have ended without errors."""


def _worker_specs(layout: Layout, shards: int, context: Any) -> list[WorkerSpec]:
    """Every process of a layout. The first one returns the result."""
    collectors, learners, copies = len(layout.collectors), layout.learning, layout.copies
    joined = join(context, learners, partners(shards, learners, copies), copies)
    if not layout.split:
        return [WorkerSpec(f"Worker {ends.rank} of {learners}", ends) for ends in joined]
    collects, learns = ([block(shards, n, i, copies) for i in range(n)] for n in (collectors, learners))
    of_learners, of_collectors = open_channels(context, collects, learns)
    return [
        *(
            WorkerSpec(f"Learner {ends.rank} of {learners}", ends, channels)
            for ends, channels in zip(joined, of_learners, strict=True)
        ),
        *(WorkerSpec(f"Collector {i} of {collectors}", channels=channels) for i, channels in enumerate(of_collectors)),
    ]


def run_processes(work: Work, job: Job) -> Result:
    """Run workers, or learners and collectors, as child processes. This process only watches them.

    Raises:
        WorkerError: a process failed; the message contains the traceback of the first one.
    """
    context = multiprocessing.get_context("spawn")
    return run_specs(
        work, job, context, _worker_specs(job.layout, job.experiment.scheme.shards, context), NoOtherGroups()
    )


def run_specs(work: Work, job: Job, context: Any, specs: list[WorkerSpec], others: NoOtherGroups) -> Result:
    """Start these processes and watch them. Returns the result of the first one.

    Raises:
        WorkerError: one of them, or of another group, failed.
    """
    available = machine.cores()
    shared = SharedCounts(2 + len(specs))
    pipes: list[Connection] = []
    processes: list[Any] = []
    status = RunStatus(shared)
    try:
        with stopping_on_signals(status):
            if job.options.display != "none":
                print_line(f"Starting {len(specs)} processes …", sys.stderr)
            for index, spec in enumerate(specs):
                ours, theirs = context.Pipe()
                process = children.start(
                    _child,
                    (work, spec, available, theirs, RunStatus(shared, index)),
                    f"lockstep-{spec.name.lower().replace(' ', '-')}",
                )
                processes.append(process)
                pipes.append(ours)
                theirs.close()
                if job.layout.pin:
                    children.pin(process, index, len(specs))
                if spec.only_collects:
                    children.yield_to_others(process, job.layout.nice)
            for end in (end for spec in specs for end in (spec.ends, spec.channels) if end is not None):
                end.close()
            for pipe in pipes:  # not by start(), which would wait forever if the process died before reading
                with contextlib.suppress(OSError):  # the process has died, which _watch reports
                    pipe.send(job)
            names = [spec.name for spec in specs]
            return _watch(names, processes, pipes, status, job.layout, others, job.environments_each)
    finally:
        alive = [process for process in processes if process.is_alive()]
        left = [file for process in alive for file in counters(process.pid)] if job.layout.opens_gpus else []
        for process in alive:
            process.kill()
        for process in processes:
            process.join()
        forget(left)
        shared.close()


def _watch(
    names: list[str],
    processes: list[Any],
    pipes: list[Connection],
    status: RunStatus,
    layout: Layout,
    others: NoOtherGroups,
    environments: int = 0,
) -> Result:
    """Wait until every process has answered. Raise WorkerError as soon as one fails or dies, or all stall.

    Args:
        environments: the number of environments of a process, which take time to make.
    """
    results: dict[int, Result | None] = {}
    stall = StallDetector(layout.stall_timeout, environments)
    while len(results) < len(processes) or others.running:
        open_ranks = [rank for rank in range(len(processes)) if rank not in results]
        failures = _failed(*children.first_answers(processes, pipes, open_ranks, others.connections), results)
        if failures:
            raise WorkerError(_first_cause(failures, names, processes, pipes, results, others))
        if (elsewhere := others.failure()) is not None:
            raise WorkerError(elsewhere)
        if len(results) == len(processes):
            others.ended()
        now = status.progress()
        if others.moved(now):
            stall.moved()
        patience = stall.too_long(now, started=any(now), grace=_EXPLAINING)
        if patience is not None:
            for rank in open_ranks:
                children.show_stack(processes[rank], names[rank])
            raise WorkerError(no_progress(patience, dict(zip(names, now, strict=True)), layout))
    result = results[0]
    assert result is not None, "learners return a result"
    return result


def _failed(answers: dict[int, tuple[str, Any]], deaths: dict[int, str], results: dict[int, Any]) -> dict[int, str]:
    """The errors and deaths of workers, by rank. Adds new results to `results`, and raises a user's mistake."""
    if mistake := next((value for kind, value in answers.values() if kind == "mistake"), None):
        raise mistake
    results |= {rank: value for rank, (kind, value) in answers.items() if kind == "result"}
    errors = {rank: value for rank, (kind, value) in answers.items() if kind == "error"}
    return dict(sorted((deaths | errors).items()))


def _first_cause(
    failures: dict[int, str],
    names: list[str],
    processes: list[Any],
    pipes: list[Connection],
    results: dict[int, Any],
    others: NoOtherGroups,
) -> str:
    """The failure to show. When a worker dies, its peers fail a moment later with a broken connection. A death or
    another kind of error explains more."""

    def follows(text: str) -> bool:
        return any(phrase in text for phrase in CONSEQUENCES)

    deadline = time.monotonic() + _EXPLAINING
    while all(map(follows, failures.values())) and time.monotonic() < deadline:
        missing = [rank for rank in range(len(processes)) if rank not in failures and rank not in results]
        failures |= _failed(*children.first_answers(processes, pipes, missing, timeout=0.05), results)
        if all(map(follows, failures.values())) and (elsewhere := others.failure()) is not None:
            return elsewhere
    rank, text = min(failures.items(), key=lambda item: follows(item[1]))
    return f"{names[rank]} {text}"


def _child(work: Work, spec: WorkerSpec, available: int, pipe: Connection, status: RunStatus) -> None:
    """The main function of a run's process. It receives its job, joins the others, works, and reports how it ended.

    Args:
        available: the number of cores of the whole run.
    """
    reporting = threading.Lock()
    opens_gpus = False
    own_streams()

    def end(kind: str, what: str | SettingsError) -> None:
        reporting.acquire()  # never released, since only the first report counts
        with contextlib.suppress(OSError):  # the result may have been sent, and the pipe closed
            pipe.send((kind, what))
            pipe.close()
        sys.stdout.flush()
        if opens_gpus:
            forget(counters(os.getpid()))
        os._exit(1)

    children.report_losses(lambda text: end("error", f"failed: {text}"))
    try:
        job = pipe.recv()
        opens_gpus = job.layout.opens_gpus
        machine.belongs_to_a_run_with(available)
        group = Group() if spec.ends is None else LocalGroup(spec.ends)
        group = group if spec.meeting is None else spec.meeting.join()
        result = work(job, WorkerContext(group, spec.channels), status)
        pipe.send(("result", result))
        pipe.close()
        group.close()
    except SettingsError as error:
        end("mistake", error.bare())
    except BaseException:
        end("error", "failed:\n" + traceback.format_exc())
