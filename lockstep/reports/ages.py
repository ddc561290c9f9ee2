"""The section of a report about the age of training data (PL), the age of gradients (GA), and which processes waited
for which.

Metrics hold both for each iteration. Which collector and which learner they belong to follows from the ledger.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.core.shards import holder
from lockstep.evaluation.statistics import readable
from lockstep.reports import page
from lockstep.reports.charts import Chart, PageRuns
from lockstep.reports.curves import changing
from lockstep.reports.page import Html
from lockstep.reports.runs import Method, Run
from lockstep.run import ledger
from lockstep.run.folder import RunFolder
from lockstep.scheme import Scheme

_CHARTS = {
    "lag/policy_versions": "PL: versions, mean over samples",
    "lag/policy_versions_max": "PL: versions, oldest samples",
    "lag/gradient_steps": "PL: gradient steps, mean over samples",
    "lag/gradient_steps_max": "PL: gradient steps, oldest samples",
    "lag/gradient_asynchrony": "GA: updates, mean over gradients",
    "lag/gradient_asynchrony_max": "GA: updates, oldest gradient",
    "lag/kept": "Share of the samples that preemption kept",
    "wait/rollouts": "Seconds of an iteration in which learners waited for rollouts",
    "wait/parameters": "Seconds of an iteration in which collectors waited for parameters",
    "time/waiting": "Share of the time in which processes waited",
}
"""Captions of charts over time, by metric."""


@dataclass
class Ages:
    """The ages of the samples or gradients that one process supplied."""

    rollouts: int = 0
    """Of a collector, 0 for a learner."""
    kept: int = 0
    """Steps of its rollouts that preemption kept."""
    versions: Counter[int] = field(default_factory=Counter)
    """Steps by their age in versions; of a learner, gradients by their age in updates."""
    steps: Counter[int] = field(default_factory=Counter)
    """Steps by their age in gradient steps."""


def of_policy(run: Run, lines: Sequence[dict[str, Any]]) -> dict[str, Ages]:
    """How old the data of each collector was when it was learned from; lines: the ledger's."""
    length, shards = run.settings.get("algorithm.rollout"), run.settings.get("scheme.shards")
    if not isinstance(length, int) or not isinstance(shards, int):
        return {}
    updates = {0: 0.0} | {int(r["iteration"] or 0): r["updates"] or 0.0 for r in run.records if "updates" in r}
    who = _who(run, shards, learners=False)
    found: dict[str, Ages] = defaultdict(Ages)
    for line in lines:
        iteration, cuts = line["iteration"], dict(line.get("cuts", ()))
        for shard, acting in _acted(line, shards):
            ages = found[who(iteration, shard)]
            ages.rollouts += 1
            ages.kept += cuts.get(shard, length)
            for (begin, version), end in zip(acting, [t for t, _ in acting[1:]] + [length], strict=True):
                ages.versions[iteration - version] += end - begin
                if iteration in updates and version in updates:
                    ages.steps[round(updates[iteration] - updates[version])] += end - begin
    return dict(found)


