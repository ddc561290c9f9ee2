"""The status of a run after an iteration: its numbers, its bottleneck, and whether its layout suits the machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.config.layout import Layout


@dataclass(frozen=True)
class Status:
    """The status of a run after an iteration. It contains all displayed numbers."""

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
    """Seconds per iteration that learners wait for `rollouts` and collectors for `parameters`, as recent means, if they
    are separate processes."""
    reported: dict[str, float] = field(default_factory=dict)
    """By name: means of env.metrics over recent episodes."""
    timing_decides: bool = False
    """Whether timing decides, so that another layout gives another result."""
    torch_threads: int = 1
    """Number of torch threads in each process."""

    @property
    def eta(self) -> float:
        """Seconds left at the current speed."""
        return (self.total_samples - self.samples) / max(1e-9, self.samples_per_second)


def bottleneck(status: Status, available_cores: int) -> str:
    """A sentence about the part that takes most of the time, with advice. It says if the advice changes the result."""
    if not any(status.shares.values()):
        return "No time measured yet."
    part = max(status.shares, key=lambda name: status.shares[name])
    share = f"{status.shares[part]:.0%}"
    layout, more = status.layout, min(status.shards, available_cores)
    if status.waits:
        return _balance(status)
    if layout.launcher.one_process and more > 1 and part != "waiting":
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
            f"{layout.workers} processes share {available_cores} cores; fewer would compete less for them"
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
    """As bottleneck, for separate collectors and learners: says which of them wait for the others."""
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
    remedy = f"more {role} ({len(present)} now), on separate cores, would help, which {result}"
    if layout.growing and role == "collectors":
        remedy = "more nodes for collectors would help, up to one collector for each shard"
    elif len(present) >= status.shards:
        remedy = f"each shard has one already, and more shards would allow more {role}, but change the result"
    return f"{what.format(f'{min(share, 1.0):.0%}')}: {remedy}."


_EXCHANGE_PAYS = 0.01
"""Seconds of work between two exchanges of gradients above which more processes are faster. An exchange takes about a
millisecond, and processes never arrive at the same moment."""
_MUCH = 0.5
"""Share of the time that processes may wait before it counts as waste."""


def waste(status: Status, available_cores: int, busy_cores: float) -> str | None:
    """How the layout wastes the machine's resources, with advice, in one paragraph; None if it suits the machine.

    Args:
        status: the status after enough iterations for meaningful shares.
        available_cores: the cores that this run may use.
        busy_cores: the cores that other programs used when the run began.
    """
    layout = status.layout
    result = "may change the result" if status.timing_decides else "gives the same result"
    idle = int(available_cores - busy_cores)
    best, reason = "", ""
    waiting = status.shares.get("waiting", 0.0)
    threads = layout.processes_here * status.torch_threads
    more, crowded = min(status.shards, idle), busy_cores > available_cores / 4  # other programs may cause the waiting
    if layout.uses_gpus:
        return None  # the speed of GPUs is unknown
    if threads > available_cores:
        each = f" with {status.torch_threads} torch threads each" * (status.torch_threads > 1)
        reason = f"{layout.processes_here} processes{each} compete for {available_cores} cores"
    elif layout.launcher.one_process:
        steps = status.updates / max(1, status.iteration)
        if more > 1 and status.iteration_seconds / (1 + steps) > _EXCHANGE_PAYS:
            best, reason = f"processes:{more}", f"it uses one of {idle} idle cores"
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
    return f"The layout {layout} wastes resources: {reason}. {instead}lockstep tune measures which is best."
