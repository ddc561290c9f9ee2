"""The job that every process of a run receives, and the run's result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.core.schedule import Recorded, Schedule
from lockstep.experiment import Experiment
from lockstep.run.checkpoint import Checkpoint, open_checkpoint
from lockstep.run.folder import RunFolder
from lockstep.training.callbacks import CallbackLike


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    run: Path
    """The run's folder."""
    digest: str
    """SHA-256 over parameters, normalizers and optimizer state: equal for equal experiments on any layout."""
    iterations: int
    """Iterations done."""
    score: float | None
    """Mean raw score of the last 100 training episodes; None before the first episode ends."""
    stopped: bool
    """Whether a signal ended the run before total_steps. resume continues it."""

    def metrics(self) -> dict[str, np.ndarray]:
        """The lines of metrics.jsonl as columns: float64 [lines] by name, NaN where a line does not have the number.
        `pandas.DataFrame(result.metrics())` makes a table of them."""
        lines = RunFolder(self.run).records()
        names = dict.fromkeys(name for line in lines for name in line)
        return {name: np.array([line.get(name) for line in lines], np.float64) for name in names}


@dataclass(frozen=True)
class Job:
    """The job that every worker receives."""

    folder: RunFolder
    experiment: Experiment
    layout: Layout
    options: RunOptions
    checkpoint: Path | None = None
    stop_after: int | None = None
    recorded: Recorded | None = None
    """The recorded timing decisions to repeat, if the run repeats another one."""

    on_iteration: CallbackLike | None = None
    """The callback that replaces the one that the options name."""
    repeats: bool = False
    """Whether the run repeats another one, as for lockstep verify and replay, so that no advice for new runs is given.
    """

    @property
    def callback(self) -> CallbackLike | str | None:
        """The run's callback, or its name; None if there is none."""
        return self.options.callback if self.on_iteration is None else self.on_iteration

    def saved(self) -> Checkpoint | None:
        """The checkpoint to continue from, if there is one. This does not read its parts."""
        return None if self.checkpoint is None else open_checkpoint(self.checkpoint, only=())

    @property
    def begin(self) -> int:
        """Iterations done when the run begins or continues."""
        saved = self.saved()
        return 0 if saved is None else saved.iteration

    @property
    def environments_each(self) -> int:
        """The approximate number of environments of a collecting process."""
        return self.layout.environments_each(self.experiment.env.num_envs)

    @property
    def schedule(self) -> Schedule:
        """The recorded schedule if the run repeats another one, else the experiment's."""
        return self.recorded or self.experiment.schedule()

    @property
    def stops(self) -> bool:
        """Whether non-finite numbers end the run."""
        return self.options.on_nonfinite == "stop"

    @property
    def collects_freely(self) -> bool:
        """Whether collectors run freely: with lag async, unless the run repeats a record."""
        return self.experiment.scheme.free_running and self.recorded is None
