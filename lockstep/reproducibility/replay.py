"""Repeats a run with all recorded timing decisions on any layout. The repetition ends with the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.core.schedule import Recorded, Schedule
from lockstep.experiment import Experiment
from lockstep.launchers.launch import launch
from lockstep.reproducibility.devices import layout_to_repeat
from lockstep.run import ledger
from lockstep.run.consistency import edited_settings, platform_warning, require_same_arithmetic
from lockstep.run.folder import RunFolder
from lockstep.run.ledger import Difference, LedgerError
from lockstep.transport.free_running import Pace


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    ok: bool
    """Whether every recorded digest was reproduced."""
    run: Path
    """The folder of the repetition."""
    digest: str
    """The digest of the repetition's final state."""
    iterations: int
    """Iterations that were repeated."""
    difference: Difference | None
    """The first difference between the ledgers; None if there is none."""
    stopped: bool
    """Whether it was interrupted before all recorded iterations were repeated."""
    warning: str | None = None
    """Set if the run was made or resumed on another platform, or if its experiment does not promise identical bits.
    This may explain a difference."""


def require_memory(folder: RunFolder, experiment: Experiment, iterations: int) -> None:
    """Raise SettingsError if this many iterations cannot be repeated because a resume began with an empty replay
    memory."""
    if experiment.algorithm.resumes_exactly:
        return
    resumed = [each["iteration"] for each in folder.facts().get("resumed", []) if each.get("iteration")]
    if resumed and min(resumed) < iterations:
        raise SettingsError(
            f"{folder.path} was resumed after {min(resumed)} iterations without its replay memory, which its "
            "checkpoints do not contain (algorithm.replay.no-checkpoint). Only the iterations before that can be "
            f"repeated: lockstep verify {folder.quoted} --iterations {min(resumed)}"
        )


def recorded_schedule(experiment: Experiment, lines: list[dict[str, Any]], of: Path) -> Recorded | None:
    """The timing decisions in the ledger of the run in folder `of`; None if timing decides nothing in the experiment.

    Raises:
        LedgerError: no run could have made these decisions, so that repeating them could take forever.
    """
    scheme, schedule = experiment.scheme, experiment.schedule()
    if not scheme.timing_decides:
        return None
    if scheme.free_running:
        _check_events(experiment, schedule, lines)
    if scheme.preempt < 1:
        _check_cuts(experiment, lines)
    if scheme.gradient_lag == "async":
        _check_updates(experiment, lines)
    events, cuts, updates = (
        tuple(line[name] for line in lines if name in line) for name in ("events", "cuts", "updates")
    )
    return Recorded(
        schedule.lag,
        schedule.iterations,
        schedule.shards,
        schedule.by_shard,
        events,
        str(of),
        cuts=cuts,
        updates=updates,
    )


def _check_events(experiment: Experiment, schedule: Schedule, lines: list[dict[str, Any]]) -> None:
    pace, number = Pace.of(experiment), dict.fromkeys(range(schedule.shards), 0)
    rollout = experiment.algorithm.rollout
    for iteration, line in enumerate(lines):
        with _decided(iteration):
            for event in line["events"]:
                shard, acting = event["shard"], event["versions"]
                steps, versions = [step for step, _ in acting], [version for _, version in acting]
                in_order = event["rollout"] == number.get(shard) and steps[:1] == [0]
                noisy = isinstance(event.get("noise", 0), int)
                known = iteration - schedule.lag <= versions[0] and versions[-1] <= iteration if versions else False
                if not (in_order and noisy and known and versions == sorted(versions) and _increasing(steps, rollout)):
                    raise _undecidable(iteration, event)
                number[shard] += 1
            if not pace.least(iteration) <= sum(number.values()) <= pace.most(iteration):
                raise _undecidable(iteration, f"{len(line['events'])} rollouts")


def _increasing(steps: list[int], below: int) -> bool:
    return all(isinstance(step, int) and 0 <= step < below for step in steps) and steps == sorted(set(steps))


