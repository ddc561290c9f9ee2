"""The loop: read this file first.

train() makes the run's folder and starts workers as the layout says; work() is what every worker runs. Worker 0
also records the run: metrics, ledger, checkpoints, display.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep import envs
from lockstep.clock import Clock, Versions
from lockstep.collect import Collector, Version
from lockstep.evaluation.scores import evaluate_policy
from lockstep.experiment import Experiment
from lockstep.layout import Layout
from lockstep.learn import Learner, LearningReport
from lockstep.ledger import Ledger, fast_digest, ledger_head, state_digest, structure_digests
from lockstep.models.base import PolicyModel
from lockstep.normalize import Normalizers
from lockstep.parameters import FlatParameters
from lockstep.recorder import IterationReport, Recorder
from lockstep.run import RunFolder, RunOptions
from lockstep.runtime import checkpoint
from lockstep.runtime.group import Group
from lockstep.runtime.memory import keep_freed_memory
from lockstep.runtime.supervisor import StopRequest, run_inline, run_processes, run_torchrun
from lockstep.shard import block
from lockstep.storage.rollout import Rollout
from lockstep.tree import TreeSum


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
    folder = RunFolder.create(experiment, layout, options)
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
    job = Job(folder, experiment, layout, options, None, stop_after)
    if _leads(layout):
        job = dataclasses.replace(job, checkpoint=_resumable(folder, from_checkpoint))
    return _start(job)


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


def _start(job: Job) -> Result:
    job.options.validate()
    runners = {"inline": run_inline, "processes": run_processes, "torchrun": run_torchrun}
    with job.folder.locked() if _leads(job.layout) else contextlib.nullcontext():
        return runners[job.layout.backend](work, job)


class Worker:
    """The parts of one process, for its block of shards: collectors, learners and the tree between them."""

    def __init__(self, job: Job, group: Group, stop: StopRequest) -> None:
        experiment = job.experiment
        self.experiment = experiment
        self.shards = block(experiment.scheme.shards, group.size, group.rank)
        self.tree = TreeSum(experiment.scheme.shards, group)
        algorithm = experiment.algorithm.build()
        observation_space, action_space = envs.spaces(experiment.env)
        self.model: PolicyModel = experiment.model.build(
            observation_space,
            action_space,
            precision=experiment.precision,
            normalize_observations=experiment.normalize.observations,
            observation_clip=experiment.normalize.clip,
            seed=experiment.seed,
        )
        self.flat = FlatParameters(self.model, tail=1 + len(algorithm.metric_names))
        self.normalizers = Normalizers.initial(experiment, self.model)
        self.collector = Collector(
            experiment,
            self.shards,
            self.model,
            self.flat,
            env_threads=job.layout.env_threads,
            bootstrap=algorithm.needs_targets,
            alive=stop.alive,
        )
        self.learner = Learner(experiment, self.shards, self.model, algorithm, self.flat, self.tree, alive=stop.alive)

    def version(self, number: int) -> Version:
        """A copy of the present state, to collect with later."""
        return Version(number, self.flat.vector.detach().clone(), self.normalizers)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that `digest:` covers, in named tensors."""
        return {
            **{f"parameter.{name}": tensor for name, tensor in self.flat.named().items()},
            **{f"optimizer.{name}": tensor for name, tensor in self.learner.update.state().items()},
            **{f"normalizer.{name}": tensor for name, tensor in self.normalizers.state().items()},
        }

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what state returned."""
        parts: dict[str, dict[str, torch.Tensor]] = {"parameter": {}, "optimizer": {}, "normalizer": {}}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind in parts:
                parts[kind][rest] = tensor
        self.flat.load(parts["parameter"])
        self.learner.update.load(parts["optimizer"])
        self.normalizers = self.normalizers.loaded(parts["normalizer"])


def work(job: Job, group: Group, stop: StopRequest) -> Result:
    """What every worker does, whatever the layout; worker 0 also records."""
    experiment, options = job.experiment, job.options
    keep_freed_memory()
    torch.set_num_threads(experiment.torch_threads)
    worker = Worker(job, group, stop)
    clock = Clock(experiment.scheme.lag, experiment.iterations)
    versions: Versions[Version] = Versions(clock)
    start, counts, recorder_state = 0, {"samples": 0, "updates": 0}, None
    if job.checkpoint is None:
        worker.collector.reset()
        versions.publish(0, worker.version(0))
    else:
        start, counts, recorder_state = _restore(job.checkpoint, worker, versions, group, stop)
    book = _Book(job, worker, start, recorder_state, stop.alive) if group.rank == 0 else None
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
            worker.normalizers, stopped = _merge(worker, rollouts, stop)
            versions.publish(iteration + 1, worker.version(iteration + 1))

            counts["samples"] += experiment.samples_per_iteration
            counts["updates"] += learned.updates
            done = iteration + 1
            parts = group.gather(_part(worker, group, rollouts, learned, begin))
            if book is not None and parts is not None:
                book.record(iteration, acting.number, counts, learned, parts, time.perf_counter() - begin)
                book.evaluate(done)
            ended = stopped or done == experiment.iterations or done == job.stop_after
            if ended or done % options.checkpoint_every == 0:
                _save(job, worker, versions, done, counts, book, group)
            if ended:
                break
            group.barrier()  # what worker 0 alone did since is no waiting of the next iteration
        digest = state_digest(worker.state())
        score = book.recorder.score() if book is not None else None
        return Result(job.folder.path, digest, done, score, stopped and done < experiment.iterations)
    finally:
        if book is not None:
            book.close()
        worker.collector.close()


def _merge(worker: Worker, rollouts: dict[int, Rollout], stop: StopRequest) -> tuple[Normalizers, bool]:
    """Add the rollouts' moments to the normalisers, in tree order, and agree on whether to stop."""
    seats = worker.collector.seats()
    first = worker.shards[0]
    sums = {}
    for shard in worker.shards:
        moments = worker.normalizers.rollout_sums(rollouts[shard], seats[shard][1])
        asked = torch.tensor([float(shard == first and stop.requested())], dtype=torch.float64)
        sums[shard] = torch.cat([asked, moments])
    total = worker.tree.sum(sums)
    return worker.normalizers.merged(total[1:]), bool(total[0] > 0)


