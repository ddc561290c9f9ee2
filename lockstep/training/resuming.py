"""Finds the checkpoint that a run continues from, and checks that it can continue."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.run import checkpoint, ledger
from lockstep.run import metrics as rows
from lockstep.run.consistency import checkpoint_difference, edited_settings, require_same_arithmetic
from lockstep.run.folder import RunFolder
from lockstep.run.platform import this_platform
from lockstep.system.output import print_warning


def resumable(folder: RunFolder, name: str | int | None, experiment: Experiment) -> checkpoint.Checkpoint | None:
    """The checkpoint to resume from, checked for damage; None if the run ended before its first one and starts again.
    Newer checkpoints are set aside.

    Raises:
        SettingsError: the run cannot continue from this checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    directory = folder.checkpoints
    checkpoint.recover(directory)
    if name in (None, "latest") and not checkpoint.list_checkpoints(directory):
        with contextlib.suppress(ledger.LedgerError):  # a run that was killed at its start may have an incomplete one
            head, _ = ledger.read(folder.ledger, 0)
            if head["experiment"] not in folder.experiment().identities():
                _require_unedited(folder, head)
        folder.begin_again(experiment)
        return None
    path = checkpoint.find(directory, name)
    saved = checkpoint.open_checkpoint(path)
    _require_memory(experiment, saved.iteration)
    head, line = ledger.read_last(folder.ledger, saved.iteration)
    _require_unedited(folder, head)
    require_same_arithmetic(folder, head)
    foreign = checkpoint_difference(saved, line)
    if foreign is not None:
        raise SettingsError(
            f"{path} is not a checkpoint of the run that {folder.ledger} records: {foreign} Resume from another one "
            "with --checkpoint."
        )
    if not rows.sealed(folder, saved) and (wrong := rows.fault(folder, saved.iteration, [path])):
        print_warning(
            f"{folder.metrics} is damaged. {wrong} The checkpoint is intact, so the run continues. The "
            f"damaged file is kept as {folder.metrics.name}.damaged, and all readable rows are copied to a new file. "
            "Only a copy of the file can restore the lost rows; lockstep verify will name them."
        )
    checkpoint.set_aside_newer(directory, saved.iteration)
    return saved


def _require_unedited(folder: RunFolder, head: dict[str, Any]) -> None:
    edited = edited_settings(folder, head)
    if edited is not None:
        raise SettingsError(
            f"{folder.path} cannot continue with settings that differ from those in its ledger: {edited} "
            "Restore experiment.json from a copy, or train with the new settings in another folder."
        )


def _require_memory(experiment: Experiment, begin: int) -> None:
    """Raise SettingsError if checkpoints do not contain the replay memory, and the run ends before it is refilled."""
    config = experiment.algorithm
    if not config.resumes_exactly and begin < experiment.iterations:
        warm = config.build().warm_iterations(experiment.samples_per_iteration)
        if begin + warm >= experiment.iterations:
            raise SettingsError(
                f"The run has {experiment.iterations - begin} iterations left, but needs {warm} iterations to refill "
                "its replay memory, which checkpoints do not contain (algorithm.replay.no-checkpoint), so it would "
                "learn nothing more. Use its newest checkpoint, or train it again."
            )


def other_platform(folder: RunFolder, layout: Layout) -> tuple[str, ...]:
    """The differences between the platform (with users' files) that the run started with and this one with the layout's
    devices. Prints a warning if there are any."""
    head, _ = ledger.read(folder.ledger, 0)
    differs = ledger.differing_platform(head["platform"], this_platform(head["settings"], layout))
    if differs:
        warn_of_platform(differs)
    return differs


def warn_of_platform(differs: Sequence[str]) -> None:
    """Print a warning that these entries of the platform have changed since the run started."""
    print_warning(
        f"{ledger.platform_or_code(differs)} has changed since the run started, so the run may end with "
        f"different bits than on the original platform. Recorded and present: {'; '.join(differs)}."
    )
