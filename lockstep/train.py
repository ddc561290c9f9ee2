"""The loop: read this file first.

train() makes the run's folder and starts workers as the layout says; work() is what every worker runs. Worker 0
also records the run: metrics, ledger, checkpoints, display.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep import envs
from lockstep.book import Book, Resumed, part_of
from lockstep.clock import Clock, Versions
from lockstep.collect import Version
from lockstep.experiment import Experiment
from lockstep.layout import Layout
from lockstep.ledger import state_digest
from lockstep.run import RunFolder, RunOptions
from lockstep.runtime import checkpoint
from lockstep.runtime.group import Group
from lockstep.runtime.memory import keep_freed_memory
from lockstep.runtime.supervisor import StopRequest, run_inline, run_processes, run_torchrun
from lockstep.worker import Worker


@dataclass(frozen=True)
class Result:
    """What a run ended with."""

    run: Path
    digest: str
    """SHA-256 over parameters, normalisers and optimizer state: equal for equal experiments on any layout."""
    iterations: int
    score: float | None
    """Mean raw score of the last 100 training episodes."""
    stopped: bool
    """Whether a signal ended the run before total_steps; resume continues it."""


@dataclass(frozen=True)
class Job:
    """What every worker is told."""

    folder: RunFolder
    experiment: Experiment
    layout: Layout
    options: RunOptions
    checkpoint: Path | None = None
    stop_after: int | None = None


def train(
    experiment: Experiment,
    layout: Layout | None = None,
    options: RunOptions | None = None,
    *,
    stop_after: int | None = None,
) -> Result:
    """Train from the beginning.

    Args:
        experiment: what to learn.
        layout: how to spread the work; it cannot change the result. Default: inline.
        options: where the run is kept and how it is shown.
        stop_after: end after so many iterations, without changing the schedules that total_steps defines.

    Raises:
        SettingsError: settings contradict each other, or something that they need is missing.
        WorkerError: a worker process raised, died or stalled.
    """
    layout, options = layout or Layout(), options or RunOptions()
    experiment = prepare(experiment, layout)
    options.validate()
    folder = RunFolder.create(experiment, layout, options)
    with _writing(folder, layout):
        return _start(Job(folder, experiment, layout, options, None, stop_after))


def resume(
    run: str | Path,
    layout: Layout | None = None,
    options: RunOptions | None = None,
    *,
    from_checkpoint: str | None = None,
    stop_after: int | None = None,
) -> Result:
    """Continue a stopped or killed run from its newest checkpoint (or a named one), exactly: the run ends with the
    digest and the ledger that it would have had without the interruption. The layout may differ from before.

    Raises:
        SettingsError: there is no run or no checkpoint there.
        CheckpointError: the checkpoint is damaged; the text offers the one before.
    """
    folder = RunFolder.open(run)
    layout, options = layout or folder.layout(), options or folder.options()
    experiment = prepare(folder.experiment(), layout)
    options.validate()
    with _writing(folder, layout):
        path = _resumable(folder, from_checkpoint) if _leads(layout) else None
        return _start(Job(folder, experiment, layout, options, path, stop_after))


def _resumable(folder: RunFolder, name: str | None) -> Path | None:
    """The checkpoint to resume from, found intact; None if the run ended before its first one, and starts again."""
    directory = folder.checkpoints
    checkpoint.recover(directory)
    if name is None and not checkpoint.list_checkpoints(directory):
        for written in (folder.ledger, folder.metrics):
            written.unlink(missing_ok=True)
        return None
    path = checkpoint.latest(directory) if name is None else directory / name
    saved = checkpoint.open_checkpoint(path)
    checkpoint.set_aside_newer(directory, saved.iteration)
    return path


def _leads(layout: Layout) -> bool:
    """Whether this process prepares the run's folder: torchrun calls train and resume in every process."""
    return layout.backend != "torchrun" or os.environ.get("RANK", "0") == "0"


def prepare(experiment: Experiment, layout: Layout) -> Experiment:
    """Resolve what depends on installed libraries, and check everything that can be checked before starting."""
    experiment = dataclasses.replace(experiment, env=envs.resolve(experiment.env))
    experiment.validate()
    layout.validate(experiment.scheme.shards)
    return experiment


def _writing(folder: RunFolder, layout: Layout) -> AbstractContextManager[None]:
    """Hold the run's lock, in the one process that prepares its folder."""
    return folder.locked() if _leads(layout) else contextlib.nullcontext()


def _start(job: Job) -> Result:
    runners = {"inline": run_inline, "processes": run_processes, "torchrun": run_torchrun}
    return runners[job.layout.backend](work, job)


def work(job: Job, group: Group, stop: StopRequest) -> Result:
    """What every worker does, whatever the layout; worker 0 also records."""
    experiment, options = job.experiment, job.options
    keep_freed_memory()
    torch.set_num_threads(experiment.torch_threads)
    worker = Worker(experiment, job.layout, group, stop.alive)
    clock = Clock(experiment.scheme.lag, experiment.iterations)
    versions: Versions[Version] = Versions(clock)
    resumed = None
    if job.checkpoint is None:
        worker.collector.reset()
        versions.publish(0, worker.version(0))
    else:
        resumed = _restore(job.checkpoint, worker, versions, group)
    start, counts = (resumed.iteration, resumed.counts) if resumed else (0, {"samples": 0, "updates": 0})
    book = None
    if group.rank == 0:
        book = Book(job.folder, experiment, job.layout, options, worker, stop.alive, resumed)
    done, stopped = start, False
    group.barrier()
    try:
        for iteration in clock.ticks(start, job.stop_after):
            begin = time.perf_counter()
            group.waited = worker.learner.seconds = 0.0
            worker.collector.times.update(env=0.0, inference=0.0)

            acting = versions[clock.collects_with(iteration)]
            rollouts = worker.collector.collect(iteration, acting)
            learned = worker.learner.learn(iteration, rollouts, acting.normalizers)
            stopped = worker.merge_statistics(rollouts, stop=stop.requested())
            versions.publish(iteration + 1, worker.version(iteration + 1))

            counts["samples"] += experiment.samples_per_iteration
            counts["updates"] += learned.updates
            done = iteration + 1
            parts = group.gather(part_of(worker, group, rollouts, learned, begin))
            if book is not None and parts is not None:
                book.record(iteration, acting.number, counts, learned, parts, time.perf_counter() - begin)
                book.evaluate(done)
            ended = stopped or done == experiment.iterations or done == job.stop_after
            if ended or done % options.checkpoint_every == 0:
                saved = group.gather(worker.save(job.folder.checkpoints, done, versions))
                if book is not None and saved is not None:
                    book.finish_checkpoint(done, counts, saved)
            if ended:
                break
            group.barrier()  # what worker 0 alone did since is no waiting of the next iteration
        digest = state_digest(worker.state())
        score = book.score() if book is not None else None
        return Result(job.folder.path, digest, done, score, stopped and done < experiment.iterations)
    finally:
        if book is not None:
            book.close()
        worker.collector.close()


def _restore(path: Path, worker: Worker, versions: Versions[Version], group: Group) -> Resumed:
    """Load a checkpoint into a worker, and say how long it took."""
    begin = time.perf_counter()
    saved = checkpoint.open_checkpoint(path)
    replayed = group.gather(worker.resume(saved, versions)) or []
    restored = {
        "iteration": saved.iteration,
        "seconds": time.perf_counter() - begin,
        "replayed_steps": sum(replayed),
    }
    return Resumed(saved.iteration, dict(saved.meta["counts"]), {**saved.meta["recorder"], "restored": restored})
