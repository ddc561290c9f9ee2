"""What some runs learned: the sections of a report about scores, curves and aggregates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from lockstep.evaluation import atari, page, statistics
from lockstep.evaluation.charts import Line, interval_chart, line_chart
from lockstep.evaluation.runs import SCORES, X_LABELS, Method, Run, tasks, time_unit
from lockstep.evaluation.statistics import Curve, Scores, efficiency_curve, estimate, iqm, readable
from lockstep.settings import SettingsError

_MAX_PAIRS = 15
_THRESHOLDS = np.linspace(0.0, 4.0, 81)
"""Human-normalized scores of a performance profile."""


def warnings(groups: Sequence[Method], metric: str, left_out: Sequence[str]) -> str:
    """What a reader has to know before believing a number."""
    texts = [f"Left out, since they have no {metric}: {', '.join(left_out)}."] if left_out else []
    for group in groups:
        for task in tasks(group.runs):
            seeds = [run.seed for run in group.on(task)]
            again = sorted({seed for seed in seeds if seeds.count(seed) > 1})
            if again:
                texts.append(
                    f"{group.label}, {task}: several runs have seed {', '.join(map(str, again))}. Such runs are not "
                    "independent of each other, so intervals are too narrow."
                )
    unfinished = [
        f"{run.name} ({run.last('samples'):,.0f} of {run.settings.get('total_steps', 0):,})"
        for group in groups
        for run in group.runs
        if not run.finished
    ]
    if unfinished:
        texts.append(f"These runs have not collected all the samples that they were to: {', '.join(unfinished)}.")
    return "".join(page.paragraph(text, "warning") for text in texts)


def scores(groups: Sequence[Method], named: Sequence[str], metric: str) -> str:
    """A row for each task and method."""
    normalized = metric in SCORES and any(map(atari.game, named))
    rows = []
    for task, group in itertools.product(named, groups):
        runs = group.on(task)
        if not runs:
            continue
        found = last_scores(runs, metric)
        samples = sorted(run.last("samples") for run in runs)
        budget = " to ".join(dict.fromkeys(f"{count:,.0f}" for count in (samples[0], samples[-1])))
        row = [task, group.label, str(len(runs)), budget]
        row += [str(estimate(iqm, [found])), f"{readable(found.min())} and {readable(found.max())}"]
        game = atari.game(task)
        if normalized:
            row.append(f"{100 * atari.human_normalized(game, float(iqm([found]))):,.1f}%" if game else "")
        rows.append(row)
    header = ["Task", "Method", "Runs", "Samples", "Score (95% interval)", "Lowest and highest run"]
    text = (
        f"A run's score is the last value of {metric}. Of several runs: the interquartile mean (of fewer than four the "
        "mean) with its 95% bootstrap interval over runs. One run has none, as it says nothing of other seeds."
    )
    return page.table(header + ["Human-normalized"] * normalized, rows) + page.paragraph(text, "note")


def curves(groups: Sequence[Method], named: Sequence[str], metric: str) -> str:
    """For each task the metric over frames, updates and time."""
    parts = [legend(groups)]
    for task in named:
        charts = []
        for x in ("frames", "updates", "time"):
            singles = [[_curve(run, x, metric) for run in group.on(task)] for group in groups]
            known = [[curve for curve in each if len(curve[0])] for each in singles]
            if any(known):
                charts.append(_chart(groups, [[each] for each in known], x, metric, singles=True))
        parts += [page.heading(task) if len(named) > 1 else "", page.figures(charts)]
    text = (
        "Thin lines are single runs as recorded. Thick ones are the interquartile mean over runs, with its pointwise "
        "95% bootstrap interval, as far as all runs of the method reached. Time is that of iterations, without "
        "checkpoints and evaluations; it depends on the machine and the layout."
    )
    return "".join(parts) + page.paragraph(text, "note")


def aggregates(groups: Sequence[Method], named: Sequence[str], metric: str) -> str:
    """Over all tasks: what Agarwal et al. recommend, and who beats whom."""
    parts = []
    shared = [task for task in named if all(group.on(task) for group in groups)]
    games = [task for task in shared if atari.game(task)] if metric in SCORES else []
    if len(games) > 1:
        parts.append(_normalized(groups, games, metric))
    elif len(named) > 1:
        why = "scores are only normalized for Atari games" if shared else "no task has runs of every method"
        text = f"There is no aggregate over tasks, since {why}; raw scores of different tasks cannot be averaged."
        parts.append(page.paragraph(text, "note"))
    rows = []
    for a, b in itertools.islice(itertools.combinations(groups, 2), _MAX_PAIRS):
        both = [task for task in named if a.on(task) and b.on(task)]
        if both:
            sets = [[last_scores(each.on(task), metric) for task in both] for each in (a, b)]
            chance = estimate(statistics.probability_of_improvement, *sets)
            rows.append([a.label, b.label, str(len(both)), str(chance)])
    if rows:
        parts.append(page.table(["First", "Second", "Tasks", "P(first > second), 95% interval"], rows))
        text = (
            "The probability that a run of the first scores higher than a run of the second, on a task drawn at "
            "random; a tie counts half. An interval that contains 0.5 decides nothing."
        )
        parts.append(page.paragraph(text, "note"))
    return "".join(parts)


def legend(groups: Sequence[Method]) -> str:
    """Which color is which method."""
    return page.legend([(f"{group.label} ({group.size})", number) for number, group in enumerate(groups)])


def last_scores(runs: Sequence[Run], metric: str) -> np.ndarray:
    """The last value of each run, [R]."""
    return np.array([run.last(metric) for run in runs])


def normalize(task: str, values: np.ndarray) -> np.ndarray:
    """Human-normalized scores of an Atari game."""
    game = atari.game(task)
    assert game is not None
    return np.array([atari.human_normalized(game, value) for value in values.tolist()])


def _normalized(groups: Sequence[Method], named: Sequence[str], metric: str) -> str:
    """Aggregates of human-normalized scores."""
    found = [[normalize(task, last_scores(group.on(task), metric)) for task in named] for group in groups]
    kinds: dict[str, Callable[[Scores], np.ndarray]] = {
        "Interquartile mean": iqm,
        "Median": statistics.median,
        "Mean": statistics.mean,
        "Optimality gap (lower is better)": statistics.optimality_gap,
    }
    estimates = {name: [estimate(kind, each) for each in found] for name, kind in kinds.items()}
    rows = [[group.label, *(str(estimates[name][n]) for name in kinds)] for n, group in enumerate(groups)]
    dots = [
        page.figure(name, interval_chart([(g.label, n, each[n]) for n, g in enumerate(groups)], name))
        for name, each in estimates.items()
    ]
    lines = [
        _profile("Share of runs that score above τ", statistics.run_profile, groups, found),
        _profile("Share of games whose mean is above τ", statistics.task_profile, groups, found),
    ]
    for x in ("frames", "time"):
        by_task = [[[_curve(run, x, metric) for run in group.on(task)] for task in named] for group in groups]
        human = [[[(s, normalize(t, y)) for s, y in runs] for t, runs in zip(named, group)] for group in by_task]
        lines.append(_chart(groups, human, x, "human-normalized IQM"))
    text = (
        f"Human-normalized scores of {len(named)} games: 0 is random play, 1 a human tester. Intervals are 95% "
        "stratified bootstrap intervals."
    )
    table = page.table(["Method", *kinds], rows)
    return page.paragraph(text) + table + legend(groups) + page.figures(dots) + page.figures(lines)


def _profile(
    caption: str,
    kind: Callable[[Scores, np.ndarray], np.ndarray],
    groups: Sequence[Method],
    found: Sequence[Scores],
) -> str:
    """A performance profile of each method."""
    lines = []
    for number, (group, each) in enumerate(zip(groups, found)):
        share, low, high = statistics.bootstrap(lambda sample: kind(sample, _THRESHOLDS), each, resamples=1_000)
        lines.append(Line(group.label, number, (_THRESHOLDS, share), None if np.isnan(low).any() else (low, high)))
    return page.figure(caption, line_chart(lines, "Human-normalized score τ", "Share"))


def _chart(
    groups: Sequence[Method],
    by_task: Sequence[Sequence[Sequence[Curve]]],
    x: str,
    metric: str,
    *,
    singles: bool = False,
) -> str:
    """A line for each method: of the curves of the runs of each of its tasks; singles shows these too."""
    every = [curve for method in by_task for runs in method for curve in runs]
    scale, unit = time_unit(max(steps[-1] for steps, _ in every)) if x == "time" else (1.0, "")
    lines = []
    for number, (group, method) in enumerate(zip(groups, by_task, strict=True)):
        single = [curve for runs in method for curve in runs]
        if not single:
            continue
        if len(single) == 1:
            grid, value = single[0]
            lines.append(Line(group.label, number, (grid / scale, value)))
            continue
        grid, value, low, high = efficiency_curve(method)
        band = None if not len(grid) or np.isnan(low).any() else (low, high)
        thin = tuple((steps / scale, y) for steps, y in single) if singles else ()
        lines.append(Line(group.label, number, (grid / scale, value), band, thin))
    label = X_LABELS[x] + (f" [{unit}]" if unit else "")
    return page.figure(f"{metric} over {label[0].lower() + label[1:]}", line_chart(lines, label, metric))


def _curve(run: Run, x: str, metric: str) -> Curve:
    """Empty where the metric is not known over x, as evaluations are not over updates."""
    try:
        return run.curve(x, metric)
    except SettingsError:
        return np.empty(0), np.empty(0)
