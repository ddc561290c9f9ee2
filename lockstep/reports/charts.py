"""Charts of a report as plain dictionaries, which web/charts.js passes to Plotly in the reader's browser."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.evaluation.statistics import ENOUGH, Curve, Estimate, align, efficiency_curve, means_around, outline
from lockstep.reports.runs import X_LABELS, Run, differing, endings, time_unit

_POINTS = 400
"""Number of points to draw per run."""
_MEAN_POINTS = 150
_MOST_AXES = 8
"""Maximum number of settings in parallel coordinates."""


@dataclass(frozen=True)
class Chart:
    """A chart with its caption."""

    caption: str
    spec: dict[str, Any]
    """The input of web/charts.js: the chart's kind and its numbers."""
    still: bytes = b""
    """An SVG image of it for readers without JavaScript."""


@dataclass(frozen=True)
class PageRuns:
    """The runs of a page, from which its charts are made; charts name a run by its index."""

    runs: Sequence[Run]
    colors: Sequence[int]
    """The color of each run's method."""

    @property
    def axes(self) -> list[str]:
        """The x axes of curves; includes frames only if they differ from samples."""
        same = all(r.get("frames") == r.get("samples") for run in self.runs for r in run.records)
        return [x for x in ("samples", "frames", "updates", "time") if not (same and x == "frames")]

    @property
    def time(self) -> tuple[float, str]:
        """The page's unit of time."""
        return time_unit(max((run.last("seconds") for run in self.runs), key=lambda end: (end == end, end)))

    def labels(self) -> dict[str, str]:
        """The title of each axis."""
        return {x: X_LABELS[x] + (f" [{self.time[1]}]" if x == "time" else "") for x in self.axes}

    def place(self, run: Run) -> int:
        return next(place for place, each in enumerate(self.runs) if each is run)

    def described(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Facts about each run for charts and the filter; labels: the names of the methods."""
        names = differing([run.settings for run in self.runs])
        told = []
        for run, color in zip(self.runs, self.colors, strict=True):
            words = [f"{name}={run.settings.get(name)}" for name in names]
            text = " ".join([run.name, run.task, labels[color], f"seed={run.seed}", *words])
            told.append({"name": run.name, "seed": run.seed, "method": color, "text": text})
        return told

    def along(self, run: Run, steps: np.ndarray) -> dict[str, np.ndarray]:
        """A run's position on each axis after each number of samples."""
        found = {"samples": steps}
        for x in self.axes[1:]:
            try:
                places = np.interp(steps, *run.curve("samples", "seconds" if x == "time" else x))
            except SettingsError:  # this run did not record it
                continue
            found[x] = places / self.time[0] if x == "time" else places
        return found

    # ------------------------------------------------------------------------------------------------- lines

    def single(self, run: Run, curve: Curve, role: str = "single") -> dict[str, Any]:
        """The line of one run; curve: its metric over samples."""
        steps, values = curve
        kept = outline(values, _POINTS)
        line = {"role": role, "method": self.colors[self.place(run)], "runs": [self.place(run)]}
        means = {"mean": numbers(means_around(values, kept))} if len(kept) < len(values) else {}
        return {**line, "x": _each(self.along(run, steps[kept])), "y": numbers(values[kept]), **means}

    def middle(self, runs: Sequence[Run], by_x: Mapping[str, Sequence[Sequence[Curve]]]) -> dict[str, Any]:
        """The interquartile mean of a method; by_x: on each axis the curves of the runs of each task.

        For fewer than ENOUGH runs there is no interval: the reader sees the runs themselves.
        """
        found = {}
        for x, curves in by_x.items():
            grid, value, low, high = efficiency_curve(curves)
            if not len(grid):
                continue
            grid = grid / self.time[0] if x == "time" else grid
            found[x] = {"x": numbers(grid), "y": numbers(value)}
            if sum(map(len, curves)) >= ENOUGH and not np.isnan(low).any():
                found[x] |= {"low": numbers(low), "high": numbers(high)}
        return {**self._of(runs, "middle"), "by": found}

    def mean(self, runs: Sequence[Run], curves: Sequence[Curve]) -> dict[str, Any]:
        """The mean of a method's curves over samples, up to where all end; on other axes, at the mean position of its
        runs."""
        if len(runs) == 1:
            return self.single(runs[0], curves[0], "middle")
        x, y = mean_curve(curves)
        places = [self.along(run, x) for run in runs]
        shared = [name for name in self.axes if all(name in each for each in places)]
        return {
            **self._of(runs, "middle"),
            "x": _each({name: np.mean([each[name] for each in places], axis=0) for name in shared}),
            "y": numbers(y),
        }

    def profile(self, runs: Sequence[Run], curve: Curve, band: tuple[np.ndarray, np.ndarray] | None) -> dict[str, Any]:
        """A method's line over a separate axis."""
        ends = {"low": numbers(band[0]), "high": numbers(band[1])} if band else {}
        return {**self._of(runs, "middle"), "by": {"own": {"x": numbers(curve[0]), "y": numbers(curve[1]), **ends}}}

    def _of(self, runs: Sequence[Run], role: str) -> dict[str, Any]:
        places = [self.place(run) for run in runs]
        return {"role": role, "method": self.colors[places[0]], "runs": places}

    # ------------------------------------------------------------------------------------------------ charts

    def parallel(self, metric: str) -> Chart | None:
        """Every run as a line across its settings to its score, if runs of one task differ in several settings."""
        runs = [run for run in self.runs if run.has(metric)]
        names = [name for name in differing([run.settings for run in runs]) if not name.endswith(".$type")]
        if len(names) < 2 or len(runs) < 4 or len({run.task for run in runs}) > 1:
            return None
        short = endings([name.split(".") for name in names], ".")
        axes = [_axis(label, [r.settings.get(name) for r in runs]) for label, name in zip(short, names[:_MOST_AXES])]
        score = {"label": metric, "values": numbers(np.array([run.last(metric) for run in runs]))}
        left_out = f" (the first {_MOST_AXES} of {len(names)} settings)" * (len(names) > _MOST_AXES)
        places = [self.place(run) for run in runs]
        spec = {"kind": "parallel", "runs": places, "axes": [*axes, score]}
        return Chart(f"Settings and {metric} of each run{left_out}", spec)


def curves(caption: str, lines: Sequence[dict[str, Any]], y_label: str, still: bytes = b"") -> Chart:
    """Lines over the x axis that the reader chooses."""
    return Chart(caption, {"kind": "curves", "y": y_label, "lines": list(lines)}, still)


def profiles(caption: str, lines: Sequence[dict[str, Any]], x_label: str) -> Chart:
    """Shares, from 0 to 1, over a fixed axis."""
    return Chart(caption, {"kind": "curves", "own": x_label, "range": [0, 1], "y": "Share", "lines": list(lines)})


def intervals(caption: str, rows: Sequence[tuple[str, int, Estimate]]) -> Chart:
    """A dot and an interval for each (name, color, estimate)."""
    told = [
        {"name": name, "method": color, "value": each.value, "interval": each.interval, "text": str(each)}
        for name, color, each in rows
    ]
    return Chart(caption, {"kind": "intervals", "rows": told})


def grouped(charts: Sequence[Chart]) -> str:
    """JSON of some charts, in which x values that several lines share are stored once."""
    shared: dict[str, int] = {}

    def placed(values: list[Any]) -> int:
        return shared.setdefault(json.dumps(values), len(shared))

    specs = []
    for chart in charts:
        lines = [
            {**line, "x": {name: placed(values) for name, values in line["x"].items()}} if "x" in line else line
            for line in chart.spec.get("lines", ())
        ]
        specs.append({**chart.spec, "lines": lines} if lines else chart.spec)
    return json.dumps({"shared": [json.loads(text) for text in shared], "charts": specs}, separators=(",", ":"))


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of curves, up to the point that all of them reach."""
    if len(curves) == 1:
        return curves[0]
    grid, values = align(curves, _MEAN_POINTS)
    return grid, values.mean(axis=0)


def numbers(values: np.ndarray) -> list[float | int | None]:
    """JSON numbers with six significant digits, or ten for large integers such as samples. null if not finite."""
    told = (float(f"{v:.10g}" if float(v).is_integer() else f"{v:.6g}") for v in values.tolist())
    return [None if not math.isfinite(v) else int(v) if v.is_integer() else v for v in told]


def _each(places: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    return {name: numbers(values) for name, values in places.items()}


def _axis(label: str, values: Sequence[Any]) -> dict[str, Any]:
    """One setting in parallel coordinates: logarithmic if it varies by more than a factor of 30."""
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        known = np.array(values, np.float64)
        if known.min() > 0 and known.max() / known.min() > 30:
            return {"label": label, "values": numbers(np.log10(known)), "log": True}
        return {"label": label, "values": numbers(known)}
    words = [value if isinstance(value, str) else json.dumps(value) for value in values]
    kinds = sorted(set(words))
    return {"label": label, "values": [kinds.index(word) for word in words], "words": kinds}
