"""The sections of a report about scores, curves and aggregates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.evaluation import statistics
from lockstep.evaluation.statistics import ENOUGH, Curve, Estimate, Scores, estimate, iqm, readable
from lockstep.reports import charts, page
from lockstep.reports.charts import Chart, PageRuns
from lockstep.reports.runs import (
    SCORES,
    Method,
    Run,
    at_equal_budget,
    eased,
    held_back,
    other_rules,
    seeds_again,
    some,
    tasks,
)
from lockstep.reports.scales import Scale, on_one_scale, scale_of
from lockstep.reports.stills import still

_MAX_PAIRS = 15
_THRESHOLDS = 101
"""Normalized scores at which a performance profile is computed, from the lowest to the highest."""
_HIGHEST = 8.0
"""The upper end of profiles: one or two games are played at 70 times the human score, which would dwarf all else."""
_ELSEWHERE = ("score", "eval", "time", "speed", "lag", "wait")
"""Metrics that other sections show, or none."""
_MOST_CHARTS = 120
_MOST_STILLS = 4
"""Images for readers without JavaScript."""


@dataclass(frozen=True)
class Scored:
    """The scores of a method's runs on a task."""

    task: str
    method: str
    runs: int
    samples: tuple[float, float]
    """Samples of the shortest and of the longest run."""
    score: Estimate
    """Interquartile mean over runs."""
    lowest: float
    highest: float
    normalized: float | None
    """The interquartile mean on the benchmark's scale; None for a task without a scale."""
    scale: str | None
    """The name of the scale."""


def warnings(groups: Sequence[Method], metric: str, left_out: Sequence[str]) -> str:
    """What a reader must know before trusting a number."""
    texts = [f"Left out, since they have no {metric}: {some(left_out)}."] if left_out else []
    for group in groups:
        if again := seeds_again(group.runs):
            texts.append(
                f"{group.label}: several runs of a task have seed {', '.join(map(str, again))}. Such runs are not "
                "independent of each other, so intervals are too narrow."
            )
    counts = [len(group.on(task)) for group in groups for task in tasks(group.runs)]
    runs = [run for group in groups for run in group.runs]
    for task in tasks(runs):
        if rules := other_rules([run.settings for run in runs if run.task == task]):
            texts.append(f"Not all runs of {task} have the same task, since they differ in {', '.join(rules)}.")
    texts += [*few(counts), *diverged(runs, metric), *eased(runs, metric)]
    unfinished = [
        f"{run.name} ({run.last('samples'):,.0f} of {run.settings.get('total_steps', 0):,})"
        for run in runs
        if not run.finished
    ]
    if unfinished:
        texts.append(f"These runs have not collected all their samples: {some(unfinished)}.")
    return page.warnings(texts)


def few(counts: Sequence[int]) -> list[str]:
    """Sentences about the intervals of tasks with this many runs."""
    texts = (
        ["A task with one run has no interval, since one run says nothing about other seeds."] if 1 in counts else []
    )
    if any(1 < count < ENOUGH for count in counts):
        texts.append(
            f"With fewer than {ENOUGH} runs of a task, intervals are too narrow, and miss the true value too often: "
            "train more seeds."
        )
    return texts


def diverged(runs: Sequence[Run], metric: str) -> list[str]:
    """A sentence for each run whose metric, or a loss, is not a number any more."""
    ends = [(run.name, run.diverged(metric)) for run in runs]
    return [
        f"{name} has diverged: after {samples:,.0f} samples its metrics are not numbers any more."
        for name, samples in ends
        if samples is not None
    ]


def scored(groups: Sequence[Method], named: Sequence[str], metric: str) -> list[Scored]:
    """One entry for each task and method that has runs of it."""
    every = []
    for task, group in itertools.product(named, groups):
        if runs := group.on(task):
            found = np.array([run.last(metric) for run in runs])
            samples = sorted(float(run.curve("samples", metric)[0][-1]) for run in runs)
            score, scale = estimate(iqm, [found]), scale_of(task, metric)
            on_scale = (float(scale.of(np.array(score.value))), scale.name) if scale else (None, None)
            ends, extremes = (samples[0], samples[-1]), (float(found.min()), float(found.max()))
            every.append(Scored(task, group.label, len(runs), ends, score, *extremes, *on_scale))
    return every


