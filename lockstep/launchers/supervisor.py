"""Starting processes, watching them, and ending with a clear word whatever happens to them."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.distributed.channels import Link, links
from lockstep.distributed.groups import CONSEQUENCES, MEETING, GlooGroup, Group
from lockstep.distributed.local_group import Ends, LocalGroup, join
from lockstep.distributed.shared_memory import SharedCounts
from lockstep.distributed.tree import partners
from lockstep.system import children, machine
from lockstep.system.output import own_streams, tell

if TYPE_CHECKING:
    from lockstep.training.job import Job, Result
    from lockstep.transport.messages import Inbox

Work = Callable[["Job", "WorkerContext", "StopRequest"], "Result | None"]

_GRACE = 5.0
"""Seconds that the other workers get to end by themselves after one has failed."""

_EXPLAINING = 2.0
"""Seconds that whoever knows more gets to say it: of a broken connection, or of a stall."""

_VISIBLE = 60.0
"""Seconds that a new file may take to be seen on other hosts: NFS remembers for a while what is in a folder."""

_fail: Callable[[str], Any] | None = None


class WorkerError(RuntimeError):
    """A worker raised, died or stalled; the text holds its traceback or signal."""


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """A process's place among those of its run."""

    group: Group = dataclasses.field(default_factory=Group)
    """Those that learn together."""
    link: Link | None = None
    """To the other role, in a split layout of one machine."""
    inbox: Inbox | None = None
    """What comes from collectors, and is for them, on several machines."""


class StopRequest:
    """How a worker learns that it should stop, and shows that it is alive.

    Args:
        shared: with the other processes of its run, for `2 + processes` numbers.
        rank: of this one among them.
    """

    def __init__(self, shared: SharedCounts | None = None, rank: int = 0) -> None:
        self._shared, self._rank = shared, rank
        self._counts: Any = [0, 0, 0] if shared is None else shared.values
        """Whether it was requested, whether the first iteration has begun, and each process's steps."""

    def request(self) -> None:
        """Ask for a checkpoint and a clean end after the current iteration."""
        self._counts[0] = 1

    def requested(self) -> bool:
        return bool(self._counts[0])

    def begin(self) -> None:
        """The first iteration begins: from now on there is something to be saved."""
        self._counts[1] = 1

    def begun(self) -> bool:
        return bool(self._counts[1])

    def alive(self) -> None:
        """Count one step of progress."""
        self._counts[2 + self._rank] += 1

    def steps(self) -> int:
        """Steps so far."""
        return int(self._counts[2 + self._rank])

    def progress(self) -> list[int]:
        """Steps of every process so far."""
        return list(self._counts[2:])

    def __reduce__(self) -> tuple[Any, ...]:
        return StopRequest, (self._shared, self._rank)


@contextlib.contextmanager
def stopping_on_signals(stop: StopRequest) -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a stop request; a SIGINT or SIGTERM after it ends at once, and so
    does the first one while the run starts.

    A SIGTERM that comes together with the first request says nothing new, nor does a SIGHUP: a machine that shuts down
    sends them to every process, and so does whoever started this one and was told, too. Nor does any SIGTERM where
    somebody else watches (unattended), who passes them on late, perhaps, and ends what does not end by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received, overseen = (children.Requests(patient=is_unattended()) for _ in range(2))
    ended = False

    def handle(number: int) -> None:
        nonlocal ended
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            children.forget_terminal()
        if received.insists(number):
            raise KeyboardInterrupt
        if stop.requested() or ended:
            return
        if not stop.begun():
            ended = True
            tell(f"{name}: stopped before the first iteration.", sys.stderr)
            raise KeyboardInterrupt
        stop.request()
        tell(
            f"{name}: checkpoint and stop after this iteration; a further Ctrl-C stops at once, and so does a further "
            "SIGTERM.",
            sys.stderr,
        )

    def at_once(number: int) -> bool:
        insists = overseen.insists(number)
        return number == signal.SIGTERM and (insists or not stop.begun())

    with children.handling_stops(handle), children.ending_for_certain(at_once):
        yield


@contextlib.contextmanager
def unattended(fail: Callable[[str], Any]) -> Iterator[None]:
    """Have inline runs watched, too, from a thread: if one makes no progress for the layout's stall_timeout, fail is
    called, which has to end the process. Not the default, since a person may have stopped such a run in a debugger."""
    global _fail
    _fail = fail
    try:
        yield
    finally:
        _fail = None


def is_unattended() -> bool:
    """Whether unattended is in force."""
    return _fail is not None


def run_inline(work: Work, job: Job) -> Result:
    """Everything in the calling process, steppable in a debugger."""
    stop = StopRequest()
    watched = contextlib.nullcontext() if _fail is None else _watched(_fail, stop, job.layout.stall_timeout)
    with stopping_on_signals(stop), watched:
        return _result(work(job, WorkerContext(), stop))


