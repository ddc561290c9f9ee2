"""`lockstep compare`: whether one set of runs is better than another, and how certain that is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.evaluation.statistics import Estimate, Scores, estimate, iqm, probability_of_improvement, readable
from lockstep.reports import page
from lockstep.reports.findings import diverged, few, protocol
from lockstep.reports.page import Section
from lockstep.reports.report import read_runs, write_page
from lockstep.reports.runs import (
    TASK,
    X_LABELS,
    Method,
    Run,
    at_equal_budget,
    differing,
    eased,
    held_back,
    labels,
    listed,
    other_rules,
    seeds_again,
    tasks,
)
from lockstep.reports.scales import scale_of


@dataclass(frozen=True)
class Contrast:
    """Two sets of runs on one task or on several."""

    task: str
    a: Estimate | None
    """Interquartile mean over the runs of the first set; over several tasks, of normalized scores, or None."""
    b: Estimate | None
    difference: Estimate | None
    """a − b, with runs drawn independently from both sets."""
    improvement: Estimate
    """Probability that a run of a scores higher than a run of b on the same task."""
    budget: float | None = None
    """The x at which runs are compared: the least that any of them reached. None for several tasks."""
    scores_a: tuple[float, ...] = ()
    scores_b: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The results of compare."""

    metric: str
    x: str
    tasks: tuple[Contrast, ...]
    overall: Contrast | None
    """Over all tasks; None if there is one."""
    notes: tuple[str, ...]
    """Caveats."""
    protocol: str = ""
    """The protocol of the scores, if the metric is a score."""

    @property
    def rows(self) -> tuple[Contrast, ...]:
        """Each task, then all of them together."""
        return (*self.tasks, self.overall) if self.overall else self.tasks

    def at(self, contrast: Contrast) -> str:
        """The budget in words."""
        if contrast.budget is None:
            return ""
        return f"{readable(contrast.budget)} s" if self.x == "time" else f"{contrast.budget:,.0f}"

    def __str__(self) -> str:
        lines = [f"{self.metric} at equal {X_LABELS[self.x].lower()}: interquartile mean over runs (95% interval)"]
        lines += [self.protocol] if self.protocol else []
        for each in self.rows:
            at = self.at(each)
            lines.append(f"{each.task} at {at}" if at else each.task)
            named = {"A": each.a, "B": each.b, "A - B": each.difference, "P(A > B)": each.improvement}
            lines += [f"  {name:<8}  {value}" for name, value in named.items() if value is not None]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """All results as JSON values."""
        return dataclasses.asdict(self)


def compare(
    a: Path | str | Sequence[Path | str],
    b: Path | str | Sequence[Path | str],
    *,
    metric: str = "score/mean",
    x: str = "samples",
    out: Path | str | None = None,
) -> Comparison:
    """Compare two sets of runs, task by task and over the tasks that both have.

    Runs are compared at an equal budget: the largest x that all runs of a task reached, so that longer runs have no
    advantage.

    Args:
        a: run folders of the first set.
        b: run folders of the second.
        metric: name in metrics.jsonl that counts as the score; higher is better.
        x: samples, frames, updates or time: the budget's axis.
        out: also write a page like that of report, with the curves of both sets; its name ends in .html.

    Raises:
        SettingsError: a set is empty, a folder is not a run, the sets have no common task, or a run lacks the metric.
    """
    if x not in X_LABELS:
        raise SettingsError(f"Unknown --x {x!r}. Choose one of {', '.join(X_LABELS)}.")
    a, b = listed(a), listed(b)
    if not a or not b:
        raise SettingsError(
            "compare needs two sets of runs, with -- between them: lockstep compare runs/a-s1 runs/a-s2 -- runs/b-s1 "
            "runs/b-s2"
        )
    scored, without = read_runs([*a, *b], metric)

    def of(paths: Sequence[Path | str], runs: Sequence[Run]) -> list[Run]:
        known = {run.path.resolve(): run for run in runs}
        folders = dict.fromkeys(Path(path).resolve() for path in paths)
        return [dataclasses.replace(known[folder]) for folder in folders if folder in known]  # a copy to label

    sets, left_out = ([of(paths, runs) for paths in (a, b)] for runs in (scored, without))
    for runs, others in zip(sets, left_out):
        if not runs:
            others[0].curve(x, metric)  # raises, and lists the available metrics
    named = [task for task in tasks(sets[0]) if task in tasks(sets[1])]
    if not named:
        raise SettingsError(
            f"The two sets have no task in common: {', '.join(tasks(sets[0]))} in the first, "
            f"{', '.join(tasks(sets[1]))} in the second. Runs are only compared on the same env.id."
        )
    found, notes = [], []
    for task in named:
        try:
            found.append(_contrast(task, sets, metric, x))
        except SettingsError as error:
            if len(named) == 1:
                raise
            notes.append(f"{task} was left out: {error}")
    if not found:
        raise SettingsError(" ".join(notes))
    compared = [each.task for each in found]
    notes += _notes(sets, compared, metric, x, left_out, (a, b))
    overall = _overall(found, metric) if len(found) > 1 else None
    how = protocol([*sets[0], *sets[1]], metric)
    comparison = Comparison(metric, x, tuple(found), overall, tuple(notes), how)
    if out is not None:
        groups = [Method(_shared(runs), runs) for runs in sets]
        for letter, group, label in zip("AB", groups, labels([group.settings for group in groups])):
            group.label = f"{letter}: {label}" if label else letter
        write_page(out, "A against B", groups, metric, x=x, verdict=_section(comparison), left_out=without)
    return comparison