def _check_cuts(experiment: Experiment, lines: list[dict[str, Any]]) -> None:
    scheme, steps = experiment.scheme, range(1, experiment.algorithm.rollout)
    for iteration, line in enumerate(lines):
        with _decided(iteration):
            shards = [shard for shard, cut in line["cuts"] if shard in range(scheme.shards) and cut in steps]
            if shards != sorted(set(shards)) or not len(line["cuts"]) == len(shards) < scheme.shards:
                raise _undecidable(iteration, f"cuts {line['cuts']}")


def _check_updates(experiment: Experiment, lines: list[dict[str, Any]]) -> None:
    scheme, config, samples = experiment.scheme, experiment.algorithm, experiment.samples_per_iteration
    algorithm = config.build()
    for iteration, line in enumerate(lines):
        with _decided(iteration):
            steps = algorithm.updates_in(iteration, samples)
            last, taken = dict.fromkeys(range(scheme.shards), -1), dict.fromkeys(range(scheme.shards), 0)
            for place, (slot, behind) in enumerate(line["updates"]):
                # A slot's next gradient does not begin before its previous one has been applied.
                if slot not in last or not 0 <= behind <= scheme.max_gradient_lag or place - behind <= last[slot]:
                    raise _undecidable(iteration, f"update {place} is {[slot, behind]}")
                last[slot], taken[slot] = place, taken[slot] + 1
            least = steps if config.replays else 1  # other algorithms may stop early
            if not all(least <= number <= steps for number in taken.values()):
                raise _undecidable(iteration, f"{len(line['updates'])} updates")


@contextlib.contextmanager
def _decided(iteration: int) -> Iterator[None]:
    """For reading a line of the ledger: raise LedgerError if an entry is missing or has a wrong type."""
    try:
        yield
    except LedgerError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise _undecidable(iteration, f"{type(error).__name__}: {error}") from error


def _undecidable(iteration: int, what: object) -> LedgerError:
    return LedgerError(
        f"The ledger records an impossible decision in iteration {iteration}: {what}. The ledger or experiment.json "
        "was edited: restore both from a copy.",
        iteration,
    )


def replay(
    run: str | Path, layout: Layout | str | None = None, options: RunOptions | str | Path | None = None
) -> Replay:
    """Repeat all recorded iterations of a run.

    Args:
        run: the run's folder.
        layout: the layout of the repetition. The recorded decisions must allow it, and it must have the run's kinds of
            device. Default: auto, or the smallest layout with the run's kinds of device if it used GPUs.
        options: the repetition's folder and display; a text or a path is its folder.

    Raises:
        SettingsError: the run does not exist, nothing is recorded, GPUs computed it and this machine has none, or it
            was computed in another version of portable arithmetic.
        LedgerError: its ledger is damaged.
        WorkerError: the repetition failed.
    """
    folder = RunFolder.open(run)
    experiment = folder.experiment()
    head, lines = ledger.read(folder.ledger)
    if not lines:
        raise SettingsError(f"The ledger of {folder.path} records no iteration yet, so there is nothing to replay.")
    edited = edited_settings(folder, head)
    if edited is not None:
        raise SettingsError(f"{folder.path} contradicts its own ledger: {edited} Restore experiment.json from a copy.")
    require_same_arithmetic(folder, head)
    require_memory(folder, experiment, len(lines))
    recorded = recorded_schedule(experiment, lines, folder.path)
    layout = layout_to_repeat(folder, head, Layout.of(layout))
    result = launch(
        experiment,
        layout,
        dataclasses.replace(RunOptions.of(options), on_nonfinite="continue"),  # repeat all iterations of the run
        stop_after=len(lines),
        recorded=recorded,
        weights=folder.weights,
    )
    again = ledger.read(RunFolder(result.run).ledger)
    difference = ledger.compare(head, lines, *again, iterations=result.iterations)
    stopped = result.iterations < len(lines)
    same = difference is None and not stopped
    warning = platform_warning(folder, head, layout)
    return Replay(same, result.run, result.digest, result.iterations, difference, stopped, warning)
