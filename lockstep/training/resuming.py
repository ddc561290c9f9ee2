"""From where a run continues, and whether it can."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
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


def resumable(folder: RunFolder, name: str | int | None, experiment: Experiment) -> Path | None:
    """The checkpoint to resume from, checked for damage; None if the run ended before its first one and starts again.
    Newer checkpoints are set aside."""
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
            f"{folder.metrics} is damaged. {wrong} What was learned is intact, so the run continues. The "
            f"damaged file is kept as {folder.metrics.name}.damaged, with every row that can be read copied over. "
            "Only a copy of the file can restore the lost rows; lockstep verify will name them."
        )
    checkpoint.set_aside_newer(directory, saved.iteration)
    return path


def _require_unedited(folder: RunFolder, head: dict[str, Any]) -> None:
    edited = edited_settings(folder, head)
    if edited is not None:
        raise SettingsError(
            f"{folder.path} cannot continue as another experiment than the one that its ledger records: {edited} "
            "Restore experiment.json from a copy, or train with the new settings in another folder."
        )


def _require_memory(experiment: Experiment, begin: int) -> None:
    """Raise SettingsError if the replay memory, which checkpoints do not hold, cannot be refilled before the run
    ends."""
    config = experiment.algorithm
    if not config.resumes_exactly and begin < experiment.iterations:
        warm = config.build().warm_iterations(experiment.samples_per_iteration)
        if begin + warm >= experiment.iterations:
            raise SettingsError(
                f"The run has {experiment.iterations - begin} iterations left, but would need {warm} of them to "
                "refill its replay memory, which checkpoints do not hold (algorithm.replay.no-checkpoint), and would "
                "learn nothing more. Use what it has learned, or train it again."
            )


def other_platform(folder: RunFolder, layout: Layout) -> tuple[str, ...]:
    """Differences between this platform, with the layout's devices, or users' files and those that the run started
    with; prints a warning if any."""
    head, _ = ledger.read(folder.ledger, 0)
    differs = ledger.differing_platform(head["platform"], this_platform(head["settings"], layout))
    if differs:
        warn_of_platform(differs)
    return differs


def warn_of_platform(differs: Sequence[str]) -> None:
    """Print that a run goes on where these entries of the platform are not what they were when it started."""
    print_warning(
        f"{ledger.platform_or_code(differs)} is not what it was when the run started, so the run may end "
        f"with different bits than on the original platform. Recorded and present: {'; '.join(differs)}."
    )
