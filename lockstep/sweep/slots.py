"""Assigns cores and GPUs of this machine to runs, so that runs do not disturb each other."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.sweep import child
from lockstep.sweep.core_locks import CoreLocks
from lockstep.sweep.queue import Queue
from lockstep.system.machine import cores

SHARED = " (shared with another sweep)"


@dataclass(frozen=True)
class Needs:
    """The resources that a run occupies."""

    cores: int
    gpus: int = 0
    memory: int = 0
    """Bytes of replay memory, which fills during the run."""


@dataclass(frozen=True)
class Share:
    """The resources of a run: numbers of cores, and names of GPUs in the form of CUDA_VISIBLE_DEVICES."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    memory: int = 0
    shared: bool = False
    """Whether other sweeps use some of the cores."""

    def __str__(self) -> str:
        text = f"core {_listed(self.cores)}" if len(self.cores) == 1 else f"cores {_listed(self.cores)}"
        text += f", GPU {','.join(self.gpus)}" if self.gpus else ""
        return text + SHARED * self.shared


def needs(layout: Layout, torch_threads: int, memory: int = 0) -> Needs:
    """One core for each thread that a layout keeps busy; GPUs up to the highest that it names; memory as given."""
    helpers = max(layout.env_threads, layout.env_processes)
    if layout.split:
        cores = len(layout.collectors) * max(torch_threads, helpers) + len(layout.learners) * torch_threads
    else:
        cores = layout.workers * max(torch_threads, helpers)
    return Needs(cores, max(layout.gpus) + 1 if layout.gpus else 0, memory)


class Process(Protocol):
    """A process of a run, with the interface of subprocess.Popen."""

    returncode: Any

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Place(Protocol):
    """A place that can execute runs."""

    def check(self, wanted: Needs) -> None:
        """Raise SettingsError if this place can never have what a run needs."""
        ...

    def has_room(self, wanted: Needs) -> bool:
        """Whether a run could begin now."""
        ...

    def take(self, wanted: Needs) -> Any:
        """The resources for a run, which can be shown to the user; None while there is no room."""
        ...

    def give_back(self, share: Any) -> None:
        """The run has ended."""
        ...

    def start(self, queue: Queue, name: str, share: Any) -> Process:
        """Start a run with these resources."""
        ...

    def pending(self, process: Any) -> bool:
        """Whether a started run still waits for its machine."""
        ...


