"""Repeating a run, whatever timing decided in it, on any layout: it ends with the same bits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import ledger
from lockstep.clock import Clock, Recorded
from lockstep.experiment import Experiment
from lockstep.layout import Layout
from lockstep.ledger import Difference
from lockstep.run import RunFolder, RunOptions
from lockstep.settings import SettingsError


@dataclass(frozen=True)
class Replay:
    """What replay found."""

    ok: bool
    """Whether every recorded digest came out again."""
    run: Path
    """The folder of the repetition."""
    digest: str
    """Of the repetition's final state."""
    iterations: int
    difference: Difference | None


def recorded_clock(experiment: Experiment, lines: list[dict[str, Any]]) -> Recorded | None:
    """The decisions in a ledger's lines; None for an experiment in which timing decides nothing."""
    if not experiment.scheme.free_running:
        return None
    clock = Clock.of(experiment)
    return Recorded(clock.lag, clock.iterations, clock.shards, tuple(line["events"] for line in lines))


def replay(run: str | Path, layout: Layout | None = None, options: RunOptions | None = None) -> Replay:
    """Repeat all recorded iterations of a run.

    Args:
        run: its folder.
        layout: of the repetition: inline (also the default) or split.
        options: where the repetition is kept and how it is shown.

    Raises:
        SettingsError: there is no such run, or nothing is recorded.
        LedgerError: its ledger is damaged.
        WorkerError: the repetition failed.
    """
    from lockstep.train import train

    folder = RunFolder.open(run)
    experiment = folder.experiment()
    head, lines = ledger.read(folder.ledger)
    if not lines:
        raise SettingsError(f"The ledger of {folder.path} records no iteration yet: there is nothing to replay.")
    recorded = recorded_clock(experiment, lines)
    result = train(experiment, layout, options, stop_after=len(lines), recorded=recorded)
    again = ledger.read(RunFolder(result.run).ledger)
    difference = ledger.compare(head, lines, *again, iterations=None if result.stopped else len(lines))
    (result.run / "replay.json").write_text(json.dumps({"of": str(folder.path.resolve())}) + "\n", encoding="utf-8")
    return Replay(difference is None, result.run, result.digest, result.iterations, difference)
