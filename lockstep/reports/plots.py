"""Plots learning curves of runs as image files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lockstep.config.settings import SettingsError
from lockstep.evaluation.attempts import Attempts, Point
from lockstep.evaluation.statistics import ENOUGH, Curve, align, smooth
from lockstep.reports.runs import (
    SCORES,
    X_LABELS,
    Method,
    Run,
    listed,
    methods,
    some,
    time_unit,
    title,
    unique_names,
    with_metric,
)
from lockstep.run.files import writing
from lockstep.system.output import print_line

_SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's palette, which color-blind readers can distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#B8A800")
_FEW = 5
"""More lines than this are drawn without single runs, and named next to the plot."""
STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 12,
    "axes.titlepad": 12,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "svg.hashsalt": "lockstep",
    "svg.fonttype": "none",
    "text.parse_math": False,  # settings are not formulas
}


def plot(
    runs: Path | str | Sequence[Path | str | Run],
    out: Path | str,
    *,
    x: str = "samples",
    metric: str = "score/mean",
    labels: Sequence[str] | None = None,
) -> Path:
    """Draw one metric of some runs against experience or time.

    Runs that differ only in their seed form one line: their mean, over the range of x that all of them reached. Five or
    more runs also get a band of one standard deviation. Thin lines are single runs as recorded (left out if there are
    many), thick lines are smoothed.

    Args:
        runs: run folders, or runs that were already read.
        out: file to write; its suffix chooses PNG, SVG or PDF.
        x: frames, samples, updates or time (seconds of training).
        metric: name in metrics.jsonl.
        labels: one for each run; runs with equal labels form one line. None: the settings that differ.

    Returns:
        The path written.

    Raises:
        SettingsError: a folder is not a run, or has no such metric yet; x or the suffix is unknown; labels are missing.
    """
    out = Path(out)
    if x not in X_LABELS:
        raise SettingsError(f"Unknown x axis {x!r}. Choose one of {', '.join(X_LABELS)}.")
    check_suffix(out)
    runs = listed(runs)
    if not runs:
        raise SettingsError("No run was given. Name at least one run folder, for example runs/breakout.")
    if labels is None:  # each once, however its path is written
        runs = list({(run.path if isinstance(run, Run) else Path(run)).resolve(): run for run in runs}.values())
    read = [run if isinstance(run, Run) else Run.read(run) for run in runs]
    groups = methods(read) if labels is None else _labelled(read, labels)
    shown = with_metric(read, metric, x)
    if len(shown) < len(read):
        without = [run for run in read if run not in shown]
        names = some(unique_names([run.path for run in without]))
        print_line(f"Left out, since they have no values of {metric}: {names}.", sys.stderr)
        groups = [replace(group, runs=[run for run in group.runs if run in shown]) for group in groups]
        groups = [group for group in groups if group.runs]
    curves = [[run.curve(x, metric) for run in group.runs] for group in groups]
    unit = ""
    if x == "time":
        scale, name = time_unit(max(each[0][-1] for group in curves for each in group))
        curves = [[(seconds / scale, y) for seconds, y in group] for group in curves]
        unit = f" [{name}]"
    with _figure(out) as axes:
        _draw(axes, groups, curves)
        axes.set_xlabel(X_LABELS[x] + unit)
        axes.set_ylabel(f"Episode return, raw ({metric})" if metric in SCORES else metric)
        axes.set_title(title([run.settings for run in read]) or metric)
        axes.margins(x=0.01)
        if x != "time":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if len(runs) > 1:
            if len(groups) > _FEW:
                axes.legend(loc="upper left", bbox_to_anchor=(1, 1), labelcolor="#333333")
            else:
                axes.legend(loc="best", labelcolor="#333333")
    return out


def plot_checkpoints(run: Path | str, points: Sequence[Point], out: Path | str) -> Path:
    """Draw the training score of a run beside the evaluations of its checkpoints: their mean with its interval, and the
    best attempt if there are several.

    Raises:
        SettingsError: the suffix is unknown.
    """
    out = Path(out)
    read = Run.read(Path(run))
    x = [point.samples for point in points]
    with _figure(out) as axes:
        if read.has("score/mean"):
            samples, score = read.curve("samples", "score/mean")
            axes.plot(samples, smooth(score, len(score) // 30), color=COLORS[0], label="training")
        axes.plot(x, [point.result.mean for point in points], color=COLORS[1], marker="o", label="evaluation, mean")
        known = np.array([(point.samples, *point.result.interval) for point in points if point.result.interval])
        if len(known):
            label = "its 95 % interval"
            axes.fill_between(*known.T, color=COLORS[1], alpha=0.18, linewidth=0, label=label)
        best = [point.result.best for point in points if isinstance(point.result, Attempts)]
        if best:
            axes.plot(x, best, color=COLORS[2], linestyle="--", marker=".", label="evaluation, best attempt")
        axes.set_xlabel(X_LABELS["samples"])
        axes.set_ylabel("Episode return, raw")
        axes.set_title(title([read.settings]))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(loc="best", labelcolor="#333333")
    return out


def check_suffix(out: Path) -> None:
    """Raise SettingsError for a name of another kind of file."""
    if out.suffix.lower() not in _SUFFIXES:
        raise SettingsError(f"Cannot write an image to {out}. End its name in one of {', '.join(_SUFFIXES)}.")


@contextlib.contextmanager
def _figure(out: Path) -> Iterator[Axes]:
    """Axes in the common style, written to a file at the end."""
    check_suffix(out)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 4.8), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        yield axes
        dated = {"Date": None} if out.suffix.lower() == ".svg" else {}
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, metadata=dated or None)


def _labelled(runs: Sequence[Run], labels: Sequence[str]) -> list[Method]:
    if len(labels) != len(runs):
        raise SettingsError(f"There are {len(labels)} labels for {len(runs)} runs: give one for each.")
    groups: dict[str, Method] = {}
    for run, label in zip(runs, labels, strict=True):
        groups.setdefault(label, Method(run.settings, label=label)).runs.append(run)
    return list(groups.values())


def _draw(axes: Axes, groups: Sequence[Method], curves: Sequence[Sequence[Curve]]) -> None:
    few = len(groups) <= _FEW
    for number, (group, single) in enumerate(zip(groups, curves, strict=True)):
        color = COLORS[number % len(COLORS)]
        style = ("-", "--", ":")[number // len(COLORS) % 3]
        label = f"{group.label} ({group.size})" if group.label else group.size
        for x, y in single if few else ():
            axes.plot(x, y, color=color, alpha=0.3, linewidth=0.7, marker="." if len(x) < 3 else None)
        smoothed = [(x, smooth(y, len(y) // 30)) for x, y in single]
        if len(smoothed) == 1:
            point = "o" if len(smoothed[0][0]) == 1 else None
            axes.plot(*smoothed[0], color=color, linestyle=style, linewidth=2.2, label=label, marker=point)
            continue
        grid, values = align(smoothed)
        if not len(grid):
            axes.plot([], [], color=color, linestyle=style, linewidth=2.2, label=f"{label}, which share no range")
            for x, y in () if few else smoothed:
                axes.plot(x, y, color=color, alpha=0.6, linewidth=0.7, marker="." if len(x) < 3 else None)
            continue
        mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1)
        label += ", mean ± std" if len(single) >= ENOUGH else ", mean"
        axes.plot(grid, mean, color=color, linestyle=style, linewidth=2.2, label=label)
        if len(single) < ENOUGH:
            continue
        axes.fill_between(grid, mean - spread, mean + spread, color=color, alpha=0.18 if few else 0.1, linewidth=0)
