"""A web page in one file: no scripts, nothing loaded from elsewhere, light or dark as the reader prefers."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

COLORS = 8
"""Colors of lines and bars, c0 to c7; a further line repeats them, dashed (d1), then dotted (d2)."""
_STYLE = """
:root {
  color-scheme: light dark;
  --bg: #ffffff; --text: #1b1f24; --muted: #5b636c; --rule: #e1e5ea; --card: #f6f7f9; --good: #12754a; --bad: #b3261e;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0508a; --c4: #c98700; --c5: #4a9fd8; --c6: #6b7280;
  --c7: #8a7e00;
}
@media (prefers-color-scheme: dark) { :root {
  --bg: #14171a; --text: #e7e9ec; --muted: #a2abb5; --rule: #2e353c; --card: #1c2126; --good: #5dd39e; --bad: #ff8a80;
  --c0: #56a9e8; --c1: #ff8a4c; --c2: #3ccf9f; --c3: #e79bc9; --c4: #f2b840; --c5: #9fdcff; --c6: #b4bcc6;
  --c7: #d9d04f;
} }
@media print { :root {
  color-scheme: light;
  --bg: #ffffff; --text: #000000; --muted: #444444; --rule: #bbbbbb; --card: #ffffff; --good: #12754a; --bad: #b3261e;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0508a; --c4: #c98700; --c5: #4a9fd8; --c6: #6b7280;
  --c7: #8a7e00;
} }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 1.5rem; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; -webkit-print-color-adjust: exact;
  print-color-adjust: exact; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; } p { margin: .4rem 0; max-width: 75ch; }
a { color: var(--c0); } code { font: .88em ui-monospace, Menlo, Consolas, monospace; }
details td:last-child code { overflow-wrap: anywhere; }
.note { color: var(--muted); } .good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin: .8rem 0; }
.warning { border-left: 3px solid var(--c1); background: var(--card); padding: .4rem .8rem; margin: .5rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th { color: var(--muted); font-weight: 600; } td { font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: .8rem; margin: .8rem 0; }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: .6rem; break-inside: avoid; }
figcaption { font-size: .88rem; font-weight: 600; } svg { display: block; width: 100%; max-width: 560px; }
svg text { font-size: 11px; fill: var(--muted); } .end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--rule); } .axis { stroke: var(--muted); } .label { fill: var(--text); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.single { fill: none; stroke: var(--c); stroke-width: .8; opacity: .35; }
.band { fill: var(--c); opacity: .18; } .dot { fill: var(--c); }
.interval { stroke: var(--c); stroke-width: 7; opacity: .45; fill: none; }
.d1 .line { stroke-dasharray: 6 3; } .d2 .line { stroke-dasharray: 2 3; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .9rem; margin: .4rem 0; }
.legend i { display: inline-block; width: 1.1rem; margin-right: .4rem; border-top: 3px solid var(--c);
  vertical-align: middle; }
.legend .d1 i { border-top-style: dashed; } .legend .d2 i { border-top-style: dotted; }
.bar { display: inline-flex; width: 12rem; height: .9rem; border-radius: 3px; overflow: hidden; background: var(--rule);
  vertical-align: middle; }
.bar i { background: var(--c); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
video { max-width: 100%; max-height: 480px; border-radius: 8px; background: #000; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--muted); }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } nav, video, details { display: none; }
  section:has(> h2 + details:last-child), section:has(video) { display: none; }
  figure { border: 1px solid var(--rule); } h2, h3 { break-after: avoid; } tr { break-inside: avoid; }
  .charts { grid-template-columns: repeat(3, 1fr); } .scroll { overflow: visible; } table { font-size: 8pt; }
  th, td { padding-right: .5rem; } td:first-child, td code { overflow-wrap: anywhere; } }
"""


@dataclass(frozen=True)
class Section:
    """A chapter of the page."""

    anchor: str
    heading: str
    body: str
    """HTML."""


class Html(str):
    """Text of a table's cell that is HTML already."""


def document(title: str, summary: str, sections: Sequence[Section]) -> str:
    """The whole page; title and summary are plain text."""
    links = "".join(f'<a href="#{section.anchor}">{html.escape(section.heading)}</a>' for section in sections)
    chapters = "".join(
        f'<section id="{section.anchor}"><h2>{html.escape(section.heading)}</h2>{section.body}</section>\n'
        for section in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        f'<h1>{html.escape(title)}</h1><p class="note">{html.escape(summary)}</p><nav>{links}</nav>\n{chapters}'
        "</body></html>\n"
    )


def plain(text: str) -> str:
    """HTML that shows the text as it is."""
    return html.escape(text)


def heading(text: str) -> str:
    """A heading within a section."""
    return f"<h3>{html.escape(text)}</h3>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text; kind is note, warning or nothing."""
    return f'<p class="{kind}">{html.escape(text)}</p>' if kind else f"<p>{html.escape(text)}</p>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are plain text unless they are Html."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(caption: str, chart: str) -> str:
    """A chart with its caption."""
    return f"<figure><figcaption>{html.escape(caption)}</figcaption>{chart}</figure>"


def figures(charts: Sequence[str]) -> str:
    """Figures side by side, as many as fit."""
    return f'<div class="charts">{"".join(charts)}</div>'


def legend(entries: Sequence[tuple[str, int]]) -> str:
    """What the colors mean: (name, number of the color)."""
    items = "".join(
        f'<span class="c{c % COLORS} d{c // COLORS % 3}"><i></i>{html.escape(name)}</span>' for name, c in entries
    )
    return f'<div class="legend">{items}</div>'


def share_bar(shares: Mapping[str, float]) -> Html:
    """A stacked bar of shares of one whole, with the same in words for those who point at it."""
    words = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    pieces = "".join(
        f'<i class="c{number % COLORS}" style="width:{100 * share:.1f}%"></i>'
        for number, share in enumerate(shares.values())
        if share > 0
    )
    return Html(f'<span class="bar" title="{html.escape(words)}">{pieces}</span>')


def details(summary: str, body: str) -> str:
    """HTML that is folded until asked for; it is not printed."""
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>"


def _cell(cell: str) -> str:
    return cell if isinstance(cell, Html) else html.escape(cell)
