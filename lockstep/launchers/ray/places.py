"""Places of a run's processes on the nodes of a Ray cluster: the resources that they need, and starting them there."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.launchers.ray.actors import WHILE_BUSY
from lockstep.launchers.ray.requests import Process
from lockstep.training.job import Job

_RAY = {"cpus": "CPU", "gpus": "GPU"}


def places(job: Job) -> list[dict[str, float]]:
    """The resources of each process on its node, by Ray's names: first of learners, then of those that only collect."""
    layout = job.layout
    busy = max(job.experiment.torch_threads, layout.env_threads, layout.env_processes)
    learner, collector = (
        {"CPU": busy, **{_RAY.get(name, name): amount for name, amount in layout.resources_of(role).items()}}
        for role in ("learner", "collector")
    )
    return [learner] * layout.learning + [collector] * len(layout.collectors)


def require_places(ray: Any, layout: Layout, needed: list[dict[str, float]]) -> None:
    """Check that the cluster has enough resources for all processes together, and a node with enough for each.

    Raises:
        SettingsError: it does not have them.
    """
    total = ray.cluster_resources()
    for name in dict.fromkeys(name for each in needed for name in each):
        wanted, available = sum(each.get(name, 0) for each in needed), total.get(name, 0)
        if available < wanted:
            local = " Without RAY_ADDRESS, a local cluster with enough CPUs is started." if name == "CPU" else ""
            raise SettingsError(
                f"Layout {layout} needs {wanted:g} {name}{'s' * (name in _RAY.values())}, but the Ray cluster has "
                f"{available:g} in all. Add nodes to it, or use fewer processes (the result is the same).{local}"
            )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for each in needed:
        if not any(all(node.get(name, 0) >= amount for name, amount in each.items()) for node in nodes):
            asked = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
            raise SettingsError(
                f"Layout {layout} has a process that needs {asked}, and no node of the Ray cluster has as much. Ask "
                "for less, or start a node that has it (ray start --resources defines resources)."
            )


class Places:
    """Starts processes where their resources are.

    Args:
        reserved: how many of a job's processes, from the first, have reserved resources from the beginning; None: all.
    """

    def __init__(self, ray: Any, job: Job, reserved: int | None = None) -> None:
        self._ray, self._job, self._needed = ray, job, places(job)
        self._reserved = self._needed[:reserved]
        self._group: Any = None
        """Ray's placement group of the reserved places."""

    def reserve(self) -> None:
        """Ask for the reserved places. Processes wait until the cluster has all of them."""
        self._group = self._ray.util.placement_group(self._reserved, strategy="SPREAD")

    def start(self, name: str, kind: type, index: int, place: int | None = None) -> Process:
        """Start a process.

        Args:
            place: the index of its reserved place; None for any node with enough resources for a collector.
        """
        strategy: Any = "SPREAD"
        if place is not None:
            strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=place
            )
        taken, layout = dict(self._needed[-1 if place is None else place]), self._job.layout
        processes = layout.learning + layout.groups(self._job.experiment.scheme.shards)
        remote = self._ray.remote(
            num_cpus=taken.pop("CPU"),
            num_gpus=taken.pop("GPU", 0),
            resources=taken,
            max_restarts=0,
            max_task_retries=0,
            # Calls that wait occupy threads: lag + 1 for versions and, for each process, one for admissions and
            # parameters, and two for rollouts that may be late.
            concurrency_groups={WHILE_BUSY: self._job.schedule.lag + 8 + 3 * processes},
            allow_out_of_order_execution=True,
            enable_task_events=False,  # Ray would keep a record of each of the last 100,000 calls
            scheduling_strategy=strategy,
        )
        return Process(name, remote(kind).remote(name, self._job, os.getcwd(), index))

    def room(self) -> int:
        """How many more collectors the nodes have room for."""
        needed = self._needed[-1].items()
        # A collector must fit on one node, and Ray (2.60) has public functions only for the total of a node
        # (ray.nodes) and for what is free in the whole cluster (ray.available_resources). Without this function, runs
        # whose collectors join (ray:a4+) would end here with an AttributeError. Others do not call it.
        nodes = self._ray._private.state.available_resources_per_node().values()
        return sum(min(int(free.get(name, 0) / amount) for name, amount in needed) for free in nodes)

    def free(self) -> None:
        """Give the reserved places back."""
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
