"""The loops: read this file first.

train() makes the run's folder and starts processes as the layout says. learn() is what every learner runs, with
collectors of its own or of other processes; learner 0 also records the run: metrics, ledger, checkpoints, display.
collect() is what a collector runs that has a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from lockstep.agent import Agent
from lockstep.clock import Clock, Fill, Recorded, Versions
from lockstep.collecting.collectors import Collectors
from lockstep.collecting.preemption import preemption
from lockstep.digests import state_digest
from lockstep.experiment import Experiment
from lockstep.handover.mail import Collection, MailedRollouts
from lockstep.handover.remote import CollectorEnd, RemoteRollouts, RunEnded, collector_slabs
from lockstep.handover.rollouts import OwnRollouts, Rollouts, acting_with, slabs_of
from lockstep.job import Job, Result
from lockstep.layout import Layout
from lockstep.learning.worker import Worker
from lockstep.prepare import check_model, leads, prepare_run, warn_before_run
from lockstep.records import warm_start
from lockstep.records.book import Book, Resumed, report_of
from lockstep.records.resumption import other_platform, resumable
from lockstep.run import RunFolder, RunOptions
from lockstep.runtime.channels import Link
from lockstep.runtime.checkpoint import iteration_of, open_checkpoint
from lockstep.runtime.graphs import cuda_graph
from lockstep.runtime.memory import keep_freed_memory
from lockstep.runtime.numerics import settle, settled
from lockstep.runtime.output import tell
from lockstep.runtime.ray_backend import run_ray
from lockstep.runtime.shared import PrivateArena
from lockstep.runtime.supervisor import Seat, StopRequest, is_unattended, run_inline, run_processes, run_torchrun
from lockstep.settings import SettingsError
from lockstep.shard import block


def train(
    experiment: Experiment,
    layout: Layout | str | None = None,
    options: RunOptions | str | Path | None = None,
    *,
    stop_after: int | None = None,
) -> Result:
    """Train from the beginning.

    Args:
        experiment: what to learn.
        layout: how to spread the work, or a text such as "processes:2"; it cannot change the result. Default: inline.
        options: where the run is kept and how it is shown; a text or a path is the run's folder.
        stop_after: end after so many iterations, without changing the schedules that total_steps defines.

    Raises:
        SettingsError: settings contradict each other, or something that they need is missing.
        NotFinite: an environment returned NaN or an infinity, or learning has diverged; also a SettingsError.
        WorkerError: a worker process raised, died or stalled.
    """
    return launch(experiment, Layout.of(layout), RunOptions.of(options), stop_after=stop_after)


def launch(
    experiment: Experiment,
    layout: Layout,
    options: RunOptions,
    *,
    stop_after: int | None = None,
    recorded: Recorded | None = None,
    weights: Path | None = None,
) -> Result:
    """Train from the beginning, or repeat a run.

    Args:
        recorded: what that run recorded of what timing decided, to do the same again (see lockstep.replay).
        weights: its copy of the weights that it began with, read in place of the run that the warm start names.
    """
    _check_stop(stop_after)
    experiment, options = prepare_run(experiment, layout, options, recorded)
    begun_with = warm_start.weights(experiment, weights) if leads(layout) else {}
    here = layout.backend == "inline" and recorded is None and not is_unattended()
    if here or begun_with:  # as learn does, but before there is a folder
        check_model(experiment, begun_with, new=here)
    if leads(layout) and weights is None and recorded is None:  # no repetition
        warn_before_run(experiment, options)
    repeats = None if recorded is None else recorded.origin
    folder = RunFolder.create(experiment, layout, options, warm_start.packed(begun_with), repeats)
    try:
        with _writing(folder, layout):
            return _start(Job(folder, experiment, layout, options, None, stop_after, recorded))
    except SettingsError:
        if leads(layout):
            folder.remove_unbegun()  # else the same command, once corrected, would be refused for that folder
        raise


def resume(
    run: str | Path,
    layout: Layout | str | None = None,
    options: RunOptions | None = None,
    *,
    checkpoint: str | int | None = None,
    stop_after: int | None = None,
) -> Result:
    """Continue a stopped or killed run from its newest checkpoint, exactly: the run ends with the digest and the ledger
    that it would have had without the interruption. The layout may differ from before.

    Args:
        checkpoint: latest (also None), best, or an iteration. Newer ones are renamed to `<name>.superseded`.

    Raises:
        SettingsError: there is no run or no checkpoint there.
        CheckpointError: the checkpoint is damaged; the text offers the one before.
    """
    if not (options is None or isinstance(options, RunOptions)):
        raise SettingsError(f"resume(..., options={options!r}) must be RunOptions: the run stays in its folder.")
    _check_stop(stop_after)
    folder = RunFolder.open(run)
    if (folder.path / "replay.json").exists():
        raise SettingsError(
            f"{folder.path} repeats another run, and ended where that one did: there is nothing to resume. Resume "
            "the run that replay.json in it names."
        )
    layout = folder.layout() if layout is None else Layout.of(layout)
    experiment, options = prepare_run(folder.experiment(), layout, options or folder.options())
    with _writing(folder, layout):
        path = resumable(folder, checkpoint, experiment) if leads(layout) else None
        begin = iteration_of(path)
        if leads(layout) and begin == experiment.iterations:
            tell(
                f"{folder.path} has all of its {begin} iterations. To learn on from what it has learned: lockstep "
                f"train {folder.path} --warm-start.run {folder.path} --total-steps STEPS",
                sys.stderr,
            )
        elif leads(layout):
            here = layout.backend != "ray"  # which computes elsewhere
            differs = other_platform(folder) if begin and here else ()
            folder.note_resumption(begin, layout, options, differs)
        return _start(Job(folder, experiment, layout, options, path, stop_after))


def _check_stop(stop_after: int | None) -> None:
    if stop_after is not None and not (isinstance(stop_after, int) and stop_after >= 1):
        raise SettingsError(f"stop_after={stop_after!r} must be a number of iterations, at least 1, or None.")


def _writing(folder: RunFolder, layout: Layout) -> AbstractContextManager[None]:
    """Hold the run's lock, in the one process that prepares its folder."""
    return folder.locked() if leads(layout) else contextlib.nullcontext()


