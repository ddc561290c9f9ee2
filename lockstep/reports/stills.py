"""Images of a report's curves for readers without JavaScript."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lockstep.reports.plots import COLORS, STYLE


def still(lines: Sequence[dict[str, Any]], names: Sequence[str], x_label: str, y_label: str) -> bytes:
    """An SVG image of some lines (see charts.PageRuns) over samples; names: of the methods."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4))
        axes = figure.add_axes((0.07, 0.13, 0.91, 0.84))
        for line in lines:
            color, single = COLORS[line["method"] % len(COLORS)], line["role"] == "single"
            dashes = ("-", "--", ":")[line["method"] // len(COLORS) % 3]
            at = line["by"].get("samples") if "by" in line else {"x": line["x"]["samples"], "y": line["y"]}
            if not at or (single and len(lines) > 40):
                continue
            (drawn,) = axes.plot(at["x"], at["y"], color=color, linestyle=dashes, linewidth=0.7 if single else 2.0)
            drawn.set(alpha=0.35) if single else drawn.set(label=names[line["method"]])
            drawn.set(marker="o" if len(at["x"]) == 1 else "")
            if "low" in at:
                axes.fill_between(at["x"], at["low"], at["high"], color=color, alpha=0.18, linewidth=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.margins(x=0.01)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if 1 < len(axes.get_legend_handles_labels()[1]) <= 2 * len(COLORS):
            axes.legend(loc="best", labelcolor="#333333", fontsize=8)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
        return picture.getvalue()
