"""The least cost of a sample: environment, inference, replay and training, each measured alone and without the
library's overhead, in the shapes of an experiment; and the resulting limit for a layout.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from lockstep.buffers.rollout_buffers import acting_groups
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.core.shards import block
from lockstep.distributed.shared_memory import SharedCounts
from lockstep.envs import adapter_of
from lockstep.experiment import Experiment
from lockstep.speed.calls import Calls
from lockstep.system import children
from lockstep.system.malloc import keep_freed_memory
from lockstep.system.numerics import configure_torch
from lockstep.system.supervision import StallDetector, WorkerError

PARTS = {
    "env": "environment",
    "inference": "inference",
    "inserting": "inserting into replay",
    "sampling": "drawing from replay",
    "training": "training, all gradient steps",
}
"""The parts that the limit counts, and their names."""
OVERHEAD = ("optimizer", "reduction")
"""Work of learning in addition, once per gradient step."""


def parts_of(experiment: Experiment) -> tuple[str, ...]:
    """The members of PARTS that an experiment has."""
    replays = experiment.algorithm.replays
    return tuple(part for part in PARTS if replays or part not in ("inserting", "sampling"))


@dataclass(frozen=True)
class Costs:
    """Seconds per sample on one core (or GPU), while the layout's other processes do the same."""

    env: float
    """One environment step, on one core."""
    inference: float
    """One action: a forward pass and drawing the action."""
    training: float
    """The loss, forwards and backwards, over all gradient steps."""
    optimizer: float
    """A process's share of the optimizer steps."""
    reduction: float
    """Adding up the gradients of a process's own shards."""
    inserting: float = 0.0
    """Remembering it."""
    sampling: float = 0.0
    """Drawing items from replay for all gradient steps, and updating priorities."""

    @property
    def learning(self) -> float:
        """The least cost of learning."""
        return self.inserting + self.sampling + self.training


@dataclass(frozen=True)
class Limit:
    """What a layout cannot exceed on a machine, in samples per second."""

    cores: float
    """If every computing core were always busy with the parts and nothing else."""
    roles: float
    """If no process ever waited longer than necessary: the slowest role, or the sum of roles that take turns."""

    @property
    def rate(self) -> float:
        return min(self.cores, self.roles)


def limit(experiment: Experiment, layout: Layout, costs: Costs, cores: int) -> Limit:
    """The limit that follows from the parts' costs.

    Colocated processes do one part after the other, except that environments in separate threads or processes step
    while the policy runs for another acting batch. Split layouts overlap from lag 1 on.
    """
    collectors = layout.collecting
    learners = layout.learning
    collecting = _collecting(experiment, layout, costs, collectors)
    learning = costs.learning / learners
    overlap = layout.split and experiment.scheme.buffers > 1
    seconds = max(collecting, learning) if overlap else collecting + learning
    on_cpu = costs.env
    if layout.device_of("collector", 0) == "cpu":
        on_cpu += costs.inference * experiment.torch_threads
    if layout.device_of("learner", 0) == "cpu":
        on_cpu += costs.training * experiment.torch_threads
    on_cpu += costs.inserting + costs.sampling
    return Limit(cores / on_cpu, 1.0 / seconds)


def _collecting(experiment: Experiment, layout: Layout, costs: Costs, collectors: int) -> float:
    """Seconds per sample for all collectors together."""
    groups = acting_groups(experiment, block(experiment.scheme.shards, collectors, 0))
    if not adapter_of(experiment.env).threads and not layout.env_processes:
        return (costs.env + costs.inference) / collectors
    stepping = groups if len(groups) > 1 else groups[:1]
    at_once = layout.env_processes or layout.env_threads * sum(len(group.shards) for group in stepping)
    env = costs.env / at_once
    return (max(env, costs.inference) if len(groups) > 1 else env + costs.inference) / collectors


def processes_to_load(experiment: Experiment, layout: Layout, cores: int) -> int:
    """Number of processes that measure at the same time, so that each core is as slow as in training."""
    helpers = layout.env_processes > 0 or layout.env_threads > 1
    return max(1, min(cores, cores if helpers else layout.processes))


