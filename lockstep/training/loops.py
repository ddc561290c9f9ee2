"""The loops: read this file first.

lockstep.launchers.launch makes the run's folder and has every process call work(). learn() is what every learner runs,
with collectors in its own process or in others; learner 0 also records the run: metrics, ledger, checkpoints, display.
collect() is what a process runs that only collects.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterable

import torch

from lockstep.agent import Agent
from lockstep.buffers.replay_batches import ReplayBatches
from lockstep.buffers.replay_placement import Placing
from lockstep.collectors.collectors import Collectors
from lockstep.collectors.preemption import DistantCounts, preemption
from lockstep.core.digests import state_digest
from lockstep.core.schedule import LapId, RolloutId, Schedule
from lockstep.core.shards import block
from lockstep.distributed.channels import Channels
from lockstep.distributed.device_memory import tell_way
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena
from lockstep.learners.process import Worker
from lockstep.models.versions import Versions
from lockstep.run.checkpoint import open_checkpoint
from lockstep.system.garbage import sparing
from lockstep.system.graphs import cuda_graph
from lockstep.system.malloc import keep_freed_memory
from lockstep.system.numerics import settle, settled
from lockstep.system.output import tell
from lockstep.training import agreement, determinism, warm_start
from lockstep.training.callbacks import callback_of
from lockstep.training.context import StopRequest, WorkerContext
from lockstep.training.job import Job, Result
from lockstep.training.prepare import shards_here
from lockstep.training.writer import Resumed, RunWriter, report_of
from lockstep.transport.message_rollouts import MessageRollouts
from lockstep.transport.messages import CollectorService
from lockstep.transport.processes import CollectorConnection, RunEnded, SharedMemoryRollouts, collector_buffers
from lockstep.transport.rollouts import LocalRollouts, RolloutSource, acting_with, buffers_of


def work(job: Job, context: WorkerContext, stop: StopRequest) -> Result | None:
    """What every process of a run does."""
    keep_freed_memory()
    alive = _paced(stop.alive, job.layout.jitter)
    channels = context.channels if context.channels is not None and context.channels.role == "collector" else None
    role, index = ("learner", context.group.rank) if channels is None else ("collector", channels.index)
    device = job.layout.device_of(role, index)
    strict = not job.experiment.allow_nondeterministic
    settings = settled(job.experiment.torch_threads, device, strict=strict)
    with determinism.explained(), settings, sparing() as spare:
        agent = Agent(job.experiment, device)
        if channels is None:
            return learn(job, agent, context, stop, alive, spare)
        return collect(job, agent, channels, stop, alive, spare)


def _paced(alive: Callable[[], None], jitter: float) -> Callable[[], None]:
    """A step's sign of life, slowed down at random if the layout asks for it."""
    if not jitter:
        return alive

    def slowed() -> None:
        alive()
        time.sleep(random.uniform(0.0, jitter))

    return slowed


