"""The resources that a run's processes need on the nodes of a Ray cluster."""

from __future__ import annotations

from typing import Any

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
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
        wanted, there = sum(each.get(name, 0) for each in needed), total.get(name, 0)
        if there < wanted:
            local = " Without RAY_ADDRESS, a local cluster with enough CPUs is started." if name == "CPU" else ""
            raise SettingsError(
                f"Layout {layout} needs {wanted:g} {name}{'s' * (name in _RAY.values())}, but the Ray cluster has "
                f"{there:g} in all. Add nodes to it, or use fewer processes (the result is the same).{local}"
            )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for each in needed:
        if not any(all(node.get(name, 0) >= amount for name, amount in each.items()) for node in nodes):
            asked = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
            raise SettingsError(
                f"Layout {layout} has a process that needs {asked}, and no node of the Ray cluster has as much. Ask "
                "for less, or start a node that has it (ray start --resources defines resources)."
            )
