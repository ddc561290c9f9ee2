"""The display of a running sweep: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.sweep.queue import State
from lockstep.sweep.slots import SHARED
from lockstep.system.output import PatientConsole, on_terminal, print_line
from lockstep.training.display import duration, number

PLAIN_INTERVAL = 30.0
"""Seconds between plain lines about the running runs."""
COLORS: dict[State, str] = {
    "done": "green",
    "stopped": "yellow",
    "failed": "red",
    "running": "blue",
    "waiting": "bright_black",
}


@dataclass(frozen=True)
class Row:
    """A run that is running."""

    name: str
    where: str
    """Its cores and GPUs."""
    samples: int
    total: int
    score: float | None
    rate: float
    """Agent samples a second; 0 while it is starting."""
    pending: bool = False
    """Whether it is still waiting for a machine."""

    @property
    def share(self) -> float:
        return min(1.0, self.samples / max(1, self.total))

    @property
    def left(self) -> str:
        if self.pending:
            return "pending"
        if not self.rate:
            return "starting"
        if self.samples >= self.total:
            return "finishing"  # such as its last evaluation
        return duration((self.total - self.samples) / self.rate)


@dataclass(frozen=True)
class Picture:
    """The state of a sweep at one moment."""

    counts: dict[State, int]
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds since the sweep was started or continued."""

    def summary(self) -> str:
        """3 done · 2 running · 10 waiting"""
        return " · ".join(f"{self.counts[state]} {state}" for state in COLORS if self.counts.get(state))


class Overview(Protocol):
    """Shows the state of the sweep, and messages."""

    def update(self) -> None: ...
    def message(self, text: str, style: str = "") -> None: ...
    def close(self) -> None: ...


class NoOverview:
    """Shows nothing."""

    def update(self) -> None: ...
    def message(self, text: str, style: str = "") -> None: ...
    def close(self) -> None: ...


class PlainOverview:
    """Prints a line for each event, and every half minute a line about the running runs."""

    def __init__(self, picture: Callable[[], Picture]) -> None:
        self._picture = picture
        self._shown = time.monotonic()

    def update(self) -> None:
        if time.monotonic() - self._shown >= PLAIN_INTERVAL:
            self._shown = time.monotonic()
            self.message(plain_line(self._picture()))

    def message(self, text: str, style: str = "") -> None:
        print_line(text, sys.stdout)

    def close(self) -> None: ...


def plain_line(picture: Picture) -> str:
    """The state of a sweep in one line."""
    rows = [f"{row.name} {row.share:.0%} score {number(row.score)} left {row.left}" for row in picture.rows]
    return " | ".join([picture.summary(), *rows])


class LiveOverview:
    """A table of the running runs, redrawn below the messages."""

    def __init__(self, picture: Callable[[], Picture], title: str) -> None:
        self._picture, self._title = picture, title
        self._console = PatientConsole()
        self._live = Live(self._render(), console=self._console, auto_refresh=False)
        self._live.start()

    def update(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._live.update(self._render(), refresh=True)

    def message(self, text: str, style: str = "") -> None:
        with contextlib.suppress(OSError):
            self._console.print(Text(text, style=style))

    def close(self) -> None:
        self.update()
        with contextlib.suppress(OSError):
            self._live.stop()

    def _render(self) -> RenderableType:
        return fitting(self._console, self._picture(), self._title)


def fitting(console: Console, picture: Picture, title: str) -> RenderableType:
    """The live table, with as many runs as fit the terminal: rich would cut off the counts at the bottom."""
    shown = len(picture.rows)
    while shown > 1 and (over := len(console.render_lines(panel(picture, title, shown))) - console.height + 1) > 0:
        shown -= max(1, min(over // 3, shown - 1))  # a long name wraps over several lines
    return panel(picture, title, shown)


def panel(picture: Picture, title: str, most: int = 1_000) -> RenderableType:
    """The live table, with at most this many runs."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(overflow="fold")  # names differ at their ends
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, ratio=1, width=8)  # bars get the width that names leave, but at least this
    for _ in range(2):
        table.add_column(no_wrap=True, justify="right")
    if picture.rows:
        table.add_row(*(Text(name, "bright_black") for name in ("run", "on", "", "score", "left")))
    for row in picture.rows[:most]:
        bar = ProgressBar(total=1.0, completed=row.share)
        table.add_row(row.name, row.where.replace(SHARED, "*"), bar, Text(number(row.score), "bold green"), row.left)
    if most < len(picture.rows):
        table.add_row(Text(f"… and {len(picture.rows) - most} more", "bright_black"), *[""] * 4)
    counts = Text()
    for state, color in COLORS.items():
        if picture.counts.get(state):
            counts.append(f"{picture.counts[state]} {state}", color).append("   ")
    grid = Table.grid(expand=True)
    if picture.rows:
        grid.add_row(table)
    if any(SHARED in row.where for row in picture.rows[:most]):
        grid.add_row(Text(f"*{SHARED}", "bright_black"))
    grid.add_row(counts)
    subtitle = Text(duration(picture.seconds), style="dim")
    return Panel(grid, title=Text(title, style="bold"), subtitle=subtitle, border_style="blue")


def make_overview(
    kind: Literal["auto", "live", "plain", "none"], picture: Callable[[], Picture], title: str
) -> Overview:
    """The overview of the given kind."""
    if kind == "auto":
        kind = "live" if on_terminal() else "plain"
    if kind == "live":
        return LiveOverview(picture, title)
    return PlainOverview(picture) if kind == "plain" else NoOverview()