def _start(job: Job) -> Result:
    runners = {
        "inline": run_inline,
        "processes": run_processes,
        "split": run_processes,
        "torchrun": run_torchrun,
        "ray": run_ray,
    }
    place, checkpoint = job.folder.path, job.checkpoint and job.checkpoint.absolute()  # should anybody go elsewhere
    job = dataclasses.replace(job, folder=RunFolder(place.absolute()), checkpoint=checkpoint)
    result = runners[job.layout.backend](work, job)
    return dataclasses.replace(result, run=place) if leads(job.layout) else result


def work(job: Job, seat: Seat, stop: StopRequest) -> Result | None:
    """What every process of a run does."""
    keep_freed_memory()
    alive = _paced(stop.alive, job.layout.jitter)
    link = seat.link if seat.link is not None and seat.link.role == "collector" else None
    role, index = ("learner", seat.group.rank) if link is None else ("collector", link.index)
    device = job.layout.device_of(role, index)
    with settled(job.experiment.torch_threads, device):
        agent = Agent(job.experiment, device)
        return learn(job, agent, seat, stop, alive) if link is None else collect(job, agent, link, stop, alive)


def _paced(alive: Callable[[], None], jitter: float) -> Callable[[], None]:
    """A step's sign of life, slowed down at random if the layout asks for it."""
    if not jitter:
        return alive

    def slowed() -> None:
        alive()
        time.sleep(random.uniform(0.0, jitter))

    return slowed


def learn(job: Job, agent: Agent, seat: Seat, stop: StopRequest, alive: Callable[[], None]) -> Result:
    """Take rollouts, learn from them, publish the next version; learner 0 also records."""
    experiment, options, group, clock = job.experiment, job.options, seat.group, job.clock
    if job.checkpoint is None and job.recorded is None:
        agent.check()
        for warning in agent.warnings() if group.rank == 0 else ():
            tell(f"warning: {warning}", sys.stderr)
    rollouts = _rollouts(job, agent, seat, alive)
    capture = cuda_graph if job.layout.graphs else None
    worker = Worker(agent, rollouts, group, alive, capture, job.recorded)
    book = None
    try:
        resumed = _begin(job, worker)
        done, counts = resumed.iteration, resumed.counts
        if group.rank == 0:
            book = Book(job.folder, experiment, job.layout, options, worker, stop.alive, resumed, stops=job.stops)
        stopped = False
        group.barrier()
        stop.begin()
        for iteration in clock.ticks(done, job.stop_after):
            begin = time.perf_counter()
            group.waited = rollouts.waited = 0.0

            arrivals = rollouts.take(iteration)
            if job.layout.learner_delay:
                time.sleep(job.layout.learner_delay)
            learned = worker.learn(iteration, arrivals)
            stopped, taken = worker.merge_statistics(arrivals, stop=stop.requested())
            lost = agent.not_finite()
            if not (lost and job.stops):  # or learner 0 ends the run, below
                rollouts.publish(agent.version(iteration + 1))

            counts["samples"] += taken * experiment.samples_per_rollout
            counts["updates"] += learned.updates
            done = iteration + 1
            reports = group.gather(report_of(worker, arrivals, learned, begin))
            if book is not None and reports is not None:
                book.record(iteration, counts, learned, reports, time.perf_counter() - begin, lost)
                book.evaluate(done)
            ended = stopped or done == experiment.iterations or done == job.stop_after
            if ended or done % options.checkpoint_every == 0:
                saved = group.gather(worker.save(job.folder.checkpoints, done))
                if book is not None and saved is not None:
                    book.finish_checkpoint(done, counts, saved, finite=not lost)
            if ended:
                break
            group.barrier()  # what learner 0 alone did since is no waiting of the next iteration
        digest = state_digest(worker.state())
        score = book.score() if book is not None else None
        return Result(job.folder.path, digest, done, score, stopped and done < experiment.iterations)
    finally:
        try:
            if book is not None:
                book.close()
        finally:
            rollouts.close()