def scores(groups: Sequence[Method], found: Sequence[Scored], metric: str) -> str:
    """A table with a row for each task and method."""
    scales = {each.scale for each in found if each.scale}
    rows = []
    for each in found:
        budget = " to ".join(dict.fromkeys(f"{count:,.0f}" for count in each.samples))
        row = [each.task, each.method, str(each.runs), budget, str(each.score)]
        row.append(f"{readable(each.lowest)} and {readable(each.highest)}")
        if scales:
            row.append("" if each.normalized is None else f"{100 * each.normalized:,.1f}%")
        rows.append(row)
    header = ["Task", "Method", "Runs", "Samples", "Score (95% interval)", "Lowest and highest run"]
    texts = [
        f"A run's score is the last value of {metric}.",
        protocol([run for group in groups for run in group.runs], metric),
        "Of several runs: the interquartile mean (of fewer than four the mean) with its 95% bootstrap interval over "
        "runs.",
    ]
    if any(each.samples[0] < 0.9 * each.samples[1] for each in found):
        texts.append("Runs of unequal length count with the last value of each.")
    text = " ".join(filter(None, texts))
    if scales:
        (name,) = scales if len(scales) == 1 else ("normalized",)
        header.append(name[0].upper() + name[1:])
    return page.table(header, rows) + page.paragraph(text, "note")


def protocol(runs: Sequence[Run], metric: str) -> str:
    """A sentence about the protocol of scores; empty for other metrics."""
    if metric not in SCORES:
        return ""
    if metric == "eval/score":
        text = _evaluations(runs)
    elif metric == "score/mean":
        text = "That is the mean raw score of the last 100 training episodes, exploration included"
    else:
        text = "That is a raw score of training episodes, exploration included"
    rules = {str(run.settings.get("env.protocol", "none")) for run in runs} - {"none"}
    return text + f" (Atari protocol: {', '.join(sorted(rules))})" * bool(rules) + "."


def _evaluations(runs: Sequence[Run]) -> str:
    default, options = RunOptions(), [run.facts.get("options", {}) for run in runs]
    counts = sorted({each.get("eval_episodes", default.eval_episodes) for each in options})
    episodes = " to ".join(dict.fromkeys((str(counts[0]), str(counts[-1]))))
    greedy = {each.get("eval_greedy", default.eval_greedy) for each in options}
    acting = {(True,): "the most likely actions", (False,): "actions chosen as by lockstep eval"}
    how = acting.get(tuple(greedy), "the most likely actions in some runs only")
    text = f"That is the mean raw score of {episodes} episodes on separate environments, with {how}"
    text += ", on levels that training does not see" * any(run.settings.get("env.num_levels") for run in runs)
    played = [each.get("eval_opponents") or run.settings.get("env.opponents") for each, run in zip(options, runs)]
    against = {str(name).partition("#")[0] for names in played for name in names or ()}
    return text + f", against {', '.join(sorted(against))}" * bool(against)


