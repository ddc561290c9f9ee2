"""Checks that a layout can run an experiment or repeat a recorded run."""

from __future__ import annotations

import dataclasses
import os
from operator import attrgetter

from lockstep import envs
from lockstep.config.launchers import layouts_with
from lockstep.config.layout import Layout
from lockstep.config.layout_fit import check_fit
from lockstep.config.settings import SettingsError
from lockstep.core.schedule import Recorded
from lockstep.experiment import Experiment


def check_layout(experiment: Experiment, layout: Layout, recorded: Recorded | None) -> None:
    """Raise SettingsError if the layout cannot run an experiment, or cannot repeat a recorded run."""
    _check_stepping(experiment, layout)
    _check_growing(experiment, layout)
    if experiment.scheme.free_running:
        _check_free_running(experiment, layout, recorded)
    _check_preempting(experiment, layout)
    if experiment.scheme.gradient_lag == "async":
        _check_asynchronous_gradients(layout, recorded)


def _check_stepping(experiment: Experiment, layout: Layout) -> None:
    """Check that the adapter supports the layout's env_processes and env_threads."""
    adapter = envs.adapter_of(experiment.env) if layout.env_processes or layout.env_threads > 1 else None
    if adapter and layout.env_processes and not adapter.processes:
        raise SettingsError(
            f"--layout {layout}: env_processes cannot step {experiment.env.id} with env.adapter="
            f"{experiment.env.adapter}. {'Use env_threads=N' if adapter.threads else 'Leave it out'}, or use "
            "--env.adapter gymnasium if it has this id (another result)."
        )
    if experiment.curriculum and layout.env_processes:
        raise SettingsError(
            f"--layout {layout}: env_processes cannot change options between episodes, as curriculum="
            f"{experiment.curriculum} does. Leave it out, and use more collectors."
        )
    if adapter and layout.env_threads > 1 and not adapter.threads:
        raise SettingsError(
            f"--layout {layout}: env_threads cannot step {experiment.env.id} with env.adapter="
            f"{experiment.env.adapter}. {'Use env_processes=N' if adapter.processes else 'Leave it out'}."
        )


def _check_growing(experiment: Experiment, layout: Layout) -> None:
    """Check that collectors may join and leave, if the layout lets them."""
    if layout.growing and not experiment.scheme.free_running:
        raise SettingsError(
            f"--layout {layout} with --scheme.lag {experiment.scheme.lag}: collectors may only join and leave if no "
            "iteration waits for particular ones. Use --scheme.lag async, or --layout "
            f"{dataclasses.replace(layout, growing=False)}, which replaces lost collectors."
        )


def _check_free_running(experiment: Experiment, layout: Layout, recorded: Recorded | None) -> None:
    """Check that collectors can run freely, or that the layout can repeat a free-running run."""
    launcher = layout.launcher
    if recorded is not None:
        if not (launcher.shares_memory and (layout.split or launcher.one_process)):
            raise SettingsError(
                f"--layout {layout} cannot repeat a free-running run, whose rollouts go to any learner. Use inline, or "
                "cpu:aC-lL with C collectors and L learners."
            )
        return
    if not (layout.split and launcher.decides):
        raise SettingsError(
            f"--scheme.lag async with --layout {layout}: collectors can only run freely in separate "
            f"processes. Use --layout auto, {_deciding(layout, split=True)} (C collectors and L learners, as in "
            "cpu:a1-l1), or --scheme.lag 1, which also overlaps collecting and learning, and gives the same result on "
            "any layout."
        )
    if experiment.scheme.refresh == "step" and not launcher.shares_memory:
        raise SettingsError(
            f"--scheme.refresh step with --layout {layout}: collectors look for a newer version at every step in "
            "memory that they share with learners. Use --scheme.refresh rollout, or --layout cpu:aC-lL on one machine."
        )


def _check_preempting(experiment: Experiment, layout: Layout) -> None:
    """Check that rollouts of late collectors can be preempted."""
    if experiment.scheme.preempt < 1 and not layout.launcher.decides:
        raise SettingsError(
            f"--scheme.preempt {experiment.scheme.preempt:g} with --layout {layout}: collectors must see which shards "
            f"are late. Use --layout {_deciding(layout)}, or leave out --scheme.preempt."
        )


def _check_asynchronous_gradients(layout: Layout, recorded: Recorded | None) -> None:
    """Check that learners can apply their gradients one by one, or that a single learner repeats a record of this."""
    if not layout.launcher.decides:
        raise SettingsError(
            f"--scheme.gradient-lag async with --layout {layout}: learners must be able to update the same "
            f"parameters. Use --layout {_deciding(layout)}, or --scheme.gradient-lag 1, which gives stale gradients on "
            "any layout."
        )
    if recorded is not None and max(layout.workers, len(layout.learners)) > 1:
        raise SettingsError(
            f"--layout {layout} cannot repeat a run with asynchronous gradients: one learner has to compute them "
            "in the order that was recorded. Use inline, or cpu:aC-l1 with C collectors."
        )


def _deciding(layout: Layout, *, split: bool = False) -> str:
    """The layouts that let timing decide.

    Args:
        split: whether to name only those with separate collectors and learners.
    """
    return layouts_with(attrgetter("decides"), layout.launcher_name, split=split)


def check_torchrun(experiment: Experiment, layout: Layout) -> None:
    """Raise SettingsError if the layout needs torchrun, and torchrun has not started this process, or has started a
    wrong number of processes."""
    if not layout.launcher.started_externally:
        return
    if "RANK" not in os.environ:
        raise SettingsError(
            "--layout torchrun must be started by torchrun, as in torchrun --nproc-per-node 2 -m -- lockstep train "
            "RECIPE --layout torchrun, or by Slurm's srun. Without them use --layout processes:2."
        )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if not layout.split:
        check_fit(dataclasses.replace(layout, workers=processes), experiment.scheme.shards)
    elif processes != layout.copies:
        raise SettingsError(
            f"--layout {layout} has {layout.copies} groups, and torchrun or srun starts a process for each of them, "
            f"but has started {processes}. Start {layout.copies} (one on each node, with --nproc-per-node 1 or "
            f"--ntasks-per-node 1), or end the layout with -d{processes}."
        )