def _rollouts(job: Job, agent: Agent, seat: Seat, alive: Callable[[], None]) -> Rollouts:
    """Where a learner's rollouts come from: collectors of other processes, of other machines, or its own."""
    experiment, group, clock = job.experiment, seat.group, job.clock
    versions = Versions(clock)
    if seat.link is not None:
        return RemoteRollouts(agent, seat.link, group, clock, versions, free=job.collects_freely)
    if seat.mailbox is not None:
        return MailedRollouts(agent, seat.mailbox, group, clock, versions, len(job.layout.collectors))
    slots = block(experiment.scheme.shards, group.size, group.rank)
    slabs = slabs_of(agent, slots, clock, PrivateArena(pinned=agent.device.type != "cpu"), ahead=False)
    cuts = preemption(experiment.scheme, job.recorded, group.collected, len(slots))
    return OwnRollouts(Collectors(agent, slabs, job.layout, alive, cuts, stop=job.stops), slots, clock, versions)


def _begin(job: Job, worker: Worker) -> Resumed:
    """Make version 0, or load the checkpoint that is resumed, and start the environments."""
    begin = time.perf_counter()
    saved = None if job.checkpoint is None else open_checkpoint(job.checkpoint, only=())
    if saved is None:
        worker.begin(warm_start.weights(job.experiment, job.folder.weights))
    else:
        worker.restore(saved)
    replayed = worker.group.gather(worker.rollouts.start(saved)) or []
    if saved is None:
        return Resumed(0, {"samples": 0, "updates": 0}, None)
    restored = {
        "iteration": saved.iteration,
        "seconds": time.perf_counter() - begin,
        "replayed_steps": sum(replayed),
    }
    recorder = {**saved.meta["recorder"], "restored": restored}
    return Resumed(saved.iteration, dict(saved.meta["counts"]), recorder, saved.meta.get("metrics"))


def collect(job: Job, agent: Agent, link: Link, stop: StopRequest, alive: Callable[[], None]) -> None:
    """Collect rollouts in a process of its own, until the learners want no more."""
    clock = job.clock
    own = len(block(job.experiment.scheme.shards, link.collectors, link.index))
    cuts = preemption(job.experiment.scheme, job.recorded, link.admission, own)
    slabs = collector_slabs(agent, link, link.index, clock)
    collectors = Collectors(agent, slabs, job.layout, alive, cuts, stop=job.stops)
    end = CollectorEnd(agent, link, collectors, clock, free=job.collects_freely)
    saved = None if job.checkpoint is None else open_checkpoint(job.checkpoint, only=())
    try:
        begin = end.start(saved, stop.begin)
        with contextlib.suppress(RunEnded):
            if job.collects_freely:
                _collect_freely(end, collectors, refresh=job.experiment.scheme.refresh == "step")
            else:
                _collect_by_clock(end, collectors, clock, clock.ticks(begin, job.stop_after))
    finally:
        collectors.close()


def _collect_by_clock(end: CollectorEnd, collectors: Collectors, clock: Clock, iterations: Iterable[int]) -> None:
    """Collect what the clock says, in the order in which it is learned from.

    Raises:
        RunEnded: the learners want no more.
    """
    for iteration in iterations:
        collected: set[Fill] = set()
        for fill in clock.fills(iteration):
            if fill.shard in collectors.shards and fill not in collected:
                acting = acting_with(clock.acting(fill), end.version)
                deliveries = collectors.collect(fill, acting, clock.noise(fill))
                end.deliver(deliveries)
                collected |= {Fill(delivery.shard, delivery.number) for delivery in deliveries}
    while True:
        end.listen(block=True)


def _collect_freely(end: CollectorEnd, collectors: Collectors, *, refresh: bool) -> None:
    """Collect whenever a slab is free, with the newest version; refresh: look for a newer one at every step.

    Raises:
        RunEnded: the learners want no more.
    """
    lap = 0
    while True:
        version = end.admit(lap)
        at = (lambda _: end.newest()) if refresh else (lambda _, version=version: version)
        end.deliver(collectors.collect(Fill(collectors.shards[0], lap), at))
        lap += 1


def collection(job: Job, index: int, alive: Callable[[], None]) -> Collection:
    """A collector that is asked for each of its rollouts, in a process of its own."""
    keep_freed_memory()
    device = job.layout.device_of("collector", index)
    settle(job.experiment.torch_threads, device)
    agent = Agent(job.experiment, device)
    shards = block(job.experiment.scheme.shards, len(job.layout.collectors), index)
    slabs = slabs_of(agent, shards, job.clock, PrivateArena(pinned=agent.device.type != "cpu"), ahead=False)
    collectors = Collectors(agent, slabs, job.layout, _paced(alive, job.layout.jitter), stop=job.stops)
    return Collection(agent, collectors, compress=bool(job.layout.compress))
