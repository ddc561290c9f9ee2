"""Verifies a run: repeats its first iterations with any layout and compares the results. Also compares two runs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.config.layout import Layout
from lockstep.config.layout_fit import check_fit
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.core.digests import state_digest
from lockstep.experiment import Experiment
from lockstep.launchers.auto import chosen
from lockstep.launchers.launch import launch
from lockstep.reproducibility.devices import layout_to_repeat
from lockstep.reproducibility.replay import recorded_schedule, require_memory
from lockstep.run import checkpoint, ledger
from lockstep.run import metrics as rows
from lockstep.run.consistency import (
    edited_settings,
    newest_checkpoint_difference,
    platform_warning,
    require_same_arithmetic,
)
from lockstep.run.folder import RunFolder
from lockstep.run.ledger import Difference, LedgerError

DEFAULT_ITERATIONS = 3
_SCORES = ("score/mean", "score/length", "score/iteration_mean", "score/iteration_max", "env/")
"""Prefixes of the metrics of training episodes, which the ledger does not contain."""


@dataclass(frozen=True)
class Verdict:
    """The result of verify."""

    ok: bool
    """Whether every check succeeded."""
    iterations: int
    """Iterations that were repeated and compared."""
    difference: Difference | None
    """The first difference; None if ok."""
    message: str
    """The verdict in one or two sentences."""
    warning: str | None = None
    """Set if this platform or a user's file has changed since the run was made or resumed, or if the experiment does
    not promise identical bits. This may explain a difference."""


def verify(
    run: str | Path,
    layout: Layout | str | None = None,
    iterations: int | Literal["all"] | None = None,
    workdir: str | Path | None = None,
    *,
    seed: int | None = None,
) -> Verdict:
    """Check a run's ledger and newest checkpoint, repeat its first iterations, and compare every digest.

    Args:
        run: the folder of the run.
        layout: the layout of the repetition, or a text such as "processes:2". It must suit the number of shards and
            have the run's kinds of device. Default: auto, or the smallest layout with the run's kinds of device if it
            used GPUs.
        iterations: how many to repeat, at most as many as are recorded; None means 3.
        workdir: an existing folder for the repetition, which is deleted afterwards. Default: the system's folder for
            temporary files.
        seed: repeat with another seed, to see where the results differ.

    Raises:
        SettingsError: the run does not exist, nothing is recorded, GPUs computed it and this machine has none, or it
            was computed in another version of portable arithmetic.
        WorkerError: the repetition failed.
    """
    folder, layout = RunFolder.open(run), Layout.of(layout)
    if not layout.is_auto and layout.launcher.started_externally:
        raise SettingsError(
            "verify starts its own workers: use --layout inline, processes:N or cpu:aC-lL, without torchrun."
        )
    if workdir is not None and not Path(workdir).is_dir():
        raise SettingsError(f"workdir={str(workdir)!r} is not an existing folder. Make it, or leave it out.")
    experiment = folder.experiment()
    checkpoints = checkpoint.list_checkpoints(folder.checkpoints)
    try:
        head, lines = ledger.read(folder.ledger)
    except LedgerError as error:
        return Verdict(False, 0, Difference(error.iteration, "the ledger itself", "written", "read"), str(error))
    require_same_arithmetic(folder, head)
    count = _iterations(iterations, len(lines), folder)
    require_memory(folder, experiment, count)
    layout = layout_to_repeat(folder, head, layout)
    layout = chosen(layout, experiment, iterations=count, repeats=True, say=False)
    check_fit(layout, experiment.scheme.shards)
    warning = platform_warning(folder, head, layout)
    difference = edited_settings(folder, head) or newest_checkpoint_difference(checkpoints, lines, whole=True)
    if difference is not None:
        return Verdict(False, 0, difference, f"{folder.path} contradicts its own ledger: {difference}", warning)

    if seed is not None:
        experiment = experiment.replace(seed=seed)
    damage = rows.fault(folder, max(len(lines) - 1, *map(checkpoint.iteration_of, checkpoints), 0), checkpoints)
    difference = _rerun(folder, experiment, layout, count, head, lines, workdir)
    share = f"{count} of {len(lines)} recorded iterations, repeated with layout {layout}"
    if difference is None and damage is not None:
        message = (
            f"{folder.metrics} has changed since it was written. {damage} Restore it from a copy, or ignore those "
            f"rows. The learned parameters are not affected: {share}, gave the same bits."
        )
        return Verdict(False, count, Difference(None, folder.metrics.name, "written", "read"), message, warning)
    if difference is None:
        unchecked = "" if checkpoint.list_checkpoints(folder.checkpoints) else " There is no checkpoint to check."
        return Verdict(True, count, None, f"Verified: {share}, gave the same bits.{unchecked}", warning)
    message = f"Not verified ({share}). {difference}"
    if seed is None and ":" in experiment.env.id:
        message += (
            f" lockstep check-env {experiment.env.id} tells whether the environment is the cause (with the run's "
            "--env flags)."
        )
    return Verdict(False, count, difference, message, warning)


def diff(run_a: str | Path, run_b: str | Path) -> Difference | None:
    """The first difference between two runs' ledgers, with the settings that differ, or None.

    Raises:
        LedgerError: a ledger is missing or damaged.
        SettingsError: a run does not exist.
    """
    (head_a, lines_a), (head_b, lines_b) = (ledger.read(RunFolder.open(run).ledger) for run in (run_a, run_b))
    return ledger.compare(head_a, lines_a, head_b, lines_b)


def _iterations(asked: int | Literal["all"] | None, recorded: int, folder: RunFolder) -> int:
    if recorded == 0:
        raise SettingsError(f"The ledger of {folder.path} records no iteration yet, so there is nothing to verify.")
    if asked is None or asked == "all":
        return min(DEFAULT_ITERATIONS, recorded) if asked is None else recorded
    if not (isinstance(asked, int) and 1 <= asked <= recorded):
        raise SettingsError(
            f"--iterations {asked} is not possible: {folder.path} records {recorded}. Give a number from 1 to "
            f"{recorded}, or all."
        )
    return asked


def _rerun(
    folder: RunFolder,
    experiment: Experiment,
    layout: Layout,
    count: int,
    head: dict[str, Any],
    lines: list[dict[str, Any]],
    workdir: str | Path | None,
) -> Difference | None:
    scratch = Path(tempfile.mkdtemp(prefix="lockstep-verify-", dir=workdir))
    try:
        options = RunOptions(
            run=str(scratch / "run"),
            display="none",
            tensorboard=False,
            checkpoint_every=count,
            keep_checkpoints=1,
            on_nonfinite="continue",  # repeat all requested iterations
        )
        schedule = recorded_schedule(experiment, lines[:count], folder.path)
        result = launch(experiment, layout, options, stop_after=count, recorded=schedule, weights=folder.weights)
        if result.stopped:
            raise KeyboardInterrupt
        repeated = RunFolder(scratch / "run")
        again, scores = ledger.read(repeated.ledger), _scores(repeated)
    finally:
        shutil.rmtree(scratch)
    difference = ledger.compare(head, lines, *again, iterations=count) or _other_scores(_scores(folder), scores)
    recorded = checkpoint_digest(checkpoint.checkpoint_path(folder.checkpoints, count))
    if difference is None and recorded not in (None, result.digest):
        return Difference(count - 1, "digest of the state afterwards", str(recorded), result.digest)
    return difference


def _scores(folder: RunFolder) -> dict[tuple[int, str], float | None]:
    """The scores of training episodes in metrics.jsonl, by iteration and name; empty if there is none."""
    lines: list[dict[str, float | None]] = []
    with contextlib.suppress(OSError, SettingsError):  # damage is reported elsewhere
        lines = folder.records()
    return {
        (int(line["iteration"] or 0), name): line[name] for line in lines for name in line if name.startswith(_SCORES)
    }


def _other_scores(
    recorded: dict[tuple[int, str], float | None], again: dict[tuple[int, str], float | None]
) -> Difference | None:
    """The first score in metrics.jsonl that differs from the repetition."""
    for done, name in sorted(recorded.keys() & again.keys()):
        a, b = recorded[done, name], again[done, name]
        if a != b:
            return Difference(done - 1, f"{name} in metrics.jsonl", str(a), str(b))
    return None


def checkpoint_digest(path: Path) -> str | None:
    """The `digest:` of a checkpoint, computed from its tensors; None if the checkpoint has been deleted."""
    if not path.is_dir():
        return None
    tensors, _ = checkpoint.open_checkpoint(path, only=("learner",)).part("learner")
    covered = ("parameter.", "target.", "optimizer.", "in_flight.", "adapted.", "normalizer.", "curriculum")
    return state_digest({name: tensor for name, tensor in tensors.items() if name.startswith(covered)})