@contextlib.contextmanager
def _watched(
    fail: Callable[[str], Any], stop: StopRequest, stall_timeout: float, group: Group | None = None
) -> Iterator[None]:
    """Have a thread watch the calling one, which works, but for the time in which it waits for others of its group."""
    ended = threading.Event()
    arguments = (fail, stop, ended, stall_timeout, threading.get_ident(), group or Group())
    threading.Thread(target=_watch_own, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch_own(
    fail: Callable[[str], Any],
    stop: StopRequest,
    ended: threading.Event,
    stall_timeout: float,
    thread: int,
    group: Group,
) -> None:
    standstill = children.StallDetector(stall_timeout)
    while not ended.wait(1.0):
        if group.waiting:
            standstill.moved()
        now = stop.steps()
        patience = standstill.too_long(now, started=now > 0)
        if patience is not None:
            stack = "".join(traceback.format_stack(sys._current_frames().get(thread)))
            fail(
                f"This process has made no progress for {patience:g} seconds (Layout.stall_timeout), after {now} "
                f"steps. It stands here:\n{stack}To allow longer, use stall_timeout=SECONDS in its layout."
            )


def run_torchrun(work: Work, job: Job) -> Result:
    """One of several processes that torchrun started. torchrun sees it when one ends, and each whether it goes on."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stop = StopRequest()
    stop.begin()  # whoever stops before the others would be taken for lost
    layout = dataclasses.replace(job.layout, workers=size)

    def fail(reason: str) -> None:
        tell(f"Process {rank} of {size}: {reason}", sys.stderr)
        os._exit(1)  # which torchrun ends the others for

    late = (
        "it has waited in vain for the others, of which one ended while they met, or cannot be reached through the "
        "network interface that gloo took (GLOO_SOCKET_IFNAME names another)."
    )
    try:
        with _watched(lambda _: fail(late), stop, 3 * MEETING.total_seconds()):
            group = GlooGroup("env://", rank, size)
    except RuntimeError as error:
        raise WorkerError(
            f"Process {rank} of {size} did not meet the others: {error}. One of them may have ended before, and said "
            "why in its own output, or cannot reach the first one's host."
        ) from error
    try:
        paths = (job.folder.path.absolute(), job.checkpoint and job.checkpoint.absolute())
        path, checkpoint, begun = group.broadcast((*paths, job.experiment.warm_start))
        _meet(group, path / "run.json")
        if rank:
            folder, experiment = dataclasses.replace(job.folder, path=path), job.experiment.replace(warm_start=begun)
            job = dataclasses.replace(job, folder=folder, checkpoint=checkpoint, experiment=experiment)
        job = dataclasses.replace(job, layout=layout)
        with stopping_on_signals(stop), _watched(fail, stop, layout.stall_timeout, group):
            return _result(work(job, WorkerContext(group), stop))
    finally:
        group.close()


def _meet(group: Group, file: Path) -> None:
    """Raise SettingsError unless all processes see the file that learner 0 has written, since each writes its shards'
    parts of checkpoints beside it."""
    written = group.broadcast(file.read_bytes() if group.rank == 0 else None)
    deadline = time.monotonic() + _VISIBLE
    while not (seen := file.is_file() and file.read_bytes() == written) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = group.gather(None if seen else socket.gethostname())
    blind = group.broadcast(sorted({host for host in blind if host}) if blind is not None else None)
    if blind:
        raise SettingsError(
            f"{file.parent} is not the same folder on all hosts: on {', '.join(blind)} it does not hold what the first "
            "process wrote there. Every process writes its part of each checkpoint into it: put --run on a file system "
            "that all hosts share, such as NFS, or use --nproc-per-node on one host."
        )


def _result(result: Result | None) -> Result:
    assert result is not None, "learners have one"
    return result


@dataclasses.dataclass(frozen=True)
class _Place:
    """What a process is told of where it stands."""

    name: str
    """For people."""
    ends: Ends | None = None
    """What joins it to those."""
    link: Link | None = None
    """What joins it to the other role, in a split layout."""


def _places(layout: Layout, shards: int, context: Any) -> list[_Place]:
    """Every process of a layout, the one with the result first."""
    collectors, learners = len(layout.collectors), layout.learning
    joined = join(context, learners, partners(shards, learners))
    if layout.backend == "processes":
        return [_Place(f"Worker {ends.rank} of {learners}", ends) for ends in joined]
    of_learners, of_collectors = links(context, collectors, learners)
    return [
        *(
            _Place(f"Learner {ends.rank} of {learners}", ends, link)
            for ends, link in zip(joined, of_learners, strict=True)
        ),
        *(_Place(f"Collector {i} of {collectors}", link=link) for i, link in enumerate(of_collectors)),
    ]


def run_processes(work: Work, job: Job) -> Result:
    """Workers, or learners and collectors, as child processes of this one, which watches them and does nothing else.

    Raises:
        WorkerError: with the traceback of the first process that failed.
    """
    context = multiprocessing.get_context("spawn")
    places, available = _places(job.layout, job.experiment.scheme.shards, context), machine.cores()
    shared = SharedCounts(2 + len(places))
    pipes: list[Connection] = []
    processes: list[Any] = []
    stop = StopRequest(shared)
    try:
        with stopping_on_signals(stop):
            if job.options.display != "none":
                tell(f"Starting {len(places)} processes …", sys.stderr)
            for index, place in enumerate(places):
                ours, theirs = context.Pipe()
                process = children.start(
                    _child,
                    (work, place, available, theirs, StopRequest(shared, index)),
                    f"lockstep-{place.name.lower().replace(' ', '-')}",
                )
                if job.layout.pin:
                    children.pin(process, index, len(places))
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            for end in (end for place in places for end in (place.ends, place.link) if end is not None):
                end.close()
            for pipe in pipes:  # not at the start, which would wait for ever if the process died before it read
                with contextlib.suppress(OSError):  # it has died, as is told below
                    pipe.send(job)
            return _watch([place.name for place in places], processes, pipes, stop, job.layout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join()
        shared.close()


def _watch(
    names: list[str], processes: list[Any], pipes: list[Connection], stop: StopRequest, layout: Layout
) -> Result:
    """Wait until every process has answered; raise as soon as one fails, dies or all stand still."""
    results: dict[int, Result | None] = {}
    standstill = children.StallDetector(layout.stall_timeout)
    while len(results) < len(processes):
        open_ranks = [rank for rank in range(len(processes)) if rank not in results]
        wait([pipes[rank] for rank in open_ranks] + [processes[rank].sentinel for rank in open_ranks], timeout=1.0)
        failures = {}
        for rank in open_ranks:
            try:
                gone = not processes[rank].is_alive()  # asked first: what it sent before it went still counts
                if pipes[rank].poll():
                    kind, value = pipes[rank].recv()
                    if kind == "mistake":
                        raise value
                    if kind == "result":
                        results[rank] = value
                    else:
                        failures[rank] = value
                elif gone:
                    failures[rank] = children.death_report(processes[rank])
            except (EOFError, OSError):  # OSError: it went before it had read what it was sent
                processes[rank].join(_GRACE)
                failures[rank] = children.death_report(processes[rank])
        if failures:
            raise WorkerError(_first_cause(failures, names, processes, pipes, results))
        now = stop.progress()
        patience = standstill.too_long(now, started=any(now), grace=_EXPLAINING)
        if patience is not None:
            for rank in open_ranks:
                children.show_stack(processes[rank], names[rank])
            longer = dataclasses.replace(layout, stall_timeout=Layout.stall_timeout)
            raise WorkerError(
                f"No process has made progress for {patience:g} seconds (Layout.stall_timeout); their step counts are "
                f"{dict(zip(names, now, strict=True))}. Where each of them stands is printed above: one hangs, and the "
                f"others wait for it. To allow longer, use --layout {longer},stall_timeout=SECONDS."
            )
    return _result(results[0])


def _first_cause(
    failures: dict[int, str],
    names: list[str],
    processes: list[Any],
    pipes: list[Connection],
    results: dict[int, Any],
) -> str:
    """The failure to show. When one worker dies, its peers fail a moment later with a broken connection; a death or
    an error of another kind explains more than that."""

    def follows(text: str) -> bool:
        return any(phrase in text for phrase in CONSEQUENCES)

    deadline = time.monotonic() + _EXPLAINING
    while all(map(follows, failures.values())) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank in failures or rank in results:
                continue
            with contextlib.suppress(EOFError, OSError):
                if pipes[rank].poll():
                    kind, value = pipes[rank].recv()
                    if kind == "mistake":
                        raise value
                    (failures if kind == "error" else results)[rank] = value  # a result: the others let it end well
                    continue
            if not process.is_alive():
                failures[rank] = children.death_report(process)
        time.sleep(0.05)
    rank, text = min(failures.items(), key=lambda item: follows(item[1]))
    return f"{names[rank]} {text}"


def _child(work: Work, place: _Place, available: int, pipe: Connection, stop: StopRequest) -> None:
    """A process of a run, which has so many cores: learns what to do, joins the others, works, and tells how it
    ended."""
    telling = threading.Lock()
    own_streams()

    def end(kind: str, what: str | SettingsError) -> None:
        telling.acquire()  # and keep it: the first to come has the last word
        with contextlib.suppress(OSError):  # the result may have been sent, and the pipe closed, already
            pipe.send((kind, what))
            pipe.close()
        sys.stdout.flush()
        os._exit(1)

    children.report_losses(lambda text: end("error", f"failed: {text}"))
    try:
        job = pipe.recv()
        machine.belongs_to_a_run_with(available)
        group = Group() if place.ends is None else LocalGroup(place.ends)
        result = work(job, WorkerContext(group, place.link), stop)
        pipe.send(("result", result))
        pipe.close()
        group.close()
    except SettingsError as error:
        end("mistake", error.bare())
    except BaseException:
        end("error", "failed:\n" + traceback.format_exc())
