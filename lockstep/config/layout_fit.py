"""Checks whether a layout fits the shards of an experiment and this machine."""

from __future__ import annotations

import os

from lockstep.config.hidden_gpus import hidden_by_slurm
from lockstep.config.layout import LOCAL, Layout
from lockstep.config.settings import SettingsError, require


def check_fit(layout: Layout, shards: int) -> None:
    """Raise SettingsError if a layout has more processes than shards, or needs packages or GPUs that this machine
    lacks."""
    layout.validate()
    if package := layout.launcher.package:
        otherwise = "Without it use processes:N or cpu:aC-lL on one machine, or torchrun on several."
        require(package, package, f"Layout {layout}", otherwise)
    for count, role in (
        (layout.workers, "processes"),
        (len(layout.collectors), "collectors"),
        (len(layout.learners), "learners"),
    ):
        if count > shards:
            raise SettingsError(
                f"Layout {layout} has {count} {role} for scheme.shards={shards}. Each needs at least one shard: use "
                f"{shards} or fewer, or more --scheme.shards (another result)."
            )
    if gpus := _gpus_of_machine(layout):
        from torch import cuda

        if max(gpus) >= (count := cuda.device_count()):
            raise SettingsError(
                f"Layout {layout} needs GPU {max(gpus)}, but this machine has {count} that torch can use (numbers "
                f"start at 0; see lockstep doctor). {_without_gpus(layout, count)}"
            )


def _gpus_of_machine(layout: Layout) -> tuple[int, ...]:
    """Numbers of all GPUs that this machine must have, including those of other groups here. So all processes find the
    same mistake, and none waits for the others."""
    if not layout.spread:
        return layout.gpus
    groups = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    named = [
        each for role in (layout.collectors, layout.learners) for each in role[: groups * len(role) // layout.copies]
    ]
    return tuple(sorted({int(device) for device in named if device != "cpu"}))


def _without_gpus(layout: Layout, count: int) -> str:
    """Advice for a machine where torch can use only this many GPUs."""
    groups = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if layout.spread else 1
    several = groups > 1 or (layout.launcher.started_externally and "+" in layout.device)
    if count and several and (hidden := hidden_by_slurm(count)):
        return (
            f"Slurm shows each task only its own GPUs ({hidden}), but the layout numbers all GPUs of the node. Use "
            "--gpus-per-node in place of --gpus-per-task, or add --gpu-bind=none, so that each task sees them all."
        )
    if count and layout.device == LOCAL:
        processes = f"{count} process{'es' * (count > 1)}"
        return f"Start {processes} on it, or use device=0 if each sees only its own GPU, as in Slurm."
    if count and groups > 1:
        last = max(_gpus_of_machine(layout))
        return f"Its {groups} groups on this machine need GPUs 0 to {last}: start fewer groups here."
    if count:
        return f"Use fewer of them, as in {layout.repeating()}, which gives the same bits."
    return "A new run can use cpu:aC-lL (C collectors, L learners) on the CPU, which gives different bits."