@dataclass
class _Part:
    """What one worker tells worker 0 of an iteration."""

    rollout_digests: dict[int, dict[str, str]]
    gradient_digests: dict[int, str]
    episodes: dict[int, list[tuple[float, int]]]
    times: dict[str, float]


def _part(worker: Worker, group: Group, rollouts: dict[int, Rollout], learned: LearningReport, begin: float) -> _Part:
    digests = {shard: structure_digests(rollout) for shard, rollout in rollouts.items()}
    times = {**worker.collector.times, "learning": worker.learner.seconds, "waiting": group.waited}
    times["other"] = max(0.0, time.perf_counter() - begin - sum(times.values()))
    return _Part(digests, learned.gradient_digests, worker.collector.episodes(), times)


class _Book:
    """What worker 0 writes: recorder, ledger, evaluations."""

    def __init__(
        self,
        job: Job,
        worker: Worker,
        start: int,
        recorder_state: dict[str, Any] | None,
        alive: Callable[[], None],
    ) -> None:
        self._job, self._worker, self._alive = job, worker, alive
        folder = job.folder
        if start == 0 and job.checkpoint is None:
            self._ledger = Ledger.create(folder.ledger, ledger_head(job.experiment))
        else:
            self._ledger = Ledger.reopen(folder.ledger, start)
            folder.truncate_metrics(start)
        self.recorder = Recorder(folder, job.experiment, job.layout, job.options, recorder_state)

    def record(
        self,
        iteration: int,
        collected_with: int,
        counts: dict[str, int],
        learned: LearningReport,
        parts: list[_Part],
        seconds: float,
    ) -> None:
        """Write one iteration's metrics and its line of the ledger."""
        worker = self._worker
        rollouts: dict[int, dict[str, str]] = {}
        gradients: dict[int, str] = {}
        episodes: dict[int, list[tuple[float, int]]] = {}
        for part in parts:
            rollouts |= part.rollout_digests
            gradients |= part.gradient_digests
            episodes |= part.episodes
        self._ledger.append(
            {
                "iteration": iteration,
                "collected_with": collected_with,
                "rollout": {str(shard): rollouts[shard] for shard in sorted(rollouts)},
                "gradient": {str(shard): gradients[shard] for shard in sorted(gradients)},
                "parameters": {name: fast_digest(tensor) for name, tensor in worker.flat.named().items()},
                "normalizer": {name: fast_digest(tensor) for name, tensor in worker.normalizers.state().items()},
            }
        )
        times = {name: sum(part.times[name] for part in parts) / len(parts) for name in parts[0].times}
        self.recorder.record(
            IterationReport(
                iteration=iteration + 1,
                samples=counts["samples"],
                frames=counts["samples"] * worker.collector.frames_per_step,
                updates=counts["updates"],
                metrics=learned.metrics,
                episodes=[episode for shard in sorted(episodes) for episode in episodes[shard]],
                times=times,
                seconds=seconds,
                policy_lag=iteration - collected_with,
            )
        )

    def evaluate(self, iterations: int) -> None:
        """Score the current version on environments of its own, if it is time to."""
        options, worker = self._job.options, self._worker
        if options.eval_every and iterations % options.eval_every == 0:
            actor = worker.model.for_acting()
            worker.normalizers.apply(actor)
            self.recorder.evaluation(
                iterations,
                evaluate_policy(actor, self._job.experiment, episodes=options.eval_episodes, alive=self._alive),
            )

    def sync(self) -> None:
        """Bring the ledger to disk, before a checkpoint that relies on it."""
        self._ledger.sync()

    def close(self) -> None:
        self.recorder.close()
        self._ledger.close()


