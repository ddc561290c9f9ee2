"""`lockstep bench`: how close training comes to the machine's limit, and what takes the rest."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config.layout import Layout
from lockstep.experiment import Experiment
from lockstep.launchers.auto import chosen
from lockstep.speed.parts import OVERHEAD, PARTS, Costs, PartsWorkers, limit, parts_of
from lockstep.speed.trial import Trial
from lockstep.system.machine import cores
from lockstep.training.prepare import check, prepare

_LOOK = 1.0
"""Seconds to observe the load of other programs before the measurement."""
_BUSY = 0.25
"""Above this load of other programs, as a share of the cores, absolute numbers mean little."""


@dataclass(frozen=True)
class Round:
    """One round of measurements, taken in turn."""

    costs: Costs
    samples_per_second: float
    limit: float
    shares: dict[str, float]
    """Shares of the processes' time by activity, averaged over processes. Empty after too few iterations."""

    @property
    def fraction_of_limit(self) -> float:
        return self.samples_per_second / self.limit

    def lost(self, processes: int) -> dict[str, float]:
        """Shares of the processes' time spent outside the parts, by cause.

        A negative share is hidden time: environments stepped at the same time in separate threads or processes.
        """
        if not self.shares:
            return {}
        share, busy = self.shares, self.samples_per_second / processes
        optimizer, reduction = (busy * getattr(self.costs, part) for part in OVERHEAD)
        learning = share["learning"] - busy * self.costs.learning
        return {
            "waiting": share["waiting"],
            "collecting": share["env"] + share["inference"] - busy * (self.costs.env + self.costs.inference),
            "optimizer": optimizer,
            "reduction": reduction,
            "learning": learning - optimizer - reduction,
            "delivery": share["other"],
            "recording": share["recording"],
        }

    def taken(self, part: str, processes: int) -> float:
        """The least share of the processes' time that a part can take."""
        return self.samples_per_second / processes * getattr(self.costs, part)


CAUSES = {
    "waiting": "waiting for other processes and exchanging data with them",
    "collecting": "overhead of environments and inference: copies, bookkeeping, noise",
    "optimizer": "optimizer steps",
    "reduction": "adding up a process's own gradients",
    "learning": "overhead of the loss: targets, gathering minibatches, digests of gradients",
    "delivery": "digests of rollouts, statistics, messages, publishing parameters",
    "recording": "metrics and ledger, while the others wait",
}
"""Causes of lost time."""


