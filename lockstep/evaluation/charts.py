"""Small SVG charts for a web page: they take their colors from the page, in light, in dark and on paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.evaluation.page import COLORS, plain
from lockstep.evaluation.statistics import Curve, Estimate, outlined, readable

_WIDTH, _HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 10, 38
_NAMES, _LETTERS = 118, 18
"""Width of the names beside intervals, and how long they may be."""
_POINTS = 160
"""Points of a line that are drawn."""


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    color: int
    curve: Curve
    band: tuple[np.ndarray, np.ndarray] | None = None
    """Lower and upper end at each point of the curve."""
    singles: tuple[Curve, ...] = ()
    """Thin lines behind it, such as single runs."""


def line_chart(lines: Sequence[Line], x_label: str, y_label: str, *, ends: tuple[float, float] | None = None) -> str:
    """Lines with bands over a common pair of axes; ends: those of the one that goes up, else where the lines end."""
    curves = [curve for line in lines for curve in (line.curve, *line.singles) if len(curve[0])]
    if not curves:
        return '<p class="note">Nothing to draw.</p>'
    bands = [end for line in lines if line.band for end in line.band]
    across = _Axis.around(np.concatenate([x for x, _ in curves]), _LEFT, _WIDTH - _RIGHT)
    reached = np.array(ends) if ends else np.concatenate([*(y for _, y in curves), *bands])
    up = _Axis.around(reached, _HEIGHT - _BOTTOM, _TOP)
    parts = [_svg(_WIDTH, _HEIGHT, f"{y_label} over {x_label}")]
    for tick, name in up.ticks():
        y = up.place(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" class="end">{name}</text>')
    for tick, name in across.ticks():
        x = across.place(tick)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 15}" class="middle">{name}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 6}" class="middle label">{plain(x_label)}</text>')
    for line in lines:
        parts.append(f'<g class="c{line.color % COLORS} d{line.color // COLORS % 3}"><title>{plain(line.name)}</title>')
        if line.band and len(line.curve[0]):
            x, (low, high) = line.curve[0], line.band
            around = np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]])
            parts.append(f'<polygon class="band" points="{_points(around, across, up)}"/>')
        for curve, kind in (*((single, "single") for single in line.singles), (line.curve, "line")):
            if len(curve[0]) and curve[0][0] == curve[0][-1]:  # no line has a length of 0
                x, y = across.place(float(curve[0][-1])), up.place(float(curve[1][-1]))
                parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{3 if kind == "line" else 1.5}"/>')
            elif len(curve[0]):
                parts.append(f'<polyline class="{kind}" points="{_points(outlined(curve, _POINTS), across, up)}"/>')
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def interval_chart(rows: Sequence[tuple[str, int, Estimate]], label: str) -> str:
    """A dot and a bar, the interval, for each (name, color, estimate)."""
    height = 24 * len(rows) + 34
    ends = [end for _, _, each in rows for end in (each.value, *(each.interval or ()))]
    across = _Axis.around(np.array(ends), _NAMES if len(rows) > 1 else 12, _WIDTH - 12)
    parts = [_svg(_WIDTH, height, label)]
    for tick, name in across.ticks():
        x = across.place(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} 4V{height - 28}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 14}" class="middle">{name}</text>')
    for number, (name, color, each) in enumerate(rows):
        y = 16 + 24 * number
        parts.append(f'<g class="c{color % COLORS}"><title>{plain(name)}: {each}</title>')
        if len(rows) > 1:
            short = name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"
            parts.append(f'<text x="{_NAMES - 8}" y="{y + 4}" class="end">{plain(short)}</text>')
        if each.interval:
            low, high = (across.place(end) for end in each.interval)
            parts.append(f'<path class="interval" d="M{low:.1f} {y}H{max(high, low + 0.5):.1f}"/>')
        parts.append(f'<circle class="dot" cx="{across.place(each.value):.1f}" cy="{y}" r="4"/></g>')
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    begin: float
    end: float

    @staticmethod
    def around(values: np.ndarray, begin: float, end: float) -> _Axis:
        low, high = float(values.min()), float(values.max())
        room = 0.03 * (high - low) or max(abs(high), 1.0) * 0.1
        # Counts and times begin at zero, where there is nothing to see below.
        return _Axis(0.0 if 0 <= low < 0.2 * high else low - room, high + room, begin, end)

    def place(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[tuple[float, str]]:
        """About five round numbers, with enough digits to tell them apart."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        ticks = [step * number for number in range(first, last + 1)]
        short = [_short(tick) for tick in ticks]
        return list(zip(ticks, short if len(set(short)) == len(ticks) else [f"{tick:.10g}" for tick in ticks]))


def _svg(width: int, height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{plain(label)}">'


def _points(curve: Curve, across: _Axis, up: _Axis) -> str:
    pairs = zip(curve[0].tolist(), curve[1].tolist())
    return " ".join(f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in pairs)


def _short(value: float) -> str:
    """A tick: 500k, 1.5M, 0.02."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return readable(value / size) + unit
    return readable(value)
