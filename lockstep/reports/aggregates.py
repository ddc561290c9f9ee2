"""The section of a report about scores over all tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.evaluation import statistics
from lockstep.evaluation.statistics import Curve, Scores, estimate, iqm
from lockstep.reports import charts, page
from lockstep.reports.charts import Chart, PageRuns
from lockstep.reports.curves import comparable
from lockstep.reports.runs import (
    SCORES,
    Method,
    at_equal_budget,
    held_back,
)
from lockstep.reports.scales import Scale, on_one_scale, scale_of

_MAX_PAIRS = 15
_THRESHOLDS = 101
"""Normalized scores at which a performance profile is computed, from the lowest to the highest."""
_HIGHEST = 8.0
"""The upper end of profiles: one or two games are played at 70 times the human score, which would dwarf all else."""


def aggregates(groups: Sequence[Method], named: Sequence[str], metric: str, drawn: PageRuns, x: str = "samples") -> str:
    """Over all tasks: the aggregates of Agarwal et al., and which method beats which, at an equal budget of x per
    task."""
    parts, budgets, found, short = [], dict[str, float](), dict[str, list[np.ndarray]](), list[str | None]()
    for task in named:
        runs = [group.on(task) for group in groups]
        every = [run for each in runs for run in each]
        try:
            budgets[task], scores = at_equal_budget(every, metric, x)
        except SettingsError as error:
            parts.append(page.paragraph(f"{task} is left out: {error}", "note"))
            continue
        found[task] = np.split(scores, np.cumsum([len(each) for each in runs])[:-1])
        short.append(held_back(every, metric, x))
    named = list(found)
    shared = [task for task in named if all(group.on(task) for group in groups)]
    normalized = on_one_scale(shared, metric).values()
    several = [games for games in normalized if len(games) > 1]
    for games in several:
        parts.append(
            _normalized(groups, games, metric, [[found[t][n] for t in games] for n in range(len(groups))], drawn)
        )
    if not several and len(named) > 1:
        known = "scores are only normalized for the games of Atari and of Procgen"
        why = known if metric in SCORES else f"{metric} is not a score"
        why = why if shared else "no task has runs of every method"
        if normalized:
            only = [game for games in normalized for game in games]
            why = "is the only game that can be compared" if len(only) == 1 else "have a scale each"
            why = f"{' and '.join(only)} {why}"
        text = f"There is no aggregate over tasks, since {why}; raw scores of different tasks cannot be averaged."
        parts.append(page.paragraph(text, "note"))
    rows, pairs = [], list(itertools.combinations(range(len(groups)), 2))
    for a, b in pairs[:_MAX_PAIRS]:
        both = [task for task in named if len(found[task][a]) and len(found[task][b])]
        if len(both) > 1 or any(len(found[task][each]) > 1 for task in both for each in (a, b)):  # else it says nothing
            sets = [[found[task][each] for task in both] for each in (a, b)]
            chance = estimate(statistics.probability_of_improvement, *sets)
            rows.append([groups[a].label, groups[b].label, str(len(both)), str(chance)])
    if rows:
        text = (
            "The probability that a run of the first scores higher than a run of the second, on a task drawn at "
            "random; a tie counts half. An interval that contains 0.5 decides nothing."
        )
        if len(pairs) > _MAX_PAIRS:
            text += f" These are the first {_MAX_PAIRS} of {len(pairs)} pairs: report fewer methods to see others."
        parts.append(page.table(["First", "Second", "Tasks", "P(first > second), 95% interval"], rows))
        parts.append(page.paragraph(text, "note"))
    if rows or several:
        at = ", ".join(f"{budget:,.0f} on {task}" for task, budget in budgets.items())
        unit = "seconds" if x == "time" else x
        text = f"In this section, runs of a task are compared at an equal number of {unit}, which all reached: {at}."
        parts.append(page.paragraph(text, "note"))
        parts.append(page.warnings([text for text in short if text]))
    return "".join(parts)


def _normalized(
    groups: Sequence[Method], named: Sequence[str], metric: str, raw: Sequence[Scores], drawn: PageRuns
) -> str:
    """Aggregates of scores on one scale; raw: those of each method, by task."""
    scales: list[Scale] = [scale for task in named if (scale := scale_of(task, metric))]
    assert len(scales) == len(named), "tasks without a scale"
    name, meaning, *_ = scales[0]
    name = name[0].upper() + name[1:]
    found = [[scale.of(scores) for scale, scores in zip(scales, each, strict=True)] for each in raw]
    kinds: dict[str, Callable[[Scores], np.ndarray]] = {
        "Interquartile mean": iqm,
        "Median": statistics.median,
        "Mean": statistics.mean,
        "Optimality gap (lower is better)": statistics.optimality_gap,
    }
    estimates = {name: [estimate(kind, each) for each in found] for name, kind in kinds.items()}
    rows = [[group.label, *(str(estimates[name][n]) for name in kinds)] for n, group in enumerate(groups)]
    dots = [
        charts.intervals(name, [(g.label, n, each[n]) for n, g in enumerate(groups)])
        for name, each in estimates.items()
    ]
    lines = [
        _profile("Share of runs that score above τ", statistics.run_profile, groups, named, found, name, drawn),
        _profile("Share of games whose mean is above τ", statistics.task_profile, groups, named, found, name, drawn),
        *_efficiency(groups, named, metric, scales, drawn),
    ]
    text = (
        f"{name} scores of the {len(named)} games of which every method has runs ({', '.join(named)}): {meaning}. "
        "Intervals are 95% stratified bootstrap intervals, shown if every game has several runs."
    )
    table = page.table(["Method", *kinds], rows)
    return page.paragraph(text) + table + page.figures(dots) + page.figures(lines)


def _efficiency(
    groups: Sequence[Method], named: Sequence[str], metric: str, scales: Sequence[Scale], drawn: PageRuns
) -> list[Chart]:
    """The interquartile mean of all games over training, on the axes that all runs recorded."""
    by_x = dict[str, list[list[list[Curve]]]]()
    for x in drawn.axes:
        by_task = [comparable(groups, task, x, metric) for task in named]
        scaled = [[[(s, scale.of(y)) for s, y in runs] for runs in each] for scale, each in zip(scales, by_task)]
        if all(all(each) for each in scaled):
            by_x[x] = [list(each) for each in zip(*scaled)]
    if not by_x:
        return []
    lines = []
    for number, group in enumerate(groups):
        runs = [run for task in named for run in group.on(task)]
        lines.append(drawn.middle(runs, {x: each[number] for x, each in by_x.items()}))
    label = f"{scales[0].name} IQM"
    return [charts.curves(f"{label[0].upper()}{label[1:]} over training", lines, label)]


def _profile(
    caption: str,
    kind: Callable[[Scores, np.ndarray], np.ndarray],
    groups: Sequence[Method],
    named: Sequence[str],
    found: Sequence[Scores],
    scale: str,
    drawn: PageRuns,
) -> Chart:
    """A performance profile of each method's scores on one scale."""
    lines = []
    every = np.concatenate([scores for each in found for scores in each])
    highest = float(max(1.0, every.max()))
    caption += f", up to {_HIGHEST:g}" * (highest > _HIGHEST)
    thresholds = np.linspace(min(0.0, every.min()), min(_HIGHEST, highest), _THRESHOLDS)
    for group, each in zip(groups, found):
        share, low, high = statistics.bootstrap(lambda sample: kind(sample, thresholds), each, resamples=1_000)
        runs = [run for task in named for run in group.on(task)]
        lines.append(drawn.profile(runs, (thresholds, share), None if np.isnan(low).any() else (low, high)))
    return charts.profiles(caption, lines, f"{scale} score τ")