class PartsWorkers:
    """Processes that measure the parts on request, all at the same time; idle in between.

    Args:
        cores: of this machine; loaded as the layout loads them.
    """

    def __init__(self, experiment: Experiment, layout: Layout, cores: int) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._parts, self._stall_timeout = parts_of(experiment), layout.stall_timeout
        self._environments = layout.environments_each(experiment.env.num_envs)
        context, count = get_context("spawn"), processes_to_load(experiment, layout, cores)
        self._progress = SharedCounts(count)
        """Number of calls that each process has made."""
        for index in range(count):
            ours, theirs = context.Pipe()
            arguments = (experiment, layout, index, theirs, self._progress)
            self._processes.append(children.start(_serve, arguments, f"lockstep-parts-{index}"))
            theirs.close()
            self._pipes.append(ours)

    def __len__(self) -> int:
        return len(self._processes)

    def ready(self) -> None:
        """Wait until they have made their environments and models."""
        self._answers()

    def measure(self, part: str, seconds: float) -> float:
        """Seconds per sample, averaged over the processes, measured for this many seconds."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # its process has died, which is reported below
                pipe.send((part, seconds))
        return statistics.fmean(self._answers())

    def costs(self, seconds: float) -> Costs:
        """All parts, one after the other; the work per gradient step is measured for a tenth of the time."""
        main = {part: self.measure(part, seconds) for part in self._parts}
        return Costs(**main, **{part: self.measure(part, seconds / 10) for part in OVERHEAD})

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._progress.close()

    def _answers(self) -> list[float]:
        answers: dict[int, float] = {}
        standstill = StallDetector(self._stall_timeout, self._environments)
        while len(answers) < len(self._pipes):
            missing = [index for index in range(len(self._pipes)) if index not in answers]
            found, deaths = children.first_answers(self._processes, self._pipes, missing)
            for index, value in found.items():
                if isinstance(value, SettingsError):
                    raise value
                if isinstance(value, str):
                    raise WorkerError(f"Measuring process {index} failed:\n{value}")
            for index, report in deaths.items():
                raise WorkerError(f"Measuring process {index} {report}")
            answers |= found
            patience = standstill.too_long(list(self._progress.values), started=any(self._progress.values))
            if patience is not None and len(answers) < len(self._pipes):
                for index in missing:
                    children.show_stack(self._processes[index], f"Measuring process {index}")
                raise WorkerError(
                    f"The measuring processes have made no progress for {patience:g} seconds (Layout.stall_timeout). "
                    "Their stacks are printed above. To allow more time, use stall_timeout=SECONDS in the layout."
                )
        return [answers[index] for index in range(len(self._pipes))]


def _serve(experiment: Experiment, layout: Layout, index: int, pipe: Connection, progress: SharedCounts) -> None:
    """The main function of a measuring process."""
    keep_freed_memory()
    try:
        strict = not experiment.allow_nondeterministic
        threads, learner = experiment.torch_threads, layout.device_of("learner", index % layout.learning)
        configure_torch(threads, learner, strict=strict)
        configure_torch(threads, layout.device_of("collector", index % layout.collecting), strict=strict)
        calls = Calls(experiment, layout, index).calls
        pipe.send(0.0)
        while True:
            part, seconds = pipe.recv()
            call, samples = calls[part]

            def counted(call: Callable[[], object] = call) -> None:
                call()
                progress.values[index] += 1

            pipe.send(seconds_a_call(counted, seconds) / samples)
    except EOFError:
        pass
    except SettingsError as error:
        pipe.send(error)
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)  # without waiting for the environments' threads


def seconds_a_call(call: Callable[[], object], seconds: float) -> float:
    """The mean over at least three repetitions, after one for warm-up. Not the median: other programs that take turns
    on this core slow down training, too."""
    call()
    begin, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < seconds or calls < 3:
        call()
        calls += 1
    return passed / calls