def _acted(line: dict[str, Any], shards: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Each rollout that an iteration learned from: its shard, and which versions acted in it from which step on."""
    if "events" in line:
        for event in line["events"]:
            yield event["shard"], [(t, version) for t, version in event["versions"]]
    else:
        for shard in range(shards):
            yield shard, [(0, line["collected_with"])]


def of_gradients(run: Run, lines: Sequence[dict[str, Any]]) -> dict[str, Ages]:
    """How many updates each learner's gradients were behind, if they are asynchronous; lines: the ledger's."""
    shards = run.settings.get("scheme.shards")
    found: dict[str, Ages] = defaultdict(Ages)
    if isinstance(shards, int):
        who = _who(run, shards, learners=True)
        for line in lines:
            for slot, behind in line.get("updates", ()):
                found[who(line["iteration"], slot)].versions[behind] += 1
    return dict(found)


def _who(run: Run, shards: int, *, learners: bool) -> Callable[[int, int], str]:
    """Names the process that collected a shard, or learned from a batch slot, in an iteration."""
    resumed = run.facts.get("resumed", [])
    begins = [0, *(int(each.get("iteration", 0)) for each in resumed)]
    layouts = [_layout(each.get("layout")) for each in (run.facts, *resumed)]
    several = len({str(layout) for layout in layouts}) > 1

    def name(iteration: int, shard: int) -> str:
        layout = layouts[bisect.bisect_right(begins, iteration) - 1]
        if layout is None or (layout.growing and not learners):  # shards move between collectors
            return f"shard {shard}"
        role = ("learner" if learners else "collector") if layout.split else "process"
        count = layout.learning if learners else layout.collecting
        return f"{role} {holder(shards, count, shard, layout.copies)}" + f" of {layout}" * several

    return name


def _layout(text: object) -> Layout | None:
    """A run's layout; None if it does not say which process holds a shard."""
    try:
        layout = Layout.parse(str(text))
        return None if layout.launcher.started_externally else layout
    except SettingsError:  # a launcher of the user's, whose file is elsewhere now
        return None


def section(runs: Sequence[Run], groups: Sequence[Method], named: Sequence[str], drawn: PageRuns) -> str:
    """PL and GA of each run, over time, and of each process; who waited for whom. Empty if no run had any lag."""
    if not any(run.settings.get("scheme.lag") or any(map(run.average, run.names("lag/"))) for run in runs):
        return ""
    text = (
        "PL, the policy lag, is the age of samples: how many versions, or gradient steps, the policy that collected "
        "them was behind the one that learned from them. GA, the gradient asynchrony, is the age of gradients: how "
        "many updates came between the parameters that a gradient was computed with and those that it changed. Values "
        "are means over iterations, and the oldest is that of the whole run."
    )
    parts = [_means(runs), page.paragraph(text, "note"), _by_process(runs), _waits(runs)]
    for task in named:
        found = [_captioned(chart) for chart in changing(groups, task, list(_CHARTS), drawn)]
        if found:
            title = f"{task}: " * (len(named) > 1) + "over time"
            parts.append(page.details(title, page.figures(found, "small"), unfolded=len(named) == 1))
    return "".join(parts)


def _means(runs: Sequence[Run]) -> str:
    """A row for all runs with the same means."""
    by_cells: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        known = [name for name in run.names("lag/share_") if name.split("_")[1].isdigit()]
        counted = sorted(known, key=lambda name: int(name.split("_")[1]))
        shares = {f"{name.split('_')[1]} behind": run.average(name) for name in counted}
        cells = [
            _bounded(run, "lag"),
            _number(run.average("lag/policy_versions")),
            _number(run.largest("lag/policy_versions_max")),
            _number(run.average("lag/gradient_steps")),
            _number(run.average("lag/versions_per_trajectory")),
            _bounded(run, "gradient_lag"),
            _number(run.average("lag/gradient_asynchrony")),
            _number(run.largest("lag/gradient_asynchrony_max")),
            "" if math.isnan(run.average("lag/kept")) else f"{run.average('lag/kept'):.1%}",
        ]
        by_cells.setdefault((*cells, _bar(shares)), []).append(run.name)
    header = ["Run", "Lag", "PL, versions", "Oldest", "PL, gradient steps", "Versions in a trajectory"]
    header += ["Gradient lag", "GA, updates", "Oldest", "Samples kept", "Samples by versions behind"]
    return page.table(header, [[", ".join(names), *cells] for cells, names in by_cells.items()])


def _bounded(run: Run, name: str) -> str:
    """A lag as it was set, with its bound if timing decides it; empty for gradients that are summed."""
    left_out = {each: getattr(Scheme, each) for each in Scheme.later}  # by files, if it is the default
    lag, most = (run.settings.get(f"scheme.{each}", left_out.get(each, "")) for each in (name, f"max_{name}"))
    if name == "gradient_lag" and not lag:
        return ""
    return f"{lag}, at most {most}" if lag == "async" and most != "" else str(lag)


def _number(value: float) -> str:
    return "" if math.isnan(value) else readable(value)


def _by_process(runs: Sequence[Run]) -> str:
    """A row for each collector of each run, and one for each learner."""
    collectors, learners = list[list[str]](), list[list[str]]()
    for run in runs:
        try:
            _, lines = ledger.read(RunFolder(run.path).ledger)
        except ledger.LedgerError:  # the section Proof says so
            continue
        policy, length = of_policy(run, lines), run.settings.get("algorithm.rollout", 1)
        total = sum(ages.rollouts for ages in policy.values())
        for name, ages in sorted(policy.items(), key=_in_order):
            shown = [f"{ages.rollouts / total:.1%}", *_spread(ages.versions), *_spread(ages.steps)]
            kept = f"{ages.kept / (ages.rollouts * length):.1%}" if any("cuts" in line for line in lines) else ""
            collectors.append([run.name, name, *shown, kept, _bar(_shares(ages.versions))])
        for name, ages in sorted(of_gradients(run, lines).items(), key=_in_order):
            shown = [f"{ages.versions.total():,}", *_spread(ages.versions), _bar(_shares(ages.versions))]
            learners.append([run.name, name, *shown])
    parts = []
    if collectors:
        header = ["Run", "Collector", "Rollouts", "PL, versions", "Oldest", "PL, gradient steps", "Oldest"]
        header += ["Samples kept", "Samples by versions behind"]
        parts += [page.heading("Policy lag of each collector"), page.table(header, collectors)]
    if learners:
        header = ["Run", "Learner", "Gradients", "GA, updates", "Oldest", "Gradients by updates behind"]
        parts += [page.heading("Gradient asynchrony of each learner"), page.table(header, learners)]
    return "".join(parts)


def _in_order(named: tuple[str, Ages]) -> tuple[str | int, ...]:
    """Collector 10 comes after collector 2."""
    role, number, *rest = named[0].split(" ", 2)
    return (*rest, role, int(number))


def _spread(ages: Counter[int]) -> list[str]:
    """The mean and the largest age."""
    if not ages:
        return ["", ""]
    return [readable(sum(age * n for age, n in ages.items()) / ages.total()), str(max(ages))]


def _shares(ages: Counter[int]) -> dict[str, float]:
    return {f"{age} behind": ages[age] / ages.total() for age in sorted(ages)}


def _bar(shares: dict[str, float]) -> Html | str:
    told = ", ".join(
        f"{name.split()[0]}:\N{NO-BREAK SPACE}{share:.0%}" for name, share in shares.items() if share >= 0.005
    )
    return Html(f"{page.share_bar(shares)} {told}") if shares else ""


def _waits(runs: Sequence[Run]) -> str:
    """A row for each run: which role waited for which."""
    rows = []
    for run in runs:
        first = _beginning(len(run.records))
        records = run.records[first:]
        if not records:
            continue
        before = run.records[-len(records) - 1] if len(records) < len(run.records) else {}
        seconds, iterations = ((records[-1].get(x) or 0.0) - (before.get(x) or 0.0) for x in ("seconds", "iteration"))
        if not seconds > 0:
            continue
        each = iterations / len(records) / seconds  # very long runs lack most records
        waited = {name: each * sum(record.get(f"wait/{name}") or 0.0 for record in records) for name in _WAITS}
        among = run.share("time/waiting", first)
        cells = [f"{waited[name]:.1%}" if run.has(f"wait/{name}") else "" for name in _WAITS]
        cells.append("" if math.isnan(among) else f"{among:.1%}")
        rows.append([run.name, *cells, _limit(waited) if all(cells[: len(waited)]) else ""])
    if not any("".join(row[1:]) for row in rows):
        return ""
    header = ["Run", *_WAITS.values(), "All processes waited", "The slower side"]
    text = (
        "Shares of the training time after the first tenth of the iterations, in which processes start and kernels are "
        "compiled. Of learners, the one that waited longest counts; of collectors, the mean, which includes waits for "
        "a free buffer. All processes also wait for others of their role. The slower side is the one that the other "
        "waited for: for a tenth of the time or more, and twice as long as the other way around. Where both waited as "
        "long, they take turns, or messages take the time."
    )
    return page.heading("Who waited for whom") + page.table(header, rows) + page.paragraph(text, "note")


def _beginning(iterations: int) -> int:
    """How many iterations do not count for waits: in the first tenth, processes start and kernels are compiled."""
    return math.ceil(iterations / 10) if iterations > 1 else 0


def _captioned(chart: Chart) -> Chart:
    """The chart of a metric with a caption. Waits of the beginning may be a hundred times as long as later ones: those
    charts reach up to the highest value after it."""
    caption, top = _CHARTS[chart.caption], 0.0
    lines = [[value or 0.0 for value in line["y"]] for line in chart.spec["lines"]]
    if chart.caption.startswith("wait/"):
        top = 1.1 * max(max(line[_beginning(len(line)) :], default=0.0) for line in lines)
    if not 0 < top < max(max(line, default=0.0) for line in lines):
        return Chart(caption, chart.spec)
    return Chart(f"{caption}; the beginning is higher", {**chart.spec, "range": [-0.05 * top, top]})


def _limit(waited: dict[str, float]) -> str:
    """The role that limits the speed, by the shares of time in which the others waited."""
    other, most = sorted(waited, key=lambda name: waited[name])
    return _SLOWER[most] if waited[most] >= max(0.1, 2 * waited[other]) else "neither"


_WAITS = {"rollouts": "Learners waited for rollouts", "parameters": "Collectors waited for parameters"}
"""Waits that split layouts record."""
_SLOWER = {"rollouts": "collectors", "parameters": "learners"}
"""The role that is slower, by the wait that it causes."""
