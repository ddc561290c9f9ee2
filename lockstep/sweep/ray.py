"""Runs a sweep on a Ray cluster: every run is an actor that reserves cores and GPUs on some node."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.settings import SettingsError, require
from lockstep.launchers.ray.launcher import connected
from lockstep.sweep import child
from lockstep.sweep.queue import Queue
from lockstep.sweep.slots import Needs
from lockstep.system.machine import cores

_ENDING = 10.0
"""Seconds that a killed run may take to exit."""
_ROUNDING = 1e-6
"""Tolerance when shares of a GPU are added up."""


class SweepRun:
    """The actor. It starts the process of a run, which ends with the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._told, self._lock = False, threading.Lock()

    def run(self, folder: str, name: str) -> int:
        """The exit code of the run's process."""
        queue = Queue(Path(folder))
        if not queue.exists():
            raise SettingsError(
                f"The sweep's folder {folder} does not exist on {socket.gethostname()}. Put it where all nodes reach "
                "it by the same path: lockstep sweep /SHARED/FOLDER/NAME … --ray."
            )
        with self._lock:
            self._process = child.start(queue, name, sorted(os.sched_getaffinity(0)))
            if self._told:
                self._process.terminate()
        code = self._process.wait()
        with self._lock:  # the node may have asked it to stop, rather than the sweep
            return child.LOST if code in child.STOPPED and not self._told else code

    def stop(self) -> None:
        """Ask the run to write a checkpoint and stop."""
        with self._lock:
            self._told = True
            if self._process is not None:
                self._process.terminate()


@dataclass(frozen=True)
class Bundle:
    """The resources of an actor."""

    cpus: int
    gpus: float
    memory: int = 0
    """Bytes of replay memory."""

    def __str__(self) -> str:
        return f"Ray, {self.cpus} CPU{'s' * (self.cpus != 1)}" + (f", {self.gpus:g} GPU" if self.gpus else "")


class RayProcess:
    """A run on the cluster, with the interface of a local process."""

    def __init__(self, ray: Any, queue: Queue, name: str, bundle: Bundle) -> None:
        # Two threads, so that stop can be called while run runs.
        wanted = {"num_cpus": bundle.cpus, "num_gpus": bundle.gpus, "memory": bundle.memory or None}
        kind = ray.remote(**wanted, max_restarts=0, max_concurrency=2)(SweepRun)
        self._ray, self._log, self._actor = ray, queue.log(name), kind.remote()
        self._begun, self._ended = self._actor.__ray_ready__.remote(), self._actor.run.remote(str(queue.folder), name)
        self._placed = False
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code of the run; LOST if its node was lost; None while it runs."""
        if self.returncode is None and self._ready(self._ended):
            self.returncode = self._code()
            self.kill()
        return self.returncode

    @property
    def begun(self) -> bool:
        """Whether Ray has placed it on a node."""
        if not self._placed:
            self._placed = self._ready(self._begun)
        return self._placed

    def terminate(self) -> None:
        """Ask it to write a checkpoint and stop; end it at once if Ray has not placed it yet."""
        if self.begun:
            self._actor.stop.remote()
        else:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._ray.kill(self._actor)

    def wait(self) -> int:
        """Wait a while for it to end."""
        self._ready(self._ended, _ENDING)
        return self.poll() or 0

    def _ready(self, answer: Any, timeout: float = 0.0) -> bool:
        return bool(self._ray.wait([answer], timeout=timeout)[0])

    def _code(self) -> int:
        try:
            return self._ray.get(self._ended)
        except self._ray.exceptions.RayError as error:
            with self._log.open("a", encoding="utf-8") as log:  # a failure shows the last lines of this log
                print(getattr(error, "cause", error), file=log)
            return child.LOST if isinstance(error, self._ray.exceptions.RayActorError) else 1


class RayCluster:
    """The nodes of a cluster, which may come and go. Ray decides where a run goes."""

    def __init__(self, ray: Any, runs_per_gpu: int = 1) -> None:
        self._ray, self._runs_per_gpu = ray, runs_per_gpu
        self._taken: list[Bundle] = []

    def check(self, wanted: Needs) -> None:
        """Raise SettingsError if no node has the GPUs that a run needs."""
        largest = int(self._largest("GPU"))
        if wanted.gpus > largest:
            raise SettingsError(
                f"A run of this sweep has a layout for {wanted.gpus} GPUs, but no node of the Ray cluster has more "
                f"than {largest}. Add a node that has (ray status lists the nodes), or give the runs another --layout."
            )

    def has_room(self, wanted: Needs) -> bool:
        """Whether the cluster has enough resources that this sweep has not taken."""
        total, bundle = self._ray.cluster_resources(), self._bundle(wanted)
        cpus = total.get("CPU", 0) - sum(taken.cpus for taken in self._taken)
        gpus = total.get("GPU", 0) - sum(taken.gpus for taken in self._taken)
        memory = total.get("memory", 0) - sum(taken.memory for taken in self._taken)
        return cpus >= bundle.cpus > 0 and gpus > bundle.gpus - _ROUNDING and memory >= bundle.memory

    def take(self, wanted: Needs) -> Bundle | None:
        """Cores and GPUs of one node; None while too few are free. A run that needs more cores than any node has gets a
        whole node."""
        if not self.has_room(wanted):
            return None
        self._taken.append(self._bundle(wanted))
        return self._taken[-1]

    def give_back(self, share: Bundle) -> None:
        """The run has ended."""
        self._taken.remove(share)

    def start(self, queue: Queue, name: str, share: Bundle) -> RayProcess:
        """An actor, which begins when Ray has found a node for it."""
        return RayProcess(self._ray, queue, name, share)

    def pending(self, process: RayProcess) -> bool:
        """Whether Ray has not found a node for a run yet, for example because other users' jobs occupy them."""
        return not process.begun

    def _bundle(self, wanted: Needs) -> Bundle:
        # Ray divides single GPUs only, in ten-thousandths.
        gpus = 10_000 // self._runs_per_gpu / 10_000 if wanted.gpus == 1 else float(wanted.gpus)
        # A run alone on the largest node must find out itself whether its memory suffices.
        memory = min(wanted.memory, int(self._largest("memory")))
        return Bundle(min(wanted.cores, int(self._largest("CPU"))), gpus, memory)

    def _largest(self, resource: str) -> float:
        """The amount of a resource on the node that has the most."""
        return max((node["Resources"].get(resource, 0) for node in self._ray.nodes() if node["Alive"]), default=0)


@contextlib.contextmanager
def cluster(runs_per_gpu: int) -> Iterator[RayCluster]:
    """The cluster that RAY_ADDRESS names or that this process is connected to, else a new one on this machine.

    Raises:
        SettingsError: Ray is not installed.
    """
    require("ray", "ray", "--ray", "Without --ray, a sweep runs on this machine.")
    with connected(cores()) as ray:
        yield RayCluster(ray, runs_per_gpu)