def _contrast(task: str, sets: Sequence[Sequence[Run]], metric: str, x: str) -> Contrast:
    first, second = ([run for run in runs if run.task == task] for runs in sets)
    budget, scores = at_equal_budget([*first, *second], metric, x)
    left, right = scores[: len(first)], scores[len(first) :]
    return _estimates(task, [left], [right], budget, tuple(left.tolist()), tuple(right.tolist()))


def _estimates(task: str, a: Scores, b: Scores, *rest: Any) -> Contrast:
    difference = estimate(lambda left, right: iqm(left) - iqm(right), a, b)
    chance = estimate(probability_of_improvement, a, b)
    return Contrast(task, estimate(iqm, a), estimate(iqm, b), difference, chance, *rest)


def _overall(found: Sequence[Contrast], metric: str) -> Contrast:
    raw = [[np.array(scores) for scores in side] for side in ([c.scores_a for c in found], [c.scores_b for c in found])]
    scales = [scale for each in found if (scale := scale_of(each.task, metric))]
    if len(scales) == len(found) and len({scale.name for scale in scales}) == 1:
        a, b = ([scale.of(scores) for scale, scores in zip(scales, side)] for side in raw)
        return _estimates(f"{len(found)} games, {scales[0].name}", a, b)
    return Contrast(f"{len(found)} tasks", None, None, None, estimate(probability_of_improvement, *raw))


def _notes(
    sets: Sequence[Sequence[Run]],
    named: Sequence[str],
    metric: str,
    x: str,
    left_out: Sequence[Sequence[Run]],
    given: Sequence[Sequence[Path | str]],
) -> list[str]:
    """Caveats of a comparison on these tasks."""
    compared = [run for runs in sets for run in runs if run.task in named]
    notes = [note for task in named for note in _notes_of_task(task, sets, metric, x)]
    if x == "time" and len({_machines(runs) for runs in sets}) > 1:
        notes.append("A and B ran on different layouts or machines, which time depends on as much as on the methods.")
    for letter, runs, others, without, paths in zip("AB", sets, reversed(sets), left_out, given):
        notes += _notes_of_set(letter, runs, others, metric, without, len(paths))
    if shorter := [run.name for run in compared if not run.finished]:
        notes.append(f"these runs have not finished all their iterations: {', '.join(shorter)}.")
    notes += [*diverged(compared, metric), *eased(compared, metric)]
    if both := [run.name for run in sets[0] if run in sets[1]]:
        notes.append(f"the sets are not independent, since both contain: {', '.join(both)}.")
    return notes + few([sum(run.task == task for run in runs) for runs in sets for task in named])


def _notes_of_task(task: str, sets: Sequence[Sequence[Run]], metric: str, x: str) -> Iterator[str]:
    both = [[run for run in runs if run.task == task] for runs in sets]
    if text := held_back([*both[0], *both[1]], metric, x):
        yield text
    if rules := other_rules([_shared(runs) for runs in both]):
        yield f"A and B did not have the same task on {task}, since they differ in {', '.join(rules)}."


def _notes_of_set(
    letter: str, runs: Sequence[Run], others: Sequence[Run], metric: str, without: Sequence[Run], given: int
) -> Iterator[str]:
    """Caveats of one of the two sets.

    Args:
        others: the other set.
        without: runs of this set that lack the metric.
        given: how many folders the user named.
    """
    by_task = [[run.settings for run in runs if run.task == task] for task in tasks(runs)]
    if mixed := sorted({name for settings in by_task for name in differing(settings)}):
        yield f"the runs of {letter} differ in more than seed and task: {', '.join(mixed[:5])}."
    if alone := [task for task in tasks(runs) if task not in tasks(others)]:
        yield f"only {letter} has runs of {', '.join(alone)}; they were left out."
    if without:
        yield f"of {letter} were left out, since they have no {metric}: {', '.join(run.name for run in without)}."
    if again := given - len(runs) - len(without):
        yield f"{again} of the runs of {letter} were given twice, and count once."
    if seeds := seeds_again(runs):
        yield (
            f"{letter} has several runs of a task with seed {', '.join(map(str, seeds))}; they are not "
            "independent of each other, so intervals are too narrow."
        )


def _machines(runs: Sequence[Run]) -> frozenset[tuple[Any, ...]]:
    """The layouts and machines of runs."""
    return frozenset(tuple(run.facts.get(name) for name in ("layout", "platform", "cores")) for run in runs)


def _shared(runs: Sequence[Run]) -> dict[str, Any]:
    """The settings of a set of runs; for a setting that differs within it, all values."""
    every: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name, value in run.settings.items():
            every.setdefault(name, {})[json.dumps(value)] = value
    return {
        name: next(iter(values.values())) if len(values) == 1 else " and ".join(sorted(values))
        for name, values in every.items()
        if name != TASK
    }


def _section(comparison: Comparison) -> Section:
    rows = []
    for each in comparison.rows:
        known = ["" if value is None else str(value) for value in (each.a, each.b, each.difference)]
        rows.append([each.task, comparison.at(each), *known, str(each.improvement)])
    header = ["Task", f"At {comparison.x}", "A", "B", "A − B", "P(A > B)"]
    text = (
        f"{comparison.metric} at the largest number of {comparison.x} that all runs of a task reached: interquartile "
        "mean over runs with 95% bootstrap intervals. P(A > B) is the probability that a run of A scores higher than "
        "a run of B on the same task. An interval of it that contains 0.5 decides nothing, and neither does an "
        f"interval of the difference that contains 0. {comparison.protocol}"
    )
    body = page.table(header, rows) + page.warnings(comparison.notes) + page.paragraph(text, "note")
    return Section("verdict", "A against B", body)
