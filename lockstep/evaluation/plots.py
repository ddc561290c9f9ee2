"""Learning curves out of run folders."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lockstep.evaluation.statistics import align, smooth
from lockstep.settings import SettingsError

X_LABELS = {
    "frames": "Environment frames",
    "samples": "Agent samples (actions)",
    "updates": "Gradient steps",
    "time": "Training time",
}
_SCORES = ("score/mean", "score/best", "score/iteration_mean", "score/iteration_max", "eval/score")
_SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's palette, which stays distinct for the color-blind.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#B8A800")
_STYLE: dict[Any, Any] = {
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
}

Curve = tuple[np.ndarray, np.ndarray]


@dataclass
class _Group:
    """Runs of one experiment that differ in nothing but the seed."""

    settings: dict[str, Any]
    curves: list[Curve] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)

    @property
    def size(self) -> str:
        count = len(self.curves)
        noun = "seed" if len(self.seeds) == count else "run"
        return f"{count} {noun}{'' if count == 1 else 's'}"


def plot(runs: Sequence[Path | str], out: Path | str, *, x: str = "samples", metric: str = "score/mean") -> Path:
    """Draw one metric of some runs against experience or time.

    Runs that differ only in their seed form one line: their mean, over the range of x that all of them reached,
    with a band of one standard deviation. Thin lines are single runs as recorded, thick ones are smoothed.

    Args:
        runs: run folders.
        out: file to write; its suffix says whether PNG, SVG or PDF.
        x: frames, samples, updates or time (seconds of training).
        metric: name in metrics.jsonl.

    Returns:
        The path written.

    Raises:
        SettingsError: a folder is no run, or has no such metric yet; x or the suffix is unknown.
    """
    out = Path(out)
    if x not in X_LABELS:
        raise SettingsError(f"Unknown x axis {x!r}. Choose one of {', '.join(X_LABELS)}.")
    if out.suffix.lower() not in _SUFFIXES:
        raise SettingsError(f"Cannot write a picture to {out}. End its name in one of {', '.join(_SUFFIXES)}.")
    if not runs:
        raise SettingsError("No run was given. Name at least one run folder, for example runs/breakout.")
    groups = _group([Path(run) for run in runs], x, metric)
    unit = _scale_time(groups) if x == "time" else ""
    title, labels = _describe(groups)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.5, 4.8), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, groups, labels)
        _label(axes, X_LABELS[x] + unit, metric, title)
        if x != "time":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if len(groups) > 1 or len(groups[0].curves) > 1:
            axes.legend(loc="best", labelcolor="#333333")
        out.parent.mkdir(parents=True, exist_ok=True)
        dated = {"Date": None} if out.suffix.lower() == ".svg" else {}
        figure.savefig(out, metadata=dated or None)
    return out


def read_curve(run: Path, x: str, metric: str) -> Curve:
    """One run's metric: x [n] and y [n], without the iterations that have no value.

    Raises:
        SettingsError: the folder is no run, or has no such metric yet.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise SettingsError(f"{run} is not a run folder: it has no metrics.jsonl. Give the folder that train printed.")
    lines = path.read_text().splitlines()
    # A running trainer may be in the middle of its last line.
    records = [json.loads(line) for line in lines[:-1]] + [r for r in map(_complete, lines[-1:]) if r]
    horizontal = {"time": "seconds"}.get(x, x)
    points = [(r[horizontal], r[metric]) for r in records if r.get(metric) is not None and horizontal in r]
    values = np.array(points, dtype=np.float64).reshape(-1, 2)
    values = values[np.isfinite(values).all(axis=1)]
    if not len(values):
        known = sorted({name for record in records for name in record})
        close = difflib.get_close_matches(metric, known, n=4, cutoff=0.5)
        hint = f"Close to it are {', '.join(close)}." if close else f"It has {', '.join(known) or 'no metrics at all'}."
        later = " Scores appear when the first episodes have ended." if metric.startswith("score/") else ""
        raise SettingsError(f"{run} has no values of {metric!r} yet. {hint}{later}")
    return values[:, 0], values[:, 1]


def _complete(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _group(runs: Sequence[Path], x: str, metric: str) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for run in runs:
        curve = read_curve(run, x, metric)
        settings = json.loads((run / "experiment.json").read_text())
        seed = settings.pop("seed")
        group = groups.setdefault(json.dumps(settings, sort_keys=True), _Group(_flatten(settings)))
        group.curves.append(curve)
        group.seeds.add(seed)
    return list(groups.values())


def _flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _describe(groups: Sequence[_Group]) -> tuple[str, list[str]]:
    """What all groups share, as a title, and what sets each apart, as labels."""
    names = sorted({name for group in groups for name in group.settings})
    differ = [n for n in names if len({json.dumps(g.settings.get(n)) for g in groups}) > 1]
    main = ["env.id", "algorithm.$type"]
    title = [_setting(n, groups[0].settings[n]) for n in main if n in groups[0].settings and n not in differ]
    # A different algorithm or model brings many other settings with it; its name says enough.
    parts = {n.rpartition(".")[0] for n in differ if n.endswith(".$type")}
    telling = [n for n in differ if n.endswith(".$type") or not any(n.startswith(p + ".") for p in parts)]
    telling.sort(key=lambda n: (n not in main, n))
    labels = [", ".join(_setting(n, g.settings[n]) for n in telling[:4] if n in g.settings) for g in groups]
    return " · ".join(title), labels


def _setting(name: str, value: Any) -> str:
    if name.endswith(".$type"):
        kind = str(value).rpartition(":")[2].removesuffix("Config")
        return kind.upper() if len(kind) <= 4 else kind
    return str(value) if name == "env.id" else f"{name.rpartition('.')[2]}={value}"


def _draw(axes: Axes, groups: Sequence[_Group], labels: Sequence[str]) -> None:
    for number, (group, label) in enumerate(zip(groups, labels, strict=True)):
        color = _COLORS[number % len(_COLORS)]
        style = ("-", "--", ":")[number // len(_COLORS) % 3]
        label = f"{label} ({group.size})" if label else group.size
        for x, y in group.curves:
            axes.plot(x, y, color=color, alpha=0.3, linewidth=0.7, marker="." if len(x) < 3 else None)
        smoothed = [(x, smooth(y, len(y) // 30)) for x, y in group.curves]
        if len(smoothed) == 1:
            axes.plot(*smoothed[0], color=color, linestyle=style, linewidth=2.2, label=label)
            continue
        grid, values = align(smoothed)
        mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1)
        axes.plot(grid, mean, color=color, linestyle=style, linewidth=2.2, label=f"{label}, mean ± std")
        axes.fill_between(grid, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)


def _label(axes: Axes, x_label: str, metric: str, title: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel("Episode return (raw score)" if metric in _SCORES else metric)
    axes.set_title(title or metric)
    axes.margins(x=0.01)


def _scale_time(groups: Sequence[_Group]) -> str:
    """Turn seconds into the unit that reads best, and name it."""
    longest = max(x[-1] for group in groups for x, _ in group.curves)
    scale, unit = (3600, "hours") if longest > 7200 else (60, "minutes") if longest > 120 else (1, "seconds")
    for group in groups:
        group.curves = [(x / scale, y) for x, y in group.curves]
    return f" [{unit}]"
