"""The sections of a report about curves: scores over samples or time, and diagnostics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.evaluation.statistics import ENOUGH, Curve
from lockstep.reports import charts, page
from lockstep.reports.charts import Chart, PageRuns
from lockstep.reports.runs import (
    Method,
    Run,
)
from lockstep.reports.stills import still

_ELSEWHERE = ("score", "eval", "time", "speed", "lag", "wait")
"""Metrics that other sections show, or none."""
_MOST_CHARTS = 120
_MOST_STILLS = 4
"""Images for readers without JavaScript."""


def curves(groups: Sequence[Method], named: Sequence[str], metric: str, drawn: PageRuns) -> str:
    """The curves of each task: the metric of single runs and of methods."""
    found = []
    for task in named:
        known = {x: comparable(groups, task, x, metric) for x in drawn.axes}
        lines = []
        for number, group in enumerate(groups):
            runs, singles = with_curves(group.on(task), metric)
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
        found = changing(groups, task, kept, drawn)
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


def changing(groups: Sequence[Method], task: str, names: Sequence[str], drawn: PageRuns) -> list[Chart]:
    """A chart for each of these metrics that changed, captioned with its name: a line for each method."""
    found = []
    for metric in names:
        known = [with_curves(group.on(task), metric) for group in groups]
        if any(np.ptp(y) > 0 for _, curves in known for _, y in curves):  # a constant is a setting
            found.append(charts.curves(metric, [drawn.mean(*each) for each in known if each[0]], metric))
    return found


def _is_diagnostic(metric: str) -> bool:
    """Whether no other section shows the metric and it is not an end of an interval."""
    if metric.startswith("eval/env/"):
        return not metric.endswith(("_low", "_high"))
    return metric == "gradient_norm" or metric.partition("/")[0] not in (*_ELSEWHERE, metric)


def with_curves(runs: Sequence[Run], metric: str) -> tuple[list[Run], list[Curve]]:
    """The runs that recorded a metric over samples, and their curves."""
    found = [(run, curve) for run in runs if len((curve := _curve(run, "samples", metric))[0])]
    return [run for run, _ in found], [curve for _, curve in found]


def comparable(groups: Sequence[Method], task: str, x: str, metric: str) -> list[list[Curve]]:
    """The curves of each method's runs of a task. Runs without the metric are left out."""
    every = [[_curve(run, x, metric) for run in group.on(task)] for group in groups]
    return [[curve for curve in each if len(curve[0])] for each in every]


def _curve(run: Run, x: str, metric: str) -> Curve:
    """A run's curve; empty if the metric was not recorded over x."""
    try:
        return run.curve(x, metric)
    except SettingsError:
        return np.empty(0), np.empty(0)
