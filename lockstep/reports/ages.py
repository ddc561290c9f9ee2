"""The section of a report about age: of the data that was learned from (PL), of the parameters that gradients were
computed with (GA), and who waited for whom.

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
    """The ages of what one process supplied."""

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
        "PL is the policy lag: how many versions, or gradient steps, the policy that collected a sample was older than "
        "the one that learned from it. GA is the gradient asynchrony: how many updates came between the parameters "
        "that a gradient was computed with and those that it changed. Means over iterations."
    )
    parts = [_means(runs), page.paragraph(text, "note"), _by_process(runs), _waits(runs)]
    for task in named:
        found = [Chart(_CHARTS[chart.caption], chart.spec) for chart in changing(groups, task, list(_CHARTS), drawn)]
        if found:
            title = f"{task}: " * (len(named) > 1) + "over time"
            parts.append(page.details(title, page.figures(found, "small"), unfolded=len(named) == 1))
    return "".join(parts)


def _means(runs: Sequence[Run]) -> str:
    """A row for all runs with the same means."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        known = [name for name in run.names("lag/share_") if name.split("_")[1].isdigit()]
        counted = sorted(known, key=lambda name: int(name.split("_")[1]))
        shares = {f"{name.split('_')[1]} behind": run.average(name) for name in counted}
        names = ("policy_versions", "policy_versions_max", "gradient_steps", "versions_per_trajectory")
        means = [run.average(f"lag/{name}") for name in (*names, "gradient_asynchrony")]
        cells = ["" if math.isnan(value) else readable(value) for value in means]
        cells.append("" if math.isnan(run.average("lag/kept")) else f"{run.average('lag/kept'):.1%}")
        alike.setdefault((str(run.settings.get("scheme.lag", "")), *cells, _bar(shares)), []).append(run.name)
    header = ["Run", "scheme.lag", "PL, versions", "Versions, oldest", "PL, gradient steps", "Versions in a trajectory"]
    header += ["GA, updates", "Kept", "Distribution"]
    return page.table(header, [[", ".join(names), *cells] for cells, names in alike.items()])


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
        header = ["Run", "Collector", "Rollouts", "PL, versions", "Oldest", "PL, gradient steps", "Oldest", "Kept"]
        parts += [page.heading("Policy lag of each collector"), page.table([*header, "Versions behind"], collectors)]
    if learners:
        header = ["Run", "Learner", "Gradients", "GA, updates", "Oldest", "Updates behind"]
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
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    return Html(f"{page.share_bar(shares)} {told}") if shares else ""


def _waits(runs: Sequence[Run]) -> str:
    """A row for each run: which role waited for which."""
    rows = []
    for run in runs:
        seconds = run.last("seconds")
        if not seconds > 0:
            continue
        waited = {name: sum(record.get(f"wait/{name}") or 0.0 for record in run.records) / seconds for name in _WAITS}
        among = run.share("time/waiting")
        cells = [f"{waited[name]:.1%}" if run.has(f"wait/{name}") else "" for name in _WAITS]
        cells.append("" if math.isnan(among) else f"{among:.1%}")
        rows.append([run.name, *cells])
    if not any("".join(row[1:]) for row in rows):
        return ""
    header = ["Run", *_WAITS.values(), "All processes, for each other and for these"]
    text = "Shares of the training time. Of learners, the one that waited longest counts; of collectors, the mean."
    return page.heading("Who waited for whom") + page.table(header, rows) + page.paragraph(text, "note")


_WAITS = {
    "rollouts": "Learners, for rollouts of collectors",
    "parameters": "Collectors, for parameters of learners or a free buffer",
}
"""Waits that split layouts record."""
