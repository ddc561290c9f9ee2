"""Writes a web page in one file, which loads nothing from elsewhere and is light or dark as the reader prefers."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from lockstep.reports.charts import Chart, grouped

_COLORS = 8
"""Number of colors of lines and bars, c0 to c7; further lines repeat them dashed (d1), then dotted (d2)."""
_AXES = {"samples": "Samples", "frames": "Frames", "updates": "Updates", "time": "Time"}


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    anchor: str
    heading: str
    body: str
    """HTML."""


class Html(str):
    """Text of a table's cell that is already HTML."""


def document(title: str, summary: str, controls: str, sections: Sequence[Section]) -> str:
    """The whole page; title and summary are plain text."""
    links = "".join(f'<a href="#{section.anchor}">{html.escape(section.heading)}</a>' for section in sections)
    chapters = "".join(
        f'<section id="{section.anchor}"><h2>{html.escape(section.heading)}</h2>{section.body}</section>\n'
        for section in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_packaged('page.css')}</style></head>\n<body>"
        f'<header><h1>{html.escape(title)}</h1><p class="note">{html.escape(summary)}</p><nav>{links}</nav></header>\n'
        f"{controls}\n{chapters}"
        f'<script type="application/gzip" id="plotly">{_plotly()}</script>\n'
        f"<script>{_packaged('charts.js')}</script>\n</body></html>\n"
    )


def _packaged(name: str) -> str:
    return (files("lockstep.reports") / "web" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """Plotly's JavaScript, compressed from 5 MB to 2 MB."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def plain(text: str) -> str:
    """HTML that shows the text literally."""
    return html.escape(text)


def heading(text: str) -> str:
    """A heading within a section."""
    return f"<h3>{html.escape(text)}</h3>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text; kind is note or empty."""
    return f'<p class="{kind}">{html.escape(text)}</p>' if kind else f"<p>{html.escape(text)}</p>"


def warnings(texts: Sequence[str]) -> str:
    """A box of warnings; empty without texts."""
    return f'<div class="warnings">{"".join(map(paragraph, texts))}</div>' if texts else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], places: Sequence[int | None] = ()) -> str:
    """A table; cells are plain text unless they are Html. Columns without any text are left out.

    Args:
        places: the run's index for each row, if the row is hidden together with its run.
    """
    rows = list(rows)
    kept = [n for n, name in enumerate(header) if not name or not rows or any(row[n] for row in rows)]
    head = "".join(f"<th>{html.escape(header[n])}</th>" for n in kept)
    marks = [f' data-run="{place}"' if place is not None else "" for place in places] or [""] * len(rows)
    body = "".join(
        f"<tr{mark}>" + "".join(f"<td>{_cell(row[n])}</td>" for n in kept) + "</tr>" for mark, row in zip(marks, rows)
    )
    kind = ' class="wide"' * (len(kept) > 3)
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def controls(
    chips: Sequence[str],
    methods: Sequence[str],
    runs: Sequence[Mapping[str, object]],
    axes: Mapping[str, str],
    *,
    banded: bool,
) -> str:
    """The legend of the methods, and the controls that charts.js reads.

    Args:
        chips: the legend's text for each method.
        methods: their names.
        runs: see charts.PageRuns.described.
        axes: the title of each horizontal axis.
        banded: whether methods are drawn with an interval instead of their runs.
    """
    buttons = "".join(
        f'<button type="button" class="c{n % _COLORS} d{n // _COLORS % 3}" data-method="{n}" aria-pressed="true" '
        f'title="Click to hide or show, double-click to show alone"><i></i>{html.escape(text)}</button>'
        for n, text in enumerate(chips)
    )
    choices = "".join(
        f'<label><input type="radio" name="x" value="{x}"{" checked" * (n == 0)}><span>{_AXES[x]}</span></label>'
        for n, x in enumerate(axes)
    )
    logarithmic = "Charts with values of zero or less stay linear"
    fields = [
        f'<fieldset aria-label="Horizontal axis"><span class="choice">{choices}</span></fieldset>',
        '<label>Smoothing <input type="range" name="smooth" min="0" max="30" value="0" '
        'title="Centered moving average, in percent of a curve"><output name="percent">off</output></label>',
        f'<label title="{logarithmic}"><input type="checkbox" name="logY">Log y</label>',
        f'<label title="{logarithmic}"><input type="checkbox" name="logX">Log x</label>',
        '<label><input type="checkbox" name="seeds">Single runs</label>' * banded,
        '<label><input type="search" name="filter" placeholder="Filter runs: seed=1 …" aria-label="Filter runs" '
        'title="Words of names and settings; runs that have all of them are shown">'
        '<output name="count"></output></label>',
    ]
    data = {"methods": list(methods), "runs": list(runs), "axes": dict(axes)}
    return (
        f'<div id="controls"><form hidden>{"".join(fields)}</form><div class="legend">{buttons}</div></div>'
        f"{_json(json.dumps(data, separators=(',', ':')), 'page')}"
    )


def figures(charts: Sequence[Chart], kind: str = "") -> str:
    """Charts side by side, as many as fit; kind: small, or whole for the full width of the page."""
    told = "".join(
        f"<figure><figcaption>{html.escape(chart.caption)}</figcaption>"
        f'<div class="chart {chart.spec["kind"]}" role="img" aria-label="{html.escape(chart.caption)}">'
        f"{_still(chart)}</div></figure>"
        for chart in charts
    )
    return f'<div class="charts {kind}">{told}{_json(grouped(charts))}</div>'


def figure(caption: str, content: str) -> str:
    """HTML with a caption."""
    return f"<figure><figcaption>{html.escape(caption)}</figcaption>{content}</figure>"


def key(names: Sequence[str]) -> str:
    """The legend for the colors of share bars."""
    items = "".join(f'<span class="c{n % _COLORS}"><i></i>{html.escape(name)}</span>' for n, name in enumerate(names))
    return f'<div class="legend">{items}</div>'


def share_bar(shares: Mapping[str, float]) -> Html:
    """A stacked bar of shares of one whole, with the shares as text in its tooltip."""
    words = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    pieces = "".join(
        f'<i class="c{number % _COLORS}" style="width:{100 * share:.1f}%"></i>'
        for number, share in enumerate(shares.values())
        if share > 0
    )
    return Html(f'<span class="bar" title="{html.escape(words)}">{pieces}</span>')


def details(summary: str, body: str, *, unfolded: bool = False) -> str:
    """HTML that can be folded; it is not printed."""
    return f"<details{' open' * unfolded}><summary>{html.escape(summary)}</summary>{body}</details>"


def _cell(cell: str) -> str:
    return cell if isinstance(cell, Html) else html.escape(cell)


def _json(text: str, name: str = "") -> str:
    mark = f' id="{name}"' if name else ""
    return f'<script type="application/json"{mark}>' + text.replace("<", "\\u003c") + "</script>"


def _still(chart: Chart) -> str:
    if not chart.still:
        return "<noscript>This chart needs JavaScript. The tables of the page have its numbers.</noscript>"
    picture = base64.b64encode(chart.still).decode()
    return f'<img alt="{html.escape(chart.caption)}" src="data:image/svg+xml;base64,{picture}">'