def learn(
    job: Job,
    agent: Agent,
    context: WorkerContext,
    stop: StopRequest,
    alive: Callable[[], None],
    spare: Callable[[], None],
) -> Result:
    """Take rollouts, learn from them, publish the next version; learner 0 also records.

    Args:
        spare: leaves what exists out of garbage collections (lockstep.system.garbage).
    """
    experiment, options, group, schedule = job.experiment, job.options, context.group, job.schedule
    if job.checkpoint is None and job.recorded is None:
        agent.check()
        for warning in agent.warnings() if group.rank == 0 else ():
            tell(f"warning: {warning}", sys.stderr)
    if job.layout.ipc:
        _open_devices(agent, group, quiet=options.display == "none")
    rollouts = _rollouts(job, agent, context, alive)
    capture = cuda_graph if job.layout.graphs else None
    worker = Worker(agent, rollouts, group, alive, capture, job.recorded, context.store)
    _place_replay(job, worker)
    writer = None
    try:
        resumed = _begin(job, worker)
        done, counts = resumed.iteration, resumed.counts
        if group.rank == 0:
            writer = RunWriter(
                job.folder,
                experiment,
                job.layout,
                options,
                worker,
                stop.alive,
                resumed,
                stops=job.stops,
                callback=None if job.callback is None else callback_of(job.callback),
            )
        stopped = halted = False
        followed = group.broadcast(writer is not None and writer.followed)
        group.barrier()
        stop.begin()
        spare()
        for iteration in schedule.ticks(done, job.stop_after):
            begin = time.perf_counter()
            group.waited = rollouts.waited = 0.0

            taken = rollouts.take(iteration)
            if job.layout.learner_delay:
                time.sleep(job.layout.learner_delay)
            if iteration == 0 and group.rank == 0:
                worker.warn_of_lost_precision(taken)
            learned = worker.learner.learn(iteration, taken)
            stopped, count = worker.merge_statistics(taken, stop=stop.requested())
            lost = agent.not_finite()
            if not (lost and job.stops):  # or learner 0 ends the run, below
                rollouts.publish(agent.version(iteration + 1, copied=rollouts.keeps))

            counts["samples"] += count * experiment.samples_per_rollout
            counts["updates"] += learned.updates
            done = iteration + 1
            reports = group.gather(report_of(worker, taken, learned, begin))
            if writer is not None and reports is not None:
                writer.record(iteration, counts, learned, reports, time.perf_counter() - begin, lost)
                writer.evaluate(done)
            if experiment.curriculum:
                agent.options = group.broadcast(None if writer is None else writer.next_options())
            if followed:  # all learners end after the same iteration
                halted = group.broadcast(writer is not None and writer.asked_to_stop(done))
            ended = stopped or halted or done == experiment.iterations or done == job.stop_after
            if ended or done % options.checkpoint_every == 0:
                held = agreement.held(agent) if group.size > 1 else None
                every = group.gather((worker.save(job.folder.checkpoints, done), held))
                if writer is not None and every is not None:
                    agreement.require_agreement([each for _, each in every if each], job.layout, done)
                    writer.finish_checkpoint(done, counts, [parts for parts, _ in every], finite=not lost)
            if ended:
                break
            group.barrier()  # what learner 0 alone did since is no waiting of the next iteration
        digest = state_digest(worker.state())
        score = writer.score() if writer is not None else None
        return Result(job.folder.path, digest, done, score, stopped and done < experiment.iterations)
    finally:
        try:
            if writer is not None:
                writer.close()
        finally:
            rollouts.close()


def _open_devices(agent: Agent, group: Group, *, quiet: bool) -> None:
    """Let learners on GPUs read each other's memory, and say whether they can."""
    problem = group.open_devices(agent.device)
    if group.rank == 0 and not quiet and (group.on_devices or problem is not None):
        tell_way("Learners exchange gradients", problem)


def _place_replay(job: Job, worker: Worker) -> None:
    """Say where the replay memory should lie, if there is one."""
    batches, rank, layout = worker.learner.batches, worker.group.rank, job.layout
    if isinstance(batches, ReplayBatches):
        device, tells = worker.agent.device, rank == 0 and job.options.display != "none"
        # Now, since all learners wait for each other before the first of them has rollouts to remember.
        free = None if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        shards = shards_here(job.experiment, layout)
        batches.placing = Placing(layout.replay, layout.learners_beside(rank), free, shards, tells)


def _rollouts(job: Job, agent: Agent, context: WorkerContext, alive: Callable[[], None]) -> RolloutSource:
    """Where a learner's rollouts come from: collectors of other processes, of other machines, or its own."""
    experiment, group, schedule = job.experiment, context.group, job.schedule
    versions = Versions(schedule)
    if context.channels is not None:
        freely, ipc, quiet = job.collects_freely, bool(job.layout.ipc), job.options.display == "none"
        return SharedMemoryRollouts(
            agent, context.channels, group, schedule, versions, free=freely, ipc=ipc, quiet=quiet
        )
    if context.inbox is not None:
        groups = job.layout.groups(experiment.scheme.shards)
        return MessageRollouts(agent, context.inbox, group, schedule, versions, groups)
    slots = block(experiment.scheme.shards, group.size, group.rank)
    buffers = buffers_of(agent, slots, schedule, PrivateArena(pinned=agent.device.type != "cpu"), ahead=False)
    cuts = preemption(experiment.scheme, job.recorded, context.counts or group.collected, len(slots))
    return LocalRollouts(Collectors(agent, buffers, job.layout, alive, cuts, stop=job.stops), slots, schedule, versions)


