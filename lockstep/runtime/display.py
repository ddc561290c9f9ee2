"""What a person watching a run sees: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.layout import Layout
from lockstep.runtime.output import PatientConsole, on_terminal, tell

PARTS = {"env": "green", "inference": "cyan", "learning": "blue", "waiting": "yellow", "other": "bright_black"}
"""Where a worker's time goes, and the color of each part."""
PLAIN_INTERVAL = 5.0
"""Seconds between plain lines."""


@dataclass(frozen=True)
class Status:
    """A run after some iteration; every number that is shown comes from here."""

    iteration: int
    iterations: int
    samples: int
    total_samples: int
    frames: int
    updates: int
    samples_per_second: float
    frames_per_second: float
    seconds: float
    iteration_seconds: float
    score: float | None
    best: float | None
    length: float | None
    episodes: int
    history: list[float]
    shares: dict[str, float]
    policy_lag: float
    metrics: dict[str, float]
    layout: Layout
    shards: int
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds of an iteration, recent mean: of learners for `rollouts`, of collectors for `parameters`, if these are
    processes of their own."""
    timing_decides: bool = False
    """Whether timing decides, so that another layout gives another result."""
    torch_threads: int = 1
    """That each process computes with."""

    @property
    def eta(self) -> float:
        """Seconds left at the present speed."""
        return (self.total_samples - self.samples) / max(1e-9, self.samples_per_second)


def cores() -> int:
    """CPU cores that this process may use, of which a container's quota may allow fewer than it shows."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no quota ("max"), or no cgroups of version 2
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        return min(allowed, max(1, math.ceil(quota / period)))
    return allowed


def bottleneck(status: Status, available_cores: int) -> str:
    """One sentence: what most of the time goes to, and what to try. Advice that changes the result says so."""
    if not any(status.shares.values()):
        return "No time measured yet."
    part = max(status.shares, key=lambda name: status.shares[name])
    share = f"{status.shares[part]:.0%}"
    layout, more = status.layout, min(status.shards, available_cores)
    if status.waits:
        return _balance(status)
    if layout.backend == "inline" and more > 1 and part != "waiting":
        names = {"env": "stepping environments", "inference": "choosing actions", "learning": "gradient steps"}
        return (
            f"One process does everything, {share} of it {names.get(part, part)}: --layout processes:{more} uses "
            f"{more} of this machine's {available_cores} cores and gives the same result."
        )
    room = layout.workers < more
    spread = f"--layout processes:{more} spreads it over more cores, with the same result" if room else ""
    advice = {
        "env": (
            f"Stepping environments takes {share}",
            spread or "a faster adapter (--env.adapter) or a machine with more cores would help",
        ),
        "inference": (
            f"Choosing actions takes {share}",
            spread or "a larger --scheme.acting-batch needs fewer calls, but changes the result",
        ),
        "learning": (
            f"Gradient steps take {share}",
            spread or "fewer --algorithm.epochs or a smaller model cost less, but change the result",
        ),
        "waiting": (
            f"Workers wait for each other {share} of the time",
            f"{layout.workers} processes share {available_cores} cores; fewer would crowd less"
            if layout.workers > available_cores
            else "a number of processes that divides --scheme.shards balances them",
        ),
        "other": (
            f"Bookkeeping takes {share}",
            "more environments (--env.num-envs) make each call larger, but change the result",
        ),
    }
    what, remedy = advice[part]
    return f"{what}: {remedy}."


def _balance(status: Status) -> str:
    """The same for collectors and learners of their own: who waits for whom."""
    layout, seconds = status.layout, max(1e-9, status.iteration_seconds)
    rollouts, parameters = (status.waits[name] / seconds for name in ("rollouts", "parameters"))
    result = "may change the result" if status.timing_decides else "gives the same result"
    roles = {
        "rollouts": (rollouts, "Learners wait {} of the time for rollouts", "collectors", layout.collectors),
        "parameters": (parameters, "Collectors wait {} of the time for parameters", "learners", layout.learners),
    }
    share, what, role, present = max(roles.values(), key=lambda entry: entry[0])
    if share < 0.1:
        return "Collectors and learners keep each other busy: neither waits a tenth of the time."
    remedy = f"more {role} ({len(present)} now), on cores of their own, would help, which {result}"
    if len(present) >= status.shards:
        remedy = f"there is one for each shard already: more shards allow more {role}, but change the result"
    return f"{what.format(f'{share:.0%}')}: {remedy}."


_EXCHANGE_PAYS = 0.01
"""Seconds of work between two exchanges of gradients from which on more processes are faster: an exchange takes about a
millisecond, and the processes never arrive at the same moment."""
_MUCH = 0.5
"""Share of the time that processes may wait before it is called a waste."""


