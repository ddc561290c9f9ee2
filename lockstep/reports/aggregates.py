"""The section of a report about scores over all tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.evaluation import statistics
from lockstep.evaluation.statistics import Curve, Scores, estimate, iqm
from lockstep.reports import charts, page
from lockstep.reports.charts import Chart, PageRuns
from lockstep.reports.curves import comparable
from lockstep.reports.runs import SCORES, Method, at_equal_budget, held_back
from lockstep.reports.scales import Scale, on_one_scale, scale_of

_MAX_PAIRS = 15
_THRESHOLDS = 101
"""Normalized scores at which a performance profile is computed, from the lowest to the highest."""
_HIGHEST = 8.0
"""The upper end of profiles: one or two games are played at 70 times the human score, which would dwarf all else."""


def aggregates(groups: Sequence[Method], named: Sequence[str], metric: str, drawn: PageRuns, x: str) -> str:
    """Over all tasks: the aggregates of Agarwal et al., and which method beats which, at an equal budget of x per
    task."""
    scored, parts = _scored(groups, named, metric, x)
    shared = [task for task in scored if all(group.on(task) for group in groups)]
    scales = list(on_one_scale(shared, metric).values())
    several = [games for games in scales if len(games) > 1]
    for games in several:
        raw = [[scored[task].scores[number] for task in games] for number in range(len(groups))]
        parts.append(_normalized(groups, games, metric, raw, drawn))
    if not several and len(scored) > 1:
        parts.append(page.paragraph(_no_aggregate(metric, shared, scales), "note"))
    pairs = _pairs(groups, scored)
    parts.append(pairs)
    if pairs or several:
        parts.append(_budgets(scored, x))
    return "".join(parts)


class _TaskScores(NamedTuple):
    """The scores of one task."""

    budget: float
    """The x at which runs are compared."""
    scores: list[np.ndarray]
    """By method."""
    warning: str | None
    """A warning that names the run that limits the budget, if one does."""


def _scored(
    groups: Sequence[Method], named: Sequence[str], metric: str, x: str
) -> tuple[dict[str, _TaskScores], list[str]]:
    """The scores of each task at an equal budget of x, and paragraphs about the tasks that have none."""
    scored, left_out = dict[str, _TaskScores](), []
    for task in named:
        runs = [group.on(task) for group in groups]
        every = [run for each in runs for run in each]
        try:
            budget, scores = at_equal_budget(every, metric, x)
        except SettingsError as error:
            left_out.append(page.paragraph(f"{task} is left out: {error}", "note"))
            continue
        by_method = np.split(scores, np.cumsum([len(each) for each in runs])[:-1])
        scored[task] = _TaskScores(budget, by_method, held_back(every, metric, x))
    return scored, left_out


def _no_aggregate(metric: str, shared: Sequence[str], scales: Sequence[Sequence[str]]) -> str:
    """A sentence that says why the scores of different tasks are not averaged.

    Args:
        shared: the tasks of which every method has runs.
        scales: those of them that have a scale, by scale.
    """
    games = [game for each in scales for game in each]
    if games:
        can = "is the only game that can be compared" if len(games) == 1 else "have a scale each"
        why = f"{' and '.join(games)} {can}"
    elif not shared:
        why = "no task has runs of every method"
    elif metric in SCORES:
        why = "scores are only normalized for the games of Atari and of Procgen"
    else:
        why = f"{metric} is not a score"
    return f"There is no aggregate over tasks, since {why}; raw scores of different tasks cannot be averaged."


def _pairs(groups: Sequence[Method], scored: Mapping[str, _TaskScores]) -> str:
    """A table of which method beats which; "" if there is no pair that has enough runs."""
    rows, pairs = [], list(itertools.combinations(range(len(groups)), 2))
    for pair in pairs[:_MAX_PAIRS]:
        both = [[each.scores[number] for number in pair] for each in scored.values()]
        both = [scores for scores in both if all(map(len, scores))]
        if len(both) > 1 or any(len(each) > 1 for scores in both for each in scores):  # else it says nothing
            chance = estimate(statistics.probability_of_improvement, *map(list, zip(*both)))
            rows.append([*(groups[number].label for number in pair), str(len(both)), str(chance)])
    if not rows:
        return ""
    text = (
        "The probability that a run of the first scores higher than a run of the second, on a task drawn at "
        "random; a tie counts half. An interval that contains 0.5 decides nothing."
    )
    if len(pairs) > _MAX_PAIRS:
        text += f" These are the first {_MAX_PAIRS} of {len(pairs)} pairs: report fewer methods to see others."
    table = page.table(["First", "Second", "Tasks", "P(first > second), 95% interval"], rows)
    return table + page.paragraph(text, "note")


def _budgets(scored: Mapping[str, _TaskScores], x: str) -> str:
    """A note on the budgets at which methods were compared, and on the runs that limit them."""
    at = ", ".join(f"{each.budget:,.0f} on {task}" for task, each in scored.items())
    unit = "seconds" if x == "time" else x
    text = f"In this section, runs of a task are compared at an equal number of {unit}, which all reached: {at}."
    return page.paragraph(text, "note") + page.warnings([each.warning for each in scored.values() if each.warning])


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
