"""Makes the objects that the loops of a run's processes use (lockstep.training.loops)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from lockstep.agent import Agent
from lockstep.buffers.replay_batches import ReplayBatches
from lockstep.buffers.replay_placement import Placing
from lockstep.buffers.rollout_buffers import RolloutBuffers
from lockstep.collectors.collectors import Collectors
from lockstep.collectors.preemption import DistantCounts, preemption
from lockstep.core.shards import block
from lockstep.distributed.device_memory import report_transfer
from lockstep.distributed.groups import Group
from lockstep.distributed.shared_memory import PrivateArena, SharedMemory
from lockstep.learners.process import LearnerProcess
from lockstep.models.versions import Versions
from lockstep.system.graphs import cuda_graph
from lockstep.system.malloc import keep_freed_memory
from lockstep.system.numerics import configure_torch
from lockstep.system.output import print_warning
from lockstep.training import warm_start
from lockstep.training.context import WorkerContext
from lockstep.training.job import Job
from lockstep.training.prepare import learners_here, shards_here
from lockstep.training.writer import Resumed
from lockstep.transport.message_rollouts import MessageRollouts
from lockstep.transport.messages import CollectorService
from lockstep.transport.processes import SharedMemoryRollouts
from lockstep.transport.rollouts import LocalRollouts, RolloutSource, buffers_of


def slowed(heartbeat: Callable[[], None], jitter: float) -> Callable[[], None]:
    """A heartbeat that also sleeps up to `jitter` seconds at random."""
    if not jitter:
        return heartbeat

    def slow() -> None:
        heartbeat()
        time.sleep(random.uniform(0.0, jitter))

    return slow


def learner_process(job: Job, agent: Agent, context: WorkerContext, heartbeat: Callable[[], None]) -> LearnerProcess:
    """A learner, with the source of its rollouts."""
    group, quiet = context.group, job.options.display == "none"
    if job.checkpoint is None and not job.repeats:
        agent.check()
        for warning in agent.warnings() if group.rank == 0 else ():
            print_warning(warning)
    if job.layout.ipc:
        _open_devices(agent, group, quiet=quiet)
    rollouts = _rollouts(job, agent, context, heartbeat)
    capture = cuda_graph if job.layout.graphs else None
    process = LearnerProcess(agent, rollouts, group, heartbeat, capture, job.recorded, context.store)
    if isinstance(batches := process.learner.batches, ReplayBatches):
        # Measured now: all learners still wait for each other before the first of them allocates replay memory.
        free = None if agent.device.type == "cpu" else torch.cuda.mem_get_info(agent.device)[0]
        beside, shards = job.layout.learners_beside(group.rank), shards_here(job.experiment, job.layout)
        learners, tells = learners_here(job.layout), group.rank == 0 and not quiet
        batches.heartbeat = heartbeat
        batches.placing = Placing(job.layout.replay, beside, free, shards, learners, tells)
    return process


def _open_devices(agent: Agent, group: Group, *, quiet: bool) -> None:
    """Let learners on GPUs read each other's memory, and print whether they can."""
    problem = group.open_devices(agent.device)
    if group.rank == 0 and not quiet and (group.on_devices or problem is not None):
        report_transfer("Learners exchange gradients", problem)


def _rollouts(job: Job, agent: Agent, context: WorkerContext, heartbeat: Callable[[], None]) -> RolloutSource:
    """The source of a learner's rollouts: collectors of other processes, of other machines, or its own."""
    group, schedule, shards = context.group, job.schedule, job.experiment.scheme.shards
    versions = Versions(schedule)
    if context.channels is not None:
        freely, ipc, quiet = job.collects_freely, bool(job.layout.ipc), job.options.display == "none"
        return SharedMemoryRollouts(
            agent, context.channels, group, schedule, versions, free=freely, ipc=ipc, quiet=quiet
        )
    if context.inbox is not None:
        return MessageRollouts(agent, context.inbox, group, schedule, versions, job.layout.groups(shards))
    slots = block(shards, group.size, group.rank)
    collectors = collectors_of(
        job, agent, _own_buffers(job, agent, slots), context.counts or group.collected, heartbeat
    )
    return LocalRollouts(collectors, slots, schedule, versions)


def _own_buffers(job: Job, agent: Agent, shards: range) -> list[RolloutBuffers]:
    """Rollout buffers that no other process reads."""
    return buffers_of(agent, shards, job.schedule, PrivateArena(pinned=agent.device.type != "cpu"), ahead=False)


def collectors_of(
    job: Job,
    agent: Agent,
    buffers: list[RolloutBuffers],
    counts: SharedMemory | DistantCounts | None,
    heartbeat: Callable[[], None],
) -> Collectors:
    """The collectors that fill a process's buffers. counts: as for preemption."""
    shards = sum(len(each.shards) for each in buffers)
    preempting = preemption(job.experiment.scheme, job.recorded, counts, shards)
    return Collectors(agent, buffers, job.layout, heartbeat, preempting, stop=job.stops)


def collector_service(
    job: Job, index: int, heartbeat: Callable[[], None], counts: DistantCounts | None = None
) -> CollectorService:
    """The service that collects one group of shards on request in a separate process. counts: as in WorkerContext."""
    keep_freed_memory()
    device = job.layout.device_of("collector", min(index, len(job.layout.collectors) - 1))
    configure_torch(job.experiment.torch_threads, device, strict=not job.experiment.allow_nondeterministic)
    agent = Agent(job.experiment, device)
    shards = block(job.experiment.scheme.shards, job.layout.groups(job.experiment.scheme.shards), index)
    buffers = _own_buffers(job, agent, shards)
    collectors = collectors_of(job, agent, buffers, counts, slowed(heartbeat, job.layout.jitter))
    return CollectorService(agent, collectors, compress=bool(job.layout.compress))


def begin_run(job: Job, process: LearnerProcess) -> Resumed:
    """Make version 0, or load the checkpoint to resume from, and start the environments."""
    begin = time.perf_counter()
    saved = job.saved()
    if saved is None:
        weights = warm_start.weights(job.experiment, job.folder.weights)
        warm_start.load(process.agent, weights)
        process.begin(weights)
    else:
        process.restore(saved)
    replayed = process.group.gather(process.rollouts.start(saved)) or []
    if saved is None:
        return Resumed(0, {"samples": 0, "updates": 0}, None)
    restored = {
        "iteration": saved.iteration,
        "seconds": time.perf_counter() - begin,
        "replayed_steps": sum(replayed),
    }
    logger = {**saved.meta["recorder"], "restored": restored}
    return Resumed(
        saved.iteration,
        dict(saved.meta["counts"]),
        logger,
        saved.meta.get("metrics"),
        saved.meta.get("unevaluated"),
    )
