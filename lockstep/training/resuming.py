"""From where a run goes on, and whether it can."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.run import checkpoint, ledger
from lockstep.run import metrics as rows
from lockstep.run.consistency import checkpoint_difference, edited_settings
from lockstep.run.folder import RunFolder
from lockstep.run.platform import this_platform
from lockstep.system.output import tell


def resumable(folder: RunFolder, name: str | int | None, experiment: Experiment) -> Path | None:
    """The checkpoint to resume from, found intact; None if the run ended before its first one, and starts again. Newer
    ones are set aside."""
    directory = folder.checkpoints
    checkpoint.recover(directory)
    if name in (None, "latest") and not checkpoint.list_checkpoints(directory):
        with contextlib.suppress(ledger.LedgerError):  # a run that was killed as it began may have no whole one
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
    foreign = checkpoint_difference(saved, line)
    if foreign is not None:
        raise SettingsError(
            f"{path} is no checkpoint of what {folder.ledger} records: {foreign} Resume from another one with "
            "--checkpoint."
        )
    if not rows.sealed(folder, saved) and (wrong := rows.fault(folder, saved.iteration, [path])):
        tell(
            f"warning: {folder.metrics} is damaged. {wrong} What was learned is intact, so the run goes on. The "
            f"damaged file is kept as {folder.metrics.name}.damaged, and every row that can be read stays. What is "
            "lost can only come from a copy of the file; lockstep verify will name it.",
            sys.stderr,
        )
    checkpoint.set_aside_newer(directory, saved.iteration)
    return path


def _require_unedited(folder: RunFolder, head: dict[str, Any]) -> None:
    edited = edited_settings(folder, head)
    if edited is not None:
        raise SettingsError(
            f"{folder.path} cannot go on as another experiment than the one that its ledger records: {edited} Restore "
            "experiment.json from a copy, or train with the new settings in another folder."
        )


def _require_memory(experiment: Experiment, begin: int) -> None:
    """Raise SettingsError if memory, which checkpoints do not hold, cannot be filled again before the run ends."""
    config = experiment.algorithm
    if not config.resumes_exactly and begin < experiment.iterations:
        warm = config.build().warm_iterations(experiment.samples_per_iteration)
        if begin + warm >= experiment.iterations:
            raise SettingsError(
                f"The run has {experiment.iterations - begin} iterations left, and would fill its memory for {warm} of "
                "them, since checkpoints do not hold it (algorithm.replay.no-checkpoint): it would learn no more. Use "
                "what it has learned, or train it anew."
            )


def other_platform(folder: RunFolder) -> tuple[str, ...]:
    """What of this platform, or of users' files, is not as it was when the run was started; says so if anything is."""
    head, _ = ledger.read(folder.ledger, 0)
    differs = ledger.differing_platform(head["platform"], this_platform(head["settings"]))
    if differs:
        tell(
            f"warning: {ledger.platform_or_code(differs)} is not what it was when the run was started, so the run may "
            f"end with other bits than it would have had. Recorded and present: {'; '.join(differs)}.",
            sys.stderr,
        )
    return differs
