"""Starts runs. train() makes a run's folder, resume() continues in one, and both start the layout's processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from lockstep.agent import Agent
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.core.schedule import Recorded
from lockstep.experiment import Experiment
from lockstep.launchers.auto import chosen
from lockstep.launchers.srun import take_part
from lockstep.run.finding import REPLAY
from lockstep.run.folder import RunFolder
from lockstep.system.output import print_line
from lockstep.system.supervision import is_unattended
from lockstep.training import callbacks, warm_start
from lockstep.training.callbacks import CallbackLike
from lockstep.training.job import Job, Result
from lockstep.training.loops import work
from lockstep.training.prepare import checked_agent, prepare_run, warn_before_run
from lockstep.training.resuming import other_platform, resumable


def train(
    experiment: Experiment,
    layout: Layout | str | None = None,
    options: RunOptions | str | Path | None = None,
    *,
    stop_after: int | None = None,
    on_iteration: CallbackLike | None = None,
) -> Result:
    """Train from the beginning.

    Args:
        experiment: what to learn.
        layout: how to spread the work, or a text such as "processes:2"; it cannot change the result. Default: auto,
            which chooses one for this machine.
        options: the run's folder and display; a text or a path is the run's folder.
        stop_after: end after this many iterations, without changing the schedules that total_steps defines.
        on_iteration: a function that is called with a lockstep.training.callbacks.Progress after every iteration, in
            the process that records the run, or a lockstep.Callback. Default: the callback that options.callback names.

    Returns:
        The result of the run.

    Raises:
        SettingsError: settings contradict each other, or something that they need is missing.
        NotFinite: an environment returned NaN or an infinity, or learning has diverged; also a SettingsError.
        WorkerError: a worker process raised, died or stalled.
    """
    return launch(
        experiment, Layout.of(layout), RunOptions.of(options), stop_after=stop_after, on_iteration=on_iteration
    )


def launch(
    experiment: Experiment,
    layout: Layout,
    options: RunOptions,
    *,
    stop_after: int | None = None,
    recorded: Recorded | None = None,
    weights: Path | None = None,
    on_iteration: CallbackLike | None = None,
) -> Result:
    """Train from the beginning, or repeat a run.

    Args:
        recorded: the recorded timing decisions to repeat (see lockstep.replay).
        weights: the run's copy of its initial weights, used instead of the run that the warm start names.
    """
    _check_stop(stop_after)
    asked = layout
    layout = chosen(
        layout,
        experiment,
        iterations=stop_after,
        repeats=recorded is not None,
        on_iteration=on_iteration,
        say=options.display != "none",
    )
    _join_others(layout)
    experiment, options = prepare_run(experiment, layout, options, recorded)
    _check_callback(on_iteration, options, layout)
    begun_with = warm_start.weights(experiment, weights) if layout.launcher.leads else {}
    repeats = recorded is not None or weights is not None
    new = (layout.launcher.one_process or asked.is_auto) and not repeats and not is_unattended()
    agent = None
    if new or begun_with:  # the learner checks this, too, but only after the folder exists
        agent = checked_agent(experiment, begun_with, new=new)
    if layout.launcher.leads and not repeats:
        warn_before_run(experiment, layout, options)
    origin = None if recorded is None else recorded.origin
    folder = RunFolder.create(experiment, layout, options, warm_start.packed(begun_with), origin, asked)
    try:
        with _writing(folder, layout):
            job = Job(folder, experiment, layout, options, None, stop_after, recorded, on_iteration, repeats)
            alone = layout.launcher.one_process and layout.device_of("learner", 0) == "cpu"
            return _start(job, agent if alone and not begun_with else None)
    except Exception:  # of the settings, or of the user's environment
        if layout.launcher.leads:
            folder.remove_unbegun()  # otherwise the corrected command would be refused for this folder
        raise


def resume(
    run: str | Path,
    layout: Layout | str | None = None,
    options: RunOptions | None = None,
    *,
    checkpoint: str | int | None = None,
    stop_after: int | None = None,
    on_iteration: CallbackLike | None = None,
) -> Result:
    """Continue a stopped or killed run exactly from its newest checkpoint: the run ends with the same digest and ledger
    as without the interruption.

    Args:
        run: the run's folder.
        layout: as for train; it may differ from before. Default: the layout that the run was started with. If this was
            auto, and timing decides nothing, auto chooses again.
        options: the display; default: the run's options.
        checkpoint: "latest" (also None), "best", or an iteration. Newer ones are renamed to `<name>.superseded`.
        stop_after: as for train.
        on_iteration: as for train.

    Raises:
        SettingsError: the run or checkpoint does not exist.
        CheckpointError: the checkpoint is damaged; the message offers the previous one.
    """
    if not (options is None or isinstance(options, RunOptions)):
        raise SettingsError(f"resume(..., options={options!r}) must be RunOptions: the run stays in its folder.")
    _check_stop(stop_after)
    folder = RunFolder.open(run)
    if (folder.path / REPLAY).exists():
        raise SettingsError(
            f"{folder.path} repeats another run and ended at the same iteration, so it cannot be resumed. Resume the "
            "run that its replay.json names."
        )
    experiment, options = folder.experiment(), options or folder.options()
    asked = folder.asked_layout() if layout is None else Layout.of(layout)
    layout = chosen(asked, experiment, on_iteration=on_iteration, say=options.display != "none")
    _join_others(layout)
    experiment, options = prepare_run(experiment, layout, options)
    _check_callback(on_iteration, options, layout)
    with _writing(folder, layout):
        saved = resumable(folder, checkpoint, experiment) if layout.launcher.leads else None
        begin, path = (0, None) if saved is None else (saved.iteration, saved.path)
        if saved is not None and begin == experiment.iterations and saved.meta.get("unevaluated"):
            print_line(f"{folder.path} was stopped during its last evaluation, which is repeated.", sys.stderr)
        elif layout.launcher.leads and begin == experiment.iterations:
            print_line(
                f"{folder.path} has completed all of its {begin} iterations. To continue learning in a new run: "
                f"lockstep train {folder.quoted} --warm-start.run {folder.quoted} --total-steps STEPS",
                sys.stderr,
            )
        elif layout.launcher.leads:
            differs = other_platform(folder, layout) if begin and layout.launcher.computes_here else ()
            folder.note_resumption(begin, layout, options, differs)
        return _start(Job(folder, experiment, layout, options, path, stop_after, None, on_iteration))


def _join_others(layout: Layout) -> None:
    """Set torchrun's variables if srun has started this process as one of several."""
    if layout.copies > 1 or layout.launcher.started_externally:
        take_part()


def _check_stop(stop_after: int | None) -> None:
    if stop_after is not None and not (isinstance(stop_after, int) and stop_after >= 1):
        raise SettingsError(f"stop_after={stop_after!r} must be a number of iterations, at least 1, or None.")


def _check_callback(on_iteration: CallbackLike | None, options: RunOptions, layout: Layout) -> None:
    given = options.callback if on_iteration is None else on_iteration
    if given is not None:
        callbacks.check(given, layout)


def _writing(folder: RunFolder, layout: Layout) -> AbstractContextManager[None]:
    """Hold the run's lock in the process that prepares its folder."""
    return folder.locked() if layout.launcher.leads else contextlib.nullcontext()


def _start(job: Job, agent: Agent | None = None) -> Result:
    """Start the run. agent: the new agent with which its only process begins, if it has been built."""
    place, checkpoint = job.folder.path, job.checkpoint and job.checkpoint.absolute()  # user code may chdir
    job = dataclasses.replace(job, folder=RunFolder(place.absolute()), checkpoint=checkpoint)
    begin = work if agent is None else functools.partial(work, agent=agent)
    result = job.layout.launcher.function()(begin, job)
    return dataclasses.replace(result, run=place) if job.layout.launcher.leads else result