def waste(status: Status, available_cores: int, busy_cores: float) -> str | None:
    """What the layout wastes of the machine and what to take instead, in one paragraph; None if it suits.

    Args:
        status: after enough iterations that its shares mean something.
        busy_cores: cores that other programs had been using when the run began.
    """
    layout = status.layout
    result = "may change the result" if status.timing_decides else "gives the same result"
    idle = int(available_cores - busy_cores)
    best, reason = "", ""
    waiting = status.shares.get("waiting", 0.0)
    threads = layout.processes * status.torch_threads
    more, crowded = min(status.shards, idle), busy_cores > available_cores / 4  # then others may make them wait
    if on_gpus(layout):
        return None  # what they are capable of is not known here
    if threads > available_cores:
        each = f" with {status.torch_threads} torch threads each" * (status.torch_threads > 1)
        reason = f"{layout.processes} processes{each} crowd {available_cores} cores"
    elif layout.backend == "inline":
        steps = status.updates / max(1, status.iteration)
        if more > 1 and status.iteration_seconds / (1 + steps) > _EXCHANGE_PAYS:
            best, reason = f"processes:{more}", f"one of {idle} idle cores is used"
    elif layout.split and status.policy_lag == 0 and not status.timing_decides:
        best = f"processes:{min(status.shards, layout.processes)}"
        reason = "with --scheme.lag 0 collectors and learners take turns, and one side always idles"
    elif crowded:
        return None
    elif status.waits:
        seconds = max(1e-9, status.iteration_seconds)
        who, share = max(((name, status.waits[name] / seconds) for name in status.waits), key=lambda entry: entry[1])
        if share > _MUCH:
            role = "learners" if who == "rollouts" else "collectors"
            reason = f"{role} wait {min(share, 1.0):.0%} of the time for {who}"
    elif layout.workers > 1 and waiting > _MUCH:
        worth = layout.workers * (1 - waiting)
        reason = (
            f"{layout.workers} processes wait {waiting:.0%} of the time for each other and do the work of {worth:.1f}"
        )
        best = "inline" if worth < 1.2 else ""
    if not reason:
        return None
    instead = f"--layout {best} is likely faster and {result}; " if best else ""
    return f"The layout {layout} wastes the machine: {reason}. {instead}lockstep tune measures which is best."


def on_gpus(layout: Layout) -> bool:
    """Whether any process computes on one."""
    return any(device != "cpu" for device in (layout.device, *layout.collectors, *layout.learners))


def sparkline(values: list[float], width: int) -> str:
    """The finite values as bars of eight heights, averaged down to at most width characters."""
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
    """1:02:03 or 02:03; days where there are some."""
    if seconds != seconds or seconds > 365 * 86400:
        return "--:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"
    return f"{days}d {clock}" if days else clock


def number(value: float | None) -> str:
    """Four significant digits, without exponents where they are readable."""
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
    """A line every few seconds, and one for the last iteration."""

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
        tell(text, sys.stdout)


def plain_line(status: Status) -> str:
    """A status in one line."""
    shares = " ".join(f"{name} {share:.0%}" for name, share in status.shares.items())
    losses = " ".join(f"{name} {number(value)}" for name, value in _losses(status, 4).items())
    return (
        f"iteration {status.iteration}/{status.iterations} | samples {status.samples:,} "
        f"({status.samples / status.total_samples:.1%}) | score {number(status.score)} (best {number(status.best)}) | "
        f"{status.samples_per_second:,.0f} samples/s {status.frames_per_second:,.0f} frames/s | {shares} | "
        f"lag {status.policy_lag:.2g} | {losses} | left {duration(status.eta)}"
    )


class LiveDisplay:
    """A panel that redraws itself below the messages."""

    def __init__(self, title: str, folder: str, console: Console | None = None) -> None:
        self._title = title
        self._folder = folder
        self._status: Status | None = None
        self._updated = time.monotonic()
        self._cores = cores()
        self._console = console or PatientConsole()
        self._live = Live(
            get_renderable=self._render, console=self._console, refresh_per_second=2, redirect_stderr=True
        )
        self._live.start()

    def update(self, status: Status) -> None:
        self._status, self._updated = status, time.monotonic()

    def message(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone
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
    losses = Text()
    for name, value in _losses(status).items():
        losses.append(f"{name}\u00a0", label).append(f"{number(value)}   ")
    rows = [
        progress,
        Text(),
        numbers,
        Text(),
        score,
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
    """The display that the options ask for."""
    if kind == "auto":
        kind = "live" if on_terminal() else "plain"
    if kind == "live":
        return LiveDisplay(title, folder)
    return PlainDisplay(title, folder) if kind == "plain" else NoDisplay()


def _losses(status: Status, most: int = 8) -> dict[str, float]:
    shown = [(name, value) for name, value in status.metrics.items() if not name.startswith("hyper/")]
    return dict(shown[:most])


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
