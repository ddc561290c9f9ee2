"""The training loops. Read this file first.

lockstep.launchers.launch makes the run's folder, and every process calls work(). Every learner runs learn(), with
collectors in its own process or in others. Learner 0 also records the run: metrics, ledger, checkpoints, display.
Processes that only collect run collect(). lockstep.training.start makes the objects that the loops use.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from lockstep.agent import Agent
from lockstep.collectors.collectors import Collectors
from lockstep.core.digests import state_digest
from lockstep.core.schedule import LapId, RolloutId, Schedule
from lockstep.distributed.channels import Channels
from lockstep.system.garbage import objects_frozen
from lockstep.system.malloc import keep_freed_memory
from lockstep.system.numerics import torch_configured
from lockstep.training import torch_errors
from lockstep.training.context import RunStatus, WorkerContext
from lockstep.training.job import Job, Result
from lockstep.training.recording import Recording
from lockstep.training.start import begin_run, collectors_of, learner_process, slowed
from lockstep.transport.processes import CollectorConnection, RunEnded, collector_buffers
from lockstep.transport.rollouts import acting_with


def work(job: Job, context: WorkerContext, status: RunStatus, agent: Agent | None = None) -> Result | None:
    """Learn or collect, as this process's context says. Every process of a run calls this function.

    Args:
        agent: a new agent of the job's experiment on this process's device; by default one is built.
    """
    keep_freed_memory()
    heartbeat = slowed(status.heartbeat, job.layout.jitter)
    channels = context.of_collector
    role, index = ("learner", context.group.rank) if channels is None else ("collector", channels.index)
    device = job.layout.device_of(role, index)
    settings = torch_configured(job.experiment.torch_threads, device, strict=not job.experiment.allow_nondeterministic)
    with torch_errors.explained(), settings:
        agent = agent or Agent(job.experiment, device)
        if channels is None:
            return learn(job, agent, context, status, heartbeat)
        return collect(job, agent, channels, status, heartbeat)


def learn(job: Job, agent: Agent, context: WorkerContext, status: RunStatus, heartbeat: Callable[[], None]) -> Result:
    """Take rollouts, learn from them, publish the next version, record the iteration and save checkpoints."""
    experiment, group = job.experiment, context.group
    process = learner_process(job, agent, context, heartbeat)
    rollouts = process.rollouts
    with contextlib.ExitStack() as closing:
        closing.callback(process.close)
        resumed = begin_run(job, process)
        recording = closing.enter_context(contextlib.closing(Recording(job, process, status.heartbeat, resumed)))
        group.barrier()
        status.begin()
        closing.enter_context(objects_frozen())
        done, stopped = resumed.iteration, False
        abandoned = False
        if resumed.unevaluated is not None:  # the run was stopped during this evaluation
            abandoned = recording.evaluate(done, status.stop_requested)
            if not abandoned:
                recording.save(done)  # so that the run, if it is resumed again, does not repeat the evaluation
        ended = abandoned or recording.asked_to_stop(done)
        for iteration in () if ended else job.schedule.iterations_from(done, job.stop_after):
            begin = time.perf_counter()
            group.waited = rollouts.waited = 0.0
            taken = rollouts.take(iteration)
            if iteration == 0 and group.rank == 0:
                process.warn_of_lost_precision(taken)
            if job.layout.learner_delay:
                time.sleep(job.layout.learner_delay)
            learned = process.learner.learn(iteration, taken)
            stopped, count = process.merge_statistics(taken, stop=status.stop_requested())
            not_finite = agent.not_finite()
            if not (not_finite and job.stops):  # otherwise recording ends the run
                rollouts.publish(agent.version(iteration + 1, copied=rollouts.keeps_versions))

            done = iteration + 1
            recording.record(iteration, taken, learned, count, not_finite, begin)
            abandoned = recording.evaluate(done, status.stop_requested)
            ends = done in (experiment.iterations, job.stop_after)
            last = recording.asked_to_stop(done) or stopped or abandoned or ends
            if last or done % recording.checkpoint_every == 0:
                recording.save(done)
            if last:
                break
            group.barrier()  # so that time for learner 0's own work does not count as waiting in the next iteration
        stopped = abandoned or (stopped and done < experiment.iterations)
        return Result(job.folder.path, state_digest(process.state()), done, recording.score(), stopped)


def collect(job: Job, agent: Agent, channels: Channels, status: RunStatus, heartbeat: Callable[[], None]) -> None:
    """Collect rollouts in a separate process until the learners need no more."""
    schedule = job.schedule
    buffers = collector_buffers(agent, channels, channels.index, schedule)
    collectors = collectors_of(job, agent, buffers, channels.admission, heartbeat)
    with contextlib.closing(collectors):
        connection = CollectorConnection(agent, channels, collectors, schedule, free=job.collects_freely)
        first = connection.start(job.saved(), status.begin)
        with objects_frozen(), contextlib.suppress(RunEnded):
            if job.collects_freely:
                _collect_freely(connection, collectors, refresh=job.experiment.scheme.refresh == "step")
            else:
                iterations = schedule.iterations_from(first, job.stop_after)
                _collect_by_schedule(connection, collectors, schedule, iterations)


def _collect_by_schedule(
    connection: CollectorConnection, collectors: Collectors, schedule: Schedule, iterations: Iterable[int]
) -> None:
    """Collect the schedule's rollouts in the order in which they are learned from.

    Raises:
        RunEnded: the learners need no more rollouts.
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
    """Collect with the newest version whenever a buffer is free. refresh: look for a newer version at every step.

    Raises:
        RunEnded: the learners need no more rollouts.
    """
    lap = 0
    while True:
        version = connection.admit(lap)
        at = (lambda _: connection.newest()) if refresh else (lambda _, version=version: version)
        rollouts = collectors.collect(LapId(collectors.shards[0], lap), at)
        connection.deliver([each.info for each in rollouts])
        lap += 1