def _begin(job: Job, worker: Worker) -> Resumed:
    """Make version 0, or load the checkpoint that is resumed, and start the environments."""
    begin = time.perf_counter()
    saved = None if job.checkpoint is None else open_checkpoint(job.checkpoint, only=())
    if saved is None:
        weights = warm_start.weights(job.experiment, job.folder.weights)
        warm_start.load(worker.agent, weights)
        worker.begin(weights)
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


def collect(
    job: Job,
    agent: Agent,
    channels: Channels,
    stop: StopRequest,
    alive: Callable[[], None],
    spare: Callable[[], None],
) -> None:
    """Collect rollouts in a separate process, until the learners want no more; spare as for learn."""
    schedule = job.schedule
    own = channels.collects[channels.index]
    cuts = preemption(job.experiment.scheme, job.recorded, channels.admission, len(own))
    buffers = collector_buffers(agent, channels, channels.index, schedule)
    collectors = Collectors(agent, buffers, job.layout, alive, cuts, stop=job.stops)
    connection = CollectorConnection(agent, channels, collectors, schedule, free=job.collects_freely)
    saved = None if job.checkpoint is None else open_checkpoint(job.checkpoint, only=())
    try:
        begin = connection.start(saved, stop.begin)
        spare()
        with contextlib.suppress(RunEnded):
            if job.collects_freely:
                _collect_freely(connection, collectors, refresh=job.experiment.scheme.refresh == "step")
            else:
                _collect_by_schedule(connection, collectors, schedule, schedule.ticks(begin, job.stop_after))
    finally:
        collectors.close()


def _collect_by_schedule(
    connection: CollectorConnection, collectors: Collectors, schedule: Schedule, iterations: Iterable[int]
) -> None:
    """Collect what the schedule says, in the order in which it is learned from.

    Raises:
        RunEnded: the learners want no more.
    """
    for iteration in iterations:
        collected: set[RolloutId] = set()
        for rollout_id in schedule.rollout_ids(iteration):
            if rollout_id.shard in collectors.shards and rollout_id not in collected:
                acting = acting_with(schedule.acting(rollout_id), connection.version)
                rollouts = collectors.collect(rollout_id.scheduled_lap, acting, schedule.noise(rollout_id))
                connection.deliver([each.info for each in rollouts])
                collected |= {each.info.rollout_id for each in rollouts}
    while True:
        connection.listen(block=True)


def _collect_freely(connection: CollectorConnection, collectors: Collectors, *, refresh: bool) -> None:
    """Collect whenever a buffer is free, with the newest version; refresh: look for a newer one at every step.

    Raises:
        RunEnded: the learners want no more.
    """
    lap = 0
    while True:
        version = connection.admit(lap)
        at = (lambda _: connection.newest()) if refresh else (lambda _, version=version: version)
        rollouts = collectors.collect(LapId(collectors.shards[0], lap), at)
        connection.deliver([each.info for each in rollouts])
        lap += 1


def collector_service(
    job: Job, index: int, alive: Callable[[], None], counts: DistantCounts | None = None
) -> CollectorService:
    """Collects one group of shards in a separate process, on request; counts as in WorkerContext."""
    keep_freed_memory()
    device = job.layout.device_of("collector", min(index, len(job.layout.collectors) - 1))
    settle(job.experiment.torch_threads, device, strict=not job.experiment.allow_nondeterministic)
    agent = Agent(job.experiment, device)
    shards = block(job.experiment.scheme.shards, job.layout.groups(job.experiment.scheme.shards), index)
    buffers = buffers_of(agent, shards, job.schedule, PrivateArena(pinned=agent.device.type != "cpu"), ahead=False)
    cuts = preemption(job.experiment.scheme, job.recorded, counts, len(shards))
    collectors = Collectors(agent, buffers, job.layout, _paced(alive, job.layout.jitter), cuts, stop=job.stops)
    return CollectorService(agent, collectors, compress=bool(job.layout.compress))