def curves(groups: Sequence[Method], named: Sequence[str], metric: str, drawn: PageRuns) -> str:
    """The curves of each task: the metric of single runs and of methods."""
    found = []
    for task in named:
        known = {x: _known(groups, task, x, metric) for x in drawn.axes}
        lines = []
        for number, group in enumerate(groups):
            runs, singles = _runs_with_curves(group.on(task), metric)
            if len(runs) == 1:
                lines.append(drawn.single(runs[0], singles[0], "middle"))
            elif runs:
                lines += map(drawn.single, runs, singles)
                by_x = {x: [each[number]] for x, each in known.items() if len(each[number]) == len(runs)}
                lines.append(drawn.middle(runs, by_x))
        picture = still(lines, [group.label for group in groups], drawn.labels()["samples"], metric)
        picture = picture if len(found) < _MOST_STILLS else b""
        found.append(charts.curves(f"{task}: {metric}" if len(named) > 1 else metric, lines, metric, picture))
    banded = any(len(group.on(task)) >= ENOUGH for group in groups for task in named)
    few_runs = any(1 < len(group.on(task)) < ENOUGH for group in groups for task in named)
    texts = ["Lines end where the first run of the method ends; time excludes checkpoints and evaluations."]
    if few_runs:
        text = "Thin lines are single runs, the thick one is their interquartile mean (of fewer than four the mean)."
        texts.insert(0, text)
    if banded:
        texts.insert(0, f"Of {ENOUGH} or more runs: the interquartile mean with its pointwise 95% bootstrap interval.")
    return page.figures(found, "whole" if len(found) == 1 else "") + page.paragraph(" ".join(texts), "note")


def parallel(drawn: PageRuns, metric: str) -> str:
    """The settings and the score of each run, if settings differ."""
    chart = drawn.parallel(metric)
    if chart is None:
        return ""
    text = "Each line is a run. Drag along an axis to filter the runs of the whole page; click on the axis to undo."
    return page.figures([chart], "whole") + page.paragraph(text, "note")


def diagnostics(groups: Sequence[Method], named: Sequence[str], drawn: PageRuns) -> str:
    """All other metrics of learning that changed, such as losses: means over runs."""
    every = [run for group in groups for run in group.runs]
    names = dict.fromkeys(name for run in every for name in run.names(""))
    kept = [name for name in names if _is_diagnostic(name)]
    parts, count, dropped = list[str](), 0, list[str]()
    for task in named:
        found = []
        for metric in kept:
            known = [_runs_with_curves(group.on(task), metric) for group in groups]
            if not any(np.ptp(y) > 0 for _, curves in known for _, y in curves):  # a constant is a setting
                continue
            lines = [drawn.mean(*each) for each in known if each[0]]
            found.append(charts.curves(metric, lines, metric))
        if count + len(found) > _MOST_CHARTS:
            dropped.append(task)
        elif found:
            count += len(found)
            title = f"{task}: " * (len(named) > 1) + f"{len(found)} metric{'s' * (len(found) > 1)}"
            parts.append(page.details(title, page.figures(found, "small"), unfolded=len(named) == 1))
    if not count:
        return ""
    text = (
        "Losses, what environments reported, and other metrics: means over the runs of a method, up to where the first "
        "run ends."
    )
    if dropped:
        text += f" The page would be too large with {', '.join(dropped)}: make a separate report of these."
    return page.paragraph(text, "note") + "".join(parts)


def _is_diagnostic(metric: str) -> bool:
    """Whether no other section shows it, and it is no end of an interval."""
    if metric.startswith("eval/env/"):
        return not metric.endswith(("_low", "_high"))
    return metric == "gradient_norm" or metric.partition("/")[0] not in (*_ELSEWHERE, metric)


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
        by_task = [_known(groups, task, x, metric) for task in named]
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


def _runs_with_curves(runs: Sequence[Run], metric: str) -> tuple[list[Run], list[Curve]]:
    """The runs that recorded a metric over samples, and their curves."""
    found = [(run, curve) for run in runs if len((curve := _curve(run, "samples", metric))[0])]
    return [run for run, _ in found], [curve for _, curve in found]


def _known(groups: Sequence[Method], task: str, x: str, metric: str) -> list[list[Curve]]:
    """The curves of each method's runs of a task. Runs without the metric are left out."""
    every = [[_curve(run, x, metric) for run in group.on(task)] for group in groups]
    return [[curve for curve in each if len(curve[0])] for each in every]


def _curve(run: Run, x: str, metric: str) -> Curve:
    """A run's curve; empty if the metric was not recorded over x."""
    try:
        return run.curve(x, metric)
    except SettingsError:
        return np.empty(0), np.empty(0)