@dataclass(frozen=True)
class Report:
    """All rounds of one experiment under one layout."""

    layout: Layout
    cores: int
    load: float
    """The load of other programs before the measurement, in cores."""
    measuring: int
    """Processes that measured the parts at the same time."""
    rounds: tuple[Round, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The members of PARTS that the experiment has."""
        return tuple(part for part in PARTS if any(getattr(each.costs, part) for each in self.rounds))

    def spread(self, of: Callable[[Round], float]) -> dict[str, float]:
        """Median, minimum and maximum over the rounds."""
        values = [of(each) for each in self.rounds]
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    def lost(self) -> dict[str, dict[str, float]]:
        """The share of the processes' time that is lost to each cause."""
        rounds = [lost for each in self.rounds if (lost := each.lost(self.layout.processes))]
        return {
            cause: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for cause in (rounds[0] if rounds else {})
            for values in [[lost[cause] for lost in rounds]]
        }

    def taken(self) -> dict[str, dict[str, float]]:
        """The least share of the processes' time that each part can take."""
        count = self.layout.processes
        return {part: self.spread(lambda each, p=part: each.taken(p, count)) for part in self.parts}

    def to_json(self) -> dict[str, Any]:
        """Medians at the top level, minimum and maximum below `spread`."""
        figures = {
            "samples_per_second": self.spread(lambda each: each.samples_per_second),
            "limit": self.spread(lambda each: each.limit),
            "fraction_of_limit": self.spread(lambda each: each.fraction_of_limit),
        }
        measured = (*self.parts, *OVERHEAD)
        parts = {part: self.spread(lambda each, p=part: 1e6 * getattr(each.costs, p)) for part in measured}
        return {
            **{name: values["median"] for name, values in figures.items()},
            "layout": str(self.layout),
            "spread": figures,
            "microseconds_per_sample": parts,
            "taken": self.taken(),
            "lost": self.lost(),
            "processes_measuring": self.measuring,
            "load_of_others": self.load,
            "rounds": [asdict(each) for each in self.rounds],
        }

    def table(self) -> str:
        """The report as text."""
        rows: list[tuple[str, ...]] = [("", "median", "min", "max")]
        workers = self.measuring
        for part in self.parts:
            cost = self.spread(lambda each, p=part: 1e6 * getattr(each.costs, p))
            rows.append(_row(f"{PARTS[part]}, µs a sample", cost, "{:.1f}"))
        rows.append(_row("limit, samples/s", self.spread(lambda each: each.limit), "{:,.0f}"))
        rows.append(_row("reached, samples/s", self.spread(lambda each: each.samples_per_second), "{:,.0f}"))
        rows.append(_row("reached of the limit", self.spread(lambda each: each.fraction_of_limit), "{:.2f}"))
        text = f"{self.layout}: parts measured alone, in {workers} process{'es' * (workers > 1)} at once\n\n"
        text += _aligned(rows)
        lost = self.lost()
        if lost:
            for what, shares in (("taken by", self.taken()), ("lost to", lost)):
                rows = [(f"share of the processes' time {what}", "median", "min", "max")]
                rows += [_row({**PARTS, **CAUSES}[name], values, "{:.1%}") for name, values in shares.items()]
                text += "\n\n" + _aligned(rows)
        return text


def _row(name: str, values: dict[str, float], pattern: str) -> tuple[str, ...]:
    return (name, *(pattern.format(values[key]) for key in ("median", "min", "max")))


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        row[0].ljust(widths[0])
        + "".join(cell.rjust(width + 2) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def load_of_others(cores: int, say: Callable[[str], None]) -> float:
    """Cores that other running programs keep busy, observed for a second; prints a warning if they are many."""
    before = _busy_seconds()
    time.sleep(_LOOK)
    after = _busy_seconds()
    load = os.getloadavg()[0] if before is None or after is None else (after - before) / _LOOK
    if load > _BUSY * cores:
        say(
            f"warning: other programs keep {load:.1f} of this machine's {cores} cores busy. Results measured in turn "
            "are comparable with each other, but absolute numbers mean little."
        )
    return load


def _busy_seconds() -> float | None:
    """Seconds that this process's cores have been busy since the machine started. None if the system hides it."""
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    # user, nice, system, idle, iowait, irq, softirq, steal
    busy = sum(int(number) for name, *of in lines if name in mine for number in (*of[:3], *of[5:8]))
    return busy / os.sysconf("SC_CLK_TCK")


def bench(
    experiment: Experiment,
    layout: Layout,
    *,
    rounds: int = 3,
    seconds: float = 3.0,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure, in turn over several rounds, each part alone and real training.

    Args:
        experiment: as for train.
        layout: as for train; the measurement loads as many cores as training. auto prints its choice.
        seconds: to measure each part in each round; training runs twice as long, and at least three iterations.
        say: prints progress.

    Raises:
        SettingsError: as in train.
        WorkerError: a process failed.
    """
    layout = chosen(layout, experiment)
    experiment, available = prepare(experiment, layout), cores()
    check(experiment, layout)  # before many processes are started
    load = load_of_others(available, say)
    say(f"starting the processes that measure the parts, and training with {layout} (first iterations left out) …")
    workers, parts = PartsWorkers(experiment, layout, available), parts_of(experiment)
    trial = None
    try:
        trial = Trial(experiment, layout)
        workers.ready()
        first = trial.run(0.0, iterations=1 + trial.settling)
        pace = first.lines[-1][0] - first.lines[-2][0] if len(first.lines) > 1 else first.seconds
        training = max(2 * seconds, 3 * pace)
        say(f"{rounds} rounds of about {(len(parts) + 0.2) * seconds + training:.0f} s each")
        measured = []
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}: {', '.join(parts)}, each alone …")
            costs = workers.costs(seconds)
            bound = limit(experiment, layout, costs, available).rate
            say(f"round {number} of {rounds}: limit {bound:,.0f} samples/s; now real training …")
            slot = trial.run(2 * seconds, iterations=3)
            measured.append(Round(costs, slot.rate, bound, slot.shares()))
            say(f"round {number} of {rounds}: {slot.rate:,.0f} samples/s, {slot.rate / bound:.2f} of the limit")
    finally:
        workers.close()
        if trial is not None:
            trial.close()
    return Report(layout, available, load, len(workers), tuple(measured))