class Machine:
    """The cores, GPUs and memory that a sweep may use, and which of them are taken."""

    def __init__(
        self,
        cores: Sequence[int],
        gpus: Sequence[str] = (),
        runs_per_gpu: int = 1,
        memory: float = math.inf,
        quota: int | None = None,
        core_locks: CoreLocks | None = None,
        start: Callable[..., Process] = child.start,
    ) -> None:
        """
        Args:
            quota: maximum number of busy cores, for a container that may use fewer than it shows.
            core_locks: the locks that show other sweeps this one's cores; None ignores other sweeps.
            start: child.start, or Template.start, which is faster.
        """
        self._start = start
        self._core_locks = core_locks
        self._memory, self._running = memory, 0
        self._spare = len(cores) - min(quota or len(cores), len(cores))
        """Number of cores to leave free."""
        self._most = len(cores) - self._spare
        self._free = set(cores)
        self._tenants = dict.fromkeys(gpus, 0)
        self._runs_per_gpu = runs_per_gpu

    @staticmethod
    def here(
        runs_per_gpu: int = 1,
        *,
        gpus: bool = True,
        replay: bool = True,
        core_locks: CoreLocks | None = None,
        start: Callable[..., Process] = child.start,
    ) -> Machine:
        """Everything that this process may use, limited by taskset, CUDA_VISIBLE_DEVICES and containers.

        Args:
            runs_per_gpu: runs that share a GPU.
            gpus: whether any run needs a GPU; detecting GPUs takes seconds.
            replay: whether any run has a replay memory; detecting the machine's memory takes seconds, too.
            core_locks, start: as for the class.
        """
        memory = _memory() if replay else math.inf
        allowed = sorted(os.sched_getaffinity(0))
        return Machine(allowed, _gpus() if gpus else (), runs_per_gpu, memory, cores(), core_locks, start)

    def check(self, wanted: Needs) -> None:
        """Raise SettingsError if a run can never have what it needs here."""
        if wanted.gpus > len(self._tenants):
            raise SettingsError(
                f"A run of this sweep has a layout for {wanted.gpus} GPUs, but this machine has {len(self._tenants)} "
                "that torch can use (see lockstep doctor). Continue the sweep on a machine with enough GPUs, or "
                "change the layout of its runs: repeat the command that began it, with another --layout."
            )

    def has_room(self, wanted: Needs) -> bool:
        """Whether enough cores, GPUs and memory are free. A run that runs alone is never refused for memory."""
        remembered = not wanted.memory or wanted.memory <= self._memory or not self._running
        enough = len(self._free) - self._spare >= self._cores_of(wanted)
        return remembered and enough and len(self._open()) >= wanted.gpus

    def take(self, wanted: Needs) -> Share | None:
        """Cores and GPUs for a run; None while too few are free. It prefers neighboring cores that no other sweep uses.
        A run that needs more cores than the machine has gets all of them."""
        if not self.has_room(wanted):
            return None
        gpus = sorted(self._open(), key=self._tenants.__getitem__)[: wanted.gpus]  # the GPUs with the fewest runs first
        count = self._cores_of(wanted)
        if self._core_locks is None:
            cores, shared = self._neighbors(count, Counter()), False
        else:
            cores, shared = self._core_locks.take(lambda others: self._neighbors(count, others))
        share = Share(cores, tuple(gpus), wanted.memory, shared)
        self._memory -= share.memory
        self._running += 1
        self._free -= set(share.cores)
        for gpu in share.gpus:
            self._tenants[gpu] += 1
        return share

    def give_back(self, share: Share) -> None:
        """The run has ended."""
        self._memory += share.memory
        self._running -= 1
        self._free |= set(share.cores)
        for gpu in share.gpus:
            self._tenants[gpu] -= 1
        if self._core_locks is not None:
            self._core_locks.give_back(share.cores)

    def start(self, queue: Queue, name: str, share: Share) -> Process:
        """A process on this machine, pinned to its share."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} if share.gpus else None
        return self._start(queue, name, share.cores, environment)

    def pending(self, process: Process) -> bool:
        """Always False, since this machine is available."""
        return False

    def _cores_of(self, wanted: Needs) -> int:
        return min(wanted.cores, self._most)

    def _open(self) -> list[str]:
        """GPUs that can take another run."""
        return [gpu for gpu, tenants in self._tenants.items() if tenants < self._runs_per_gpu]

    def _neighbors(self, count: int, others: Counter[int]) -> tuple[int, ...]:
        """The free cores that the fewest other sweeps use, as close together as possible: neighbors share caches and
        memory."""
        alone = [core for core in sorted(self._free) if not others[core]]
        free = alone if len(alone) >= count else sorted(self._free)
        starts = list(range(len(free) - count + 1))
        if self._spare:  # otherwise all containers of a machine would take its first cores
            random.shuffle(starts)

        def cost(begin: int) -> tuple[int, int]:
            cores = free[begin : begin + count]
            return sum(others[core] for core in cores), cores[-1] - cores[0]

        begin = min(starts, key=cost)
        return tuple(free[begin : begin + count])


def _memory() -> float:
    from lockstep.system.memory import available_bytes

    available = available_bytes()
    return math.inf if available is None else available


def _gpus() -> tuple[str, ...]:
    from torch import cuda

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(cuda.device_count())] if visible is None else visible.split(",")
    return tuple(name.strip() for name in names[: cuda.device_count()])


def _listed(cores: tuple[int, ...]) -> str:
    """0-3,6 for 0, 1, 2, 3 and 6."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
