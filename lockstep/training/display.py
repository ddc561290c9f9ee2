"""The display of a running training: a live panel on a terminal, and plain lines otherwise."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from typing import Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.system.machine import cores_of_the_run
from lockstep.system.output import PatientConsole, on_terminal, print_line
from lockstep.training.status import Status, bottleneck

PARTS = {"env": "green", "inference": "cyan", "learning": "blue", "waiting": "yellow", "other": "bright_black"}
"""Parts of a worker's time, and their colors."""
PLAIN_INTERVAL = 5.0
"""Seconds between plain lines."""


def sparkline(values: list[float], width: int) -> str:
    """The finite values as bars of eight heights, averaged to at most `width` characters."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    bars = "▁▂▃▄▅▆▇█"
    if high == low:
        return bars[0] * width
    return "".join(bars[round((mean - low) / (high - low) * (len(bars) - 1))] for mean in means)


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 02:03, with days if there are any."""
    if seconds != seconds or seconds > 365 * 86400:
        return "--:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"
    return f"{days}d {clock}" if days else clock


def number(value: float | None) -> str:
    """Four significant digits, with an exponent only for very small and very large numbers."""
    if value is None:
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:.2e}"


class Display(Protocol):
    """Shows statuses and messages."""

    def update(self, status: Status) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self) -> None: ...


class NoDisplay:
    """Shows nothing."""

    def update(self, status: Status) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self) -> None: ...


class PlainDisplay:
    """Prints a line every few seconds, and one for the last iteration."""

    def __init__(self, title: str, folder: str) -> None:
        self._shown = float("-inf")
        self._print(title)
        self._print(f"run: {folder}")

    def update(self, status: Status) -> None:
        now = time.monotonic()
        if now - self._shown >= PLAIN_INTERVAL or status.iteration == status.iterations:
            self._shown = now
            self._print(plain_line(status))

    def message(self, text: str) -> None:
        self._print(text)

    def close(self) -> None: ...

    def _print(self, text: str) -> None:
        print_line(text, sys.stdout)


def plain_line(status: Status) -> str:
    """A status in one line."""
    shares = " ".join(f"{name} {share:.0%}" for name, share in status.shares.items())
    losses = " ".join(f"{name} {number(value)}" for name, value in _losses(status, 4).items())
    reported = "".join(f" {name} {number(value)}" for name, value in status.reported.items())
    return (
        f"iteration {status.iteration}/{status.iterations} | samples {status.samples:,} "
        f"({status.samples / status.total_samples:.1%}) | score {number(status.score)} (best {number(status.best)})"
        f"{reported} | "
        f"{status.samples_per_second:,.0f} samples/s {status.frames_per_second:,.0f} frames/s | {shares} | "
        f"lag {status.policy_lag:.2g} | {losses} | left {duration(status.eta)}"
    )


class LiveDisplay:
    """A panel that is redrawn below the messages."""

    def __init__(self, title: str, folder: str, console: Console | None = None) -> None:
        self._title = title
        self._folder = folder
        self._status: Status | None = None
        self._updated = time.monotonic()
        self._cores = cores_of_the_run()
        self._console = console or PatientConsole()
        self._live = Live(
            get_renderable=self._render, console=self._console, refresh_per_second=2, redirect_stderr=True
        )
        self._live.start()

    def update(self, status: Status) -> None:
        self._status, self._updated = status, time.monotonic()

    def message(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()

    def _render(self) -> RenderableType:
        since = time.monotonic() - self._updated
        return panel(self._status, self._title, self._folder, self._cores, since, self._console.width)


def panel(
    status: Status | None, title: str, folder: str, available_cores: int, since: float, width: int
) -> RenderableType:
    """The live panel. since: seconds since the status was reported; width: columns of the terminal."""
    frame = {"title": Text(title, style="bold"), "subtitle": Text(folder, style="dim"), "border_style": "blue"}
    if status is None:
        return Panel(Text(f"collecting the first rollout … {duration(since)}"), **frame)
    inner = max(20, min(width, 120) - 4)
    done = ProgressBar(total=status.total_samples, completed=status.samples, width=max(10, inner - 34))
    progress = Table.grid(padding=(0, 2))
    left = max(0.0, status.eta - since) if status.samples < status.total_samples else 0.0
    progress.add_row(done, f"{status.samples / status.total_samples:6.1%}", Text(f"ETA {duration(left)}", "bold"))
    numbers = Table.grid(padding=(0, 3))
    for _ in range(4):
        numbers.add_column()
    label = "bright_black"
    for cells in (
        ("samples", f"{status.samples:,} / {status.total_samples:,}", "samples/s", f"{status.samples_per_second:,.0f}"),
        ("frames", f"{status.frames:,}", "frames/s", f"{status.frames_per_second:,.0f}"),
        ("iteration", f"{status.iteration:,} / {status.iterations:,}", "elapsed", duration(status.seconds + since)),
        (
            "gradient steps",
            f"{status.updates:,}",
            "policy lag",
            f"{status.policy_lag:.3g} version{'' if status.policy_lag == 1 else 's'}",
        ),
    ):
        numbers.add_row(Text(cells[0], label), cells[1], Text(cells[2], label), cells[3])
    score = Table.grid(padding=(0, 3))
    score.add_row(
        Text("score", label),
        Text(number(status.score), "bold green"),
        Text("best", label),
        number(status.best),
        Text("episodes", label),
        f"{status.episodes:,}",
        Text("length", label),
        number(status.length),
    )
    losses, reported = (_named(numbers) for numbers in (_losses(status), status.reported))
    rows = [
        progress,
        Text(),
        numbers,
        Text(),
        score,
        *([reported] if reported else []),
        Text(sparkline(status.history, inner), "green"),
        Text(),
        _shares_bar(status.shares, inner),
        _shares_legend(status.shares),
        *([_waits_line(status.waits)] if status.waits else []),
        Text(),
        losses,
        Text("▸ " + bottleneck(status, available_cores), "italic"),
    ]
    return Panel(Group(*rows), width=inner + 4, **frame)


def make_display(kind: Literal["auto", "live", "plain", "none"], title: str, folder: str) -> Display:
    """The display of this kind."""
    if kind == "auto":
        kind = "live" if on_terminal() else "plain"
    if kind == "live":
        return LiveDisplay(title, folder)
    return PlainDisplay(title, folder) if kind == "plain" else NoDisplay()


def _losses(status: Status, most: int = 8) -> dict[str, float]:
    shown = [(name, value) for name, value in status.metrics.items() if not name.startswith("hyper/")]
    return dict(shown[:most])


def _named(numbers: dict[str, float]) -> Text:
    line = Text()
    for name, value in numbers.items():
        line.append(f"{name}\u00a0", "bright_black").append(f"{number(value)}   ")
    return line


def _waits_line(waits: dict[str, float]) -> Text:
    line = Text()
    for name, who in (("rollouts", "learners"), ("parameters", "collectors")):
        line.append(f"{who} wait for {name}\u00a0", "bright_black").append(f"{waits[name]:.3g}\u00a0s   ")
    return line


def _shares_bar(shares: dict[str, float], width: int) -> Text:
    bar, drawn, total = Text(), 0, 0.0
    for name, share in shares.items():
        total += share
        end = round(total * width)
        bar.append("█" * (end - drawn), PARTS.get(name, "white"))
        drawn = end
    return bar


def _shares_legend(shares: dict[str, float]) -> Text:
    legend = Text()
    for name, share in shares.items():
        legend.append("■\u00a0", PARTS.get(name, "white")).append(f"{name}\u00a0{share:.0%}   ")
    return legend
