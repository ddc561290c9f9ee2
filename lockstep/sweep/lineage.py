"""The figure of a population: the scores and settings of its members, and the ancestors of the best one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lockstep.reports.plots import COLORS, STYLE
from lockstep.reports.runs import SCORES, X_LABELS
from lockstep.run.files import writing
from lockstep.sweep.generations import Generations, Member
from lockstep.sweep.search import OneOf
from lockstep.sweep.spec import task
from lockstep.training.logger import WINDOW

_WIDTH, _HEIGHT, _LOW = 8.5, 4.0, 1.7
"""Inches: the figure's width, the height of the scores, and the height of each setting."""


def draw(population: Generations, out: Path) -> Path:
    """Draw a population in which at least one generation has ended.

    Args:
        population: read from its folder.
        out: file to write; its suffix chooses the format.

    Returns:
        The path written.
    """
    best = population.best()
    assert best is not None
    line = population.ancestry(best)
    others = [member for member in population.all() if member.state == "done" and member not in line]
    search, space = population.search, population.search.space
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT + _LOW * len(space)), dpi=150, layout="constrained")
        heights = [_HEIGHT, *([_LOW] * len(space))]
        score, *settings = figure.subplots(1 + len(space), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
        for axes in (score, *settings):
            axes.margins(x=0.01)
        for member in (*others, *line):
            chosen = member in line
            _reached(score, population, member, chosen=chosen)
            for axes, (name, values) in zip(settings, space.items(), strict=True):
                value = member.values[name]
                height = values.values.index(value) if isinstance(values, OneOf) else value
                x = [(member.generation - 1) * search.steps, member.generation * search.steps]
                axes.plot(x, [height, height], **_look(chosen=chosen))
        for axes, (name, values) in zip(settings, space.items(), strict=True):
            axes.set_title(name, fontsize=10, fontweight="normal", pad=4)
            if isinstance(values, OneOf):
                axes.set_yticks(range(len(values.values)), [str(value) for value in values.values])
            elif values.log:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("")
        score.set_title(f"{task(search.run.experiment)}: {search.members} members, {best.generation} generations")
        score.set_ylabel("Episode return (raw score)" if search.objective in SCORES else search.objective)
        score.plot([], [], label="ancestors of the best member, and itself", **_look(chosen=True))
        score.plot([], [], label="the others", **_look(chosen=False))
        score.legend(loc="lower right", labelcolor="#333333", frameon=True, edgecolor="none", framealpha=0.9)
        settings[-1].set_xlabel(f"{X_LABELS['samples']} of one member")
        settings[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
        with writing(out):
            figure.savefig(out)
    return out


def _reached(axes: Axes, population: Generations, member: Member, *, chosen: bool) -> None:
    search = population.search
    lines = [line for line in population.measured(member) if line.get(search.objective) is not None]
    if search.objective in SCORES[:2] and lines:
        # The first episodes that end are the short ones, and say nothing about the weights that the member started
        # from.
        enough = min(WINDOW, lines[-1].get("episodes", 0) // 2)
        lines = [line for line in lines if line.get("episodes", 0) >= enough]
    before = (member.generation - 1) * search.steps
    axes.plot([before + x["samples"] for x in lines], [x[search.objective] for x in lines], **_look(chosen=chosen))


def _look(*, chosen: bool) -> dict[str, Any]:
    color, width = (COLORS[0], 2.2) if chosen else ("#AAAAAA", 0.8)
    return {"color": color, "linewidth": width, "zorder": 2 + chosen, "solid_capstyle": "butt"}
