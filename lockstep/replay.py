"""Repeating a run, whatever timing decided in it, on any layout: it ends with the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import ledger
from lockstep.clock import Clock, Recorded
from lockstep.experiment import Experiment
from lockstep.freerun import Pace
from lockstep.layout import Layout
from lockstep.ledger import Difference, LedgerError
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


def recorded_clock(experiment: Experiment, lines: list[dict[str, Any]], of: Path) -> Recorded | None:
    """The decisions in the ledger of the run in `of`; None for an experiment in which timing decides nothing.

    Raises:
        LedgerError: they are none that a run could have made: to repeat them could take for ever.
    """
    if not experiment.scheme.free_running:
        return None
    clock, pace = Clock.of(experiment), Pace.of(experiment)
    number = dict.fromkeys(range(clock.shards), 0)
    for iteration, line in enumerate(lines):
        for event in line["events"]:
            shard, acting = event["shard"], event["versions"]
            in_order = event["rollout"] == number.get(shard) and acting and acting[0][0] == 0
            if not in_order or not iteration - clock.lag <= acting[0][1] <= acting[-1][1] <= iteration:
                raise _undecidable(iteration, event)
            number[shard] += 1
        if not pace.least(iteration) <= sum(number.values()) <= pace.most(iteration):
            raise _undecidable(iteration, f"{len(line['events'])} rollouts")
    events = tuple(line["events"] for line in lines)
    return Recorded(clock.lag, clock.iterations, clock.shards, clock.by_shard, events, str(of))


def _undecidable(iteration: int, what: object) -> LedgerError:
    return LedgerError(
        f"The ledger records for iteration {iteration} what cannot have been decided: {what}. It was edited, or "
        "experiment.json was: restore both from a copy.",
        iteration,
    )


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
    recorded = recorded_clock(experiment, lines, folder.path)
    result = train(experiment, layout, options, stop_after=len(lines), recorded=recorded)
    again = ledger.read(RunFolder(result.run).ledger)
    difference = ledger.compare(head, lines, *again, iterations=None if result.stopped else len(lines))
    return Replay(difference is None, result.run, result.digest, result.iterations, difference)