def _save(
    job: Job,
    worker: Worker,
    versions: Versions[Version],
    iterations: int,
    counts: dict[str, int],
    book: _Book | None,
    group: Group,
) -> None:
    """Write a checkpoint: every worker its shards, worker 0 the learner and the manifest."""
    directory = job.folder.checkpoints
    parts = []
    for shard, (batch, seat) in worker.collector.seats().items():
        parts.append(checkpoint.write_part(directory, iterations, f"shard-{shard:03d}", batch.state(seat), {}))
    if book is not None:
        tensors = worker.state()
        for number, version in versions.held().items():
            tensors[f"version.{number}.parameters"] = version.parameters
            for name, tensor in version.normalizers.state().items():
                tensors[f"version.{number}.normalizer.{name}"] = tensor
        meta = {"versions": list(versions.held())}
        parts.append(checkpoint.write_part(directory, iterations, "learner", tensors, meta))
    gathered = group.gather(parts)
    if book is not None and gathered is not None:
        book.sync()
        best = book.recorder.is_best()
        meta = {"counts": dict(counts), "recorder": book.recorder.state()}
        checkpoint.finish(
            directory,
            iterations,
            [part for parts in gathered for part in parts],
            meta,
            keep=job.options.keep_checkpoints,
            best=best,
        )
        book.recorder.message(f"checkpoint {iterations:08d}")


def _restore(
    path: Path, worker: Worker, versions: Versions[Version], group: Group, stop: StopRequest
) -> tuple[int, dict[str, int], dict[str, Any]]:
    """Load a checkpoint into a worker; environments replay their actions."""
    begin = time.perf_counter()
    saved = checkpoint.open_checkpoint(path)
    tensors, meta = saved.part("learner")
    worker.load(tensors)
    for number in meta["versions"]:
        prefix = f"version.{number}.normalizer."
        state = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        vector = tensors[f"version.{number}.parameters"]
        versions.publish(number, Version(number, vector, worker.normalizers.loaded(state)))
    replayed = 0
    for shard, (batch, seat) in worker.collector.seats().items():
        replayed += batch.load(seat, saved.part(f"shard-{shard:03d}")[0], stop.alive)
    all_replayed = group.gather(replayed) or []
    restored = {
        "iteration": saved.iteration,
        "seconds": time.perf_counter() - begin,
        "replayed_steps": sum(all_replayed),
    }
    return saved.iteration, dict(saved.meta["counts"]), {**saved.meta["recorder"], "restored": restored}
