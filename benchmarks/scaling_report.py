"""The tables of benchmarks/scaling: from what scaling.py measured, and what the model of networks expects."""

from __future__ import annotations

import math
from typing import Any

import nodes
from projection import Network, Projected, Work, project, tree_seconds

LEARNERS = (16, 64, 256)
NETWORKS = {
    "1 Gbit/s, 100 µs": Network(100e-6, 125e6),
    "10 Gbit/s, 50 µs": Network(50e-6, 1.25e9),
    "100 Gbit/s, 10 µs": Network(10e-6, 12.5e9),
}
"""Networks that are projected to; the latency is that of a message between two programs."""


def report(found: dict[str, Any]) -> str:
    """All tables."""
    parts = []
    if "run" in found:
        parts += [_presets_table(task, cases) for task, cases in found["run"].items()]
    if "check" in found:
        parts += [_sums_table(found["check"]), _runs_table(found["check"])]
    if "nodes" in found:
        parts.append(_table("Presets on nodes of a Ray cluster", *nodes.table(found["nodes"])))
    if "project" in found:
        parts += [_projection_table(name, Work(**work)) for name, work in found["project"].items()]
    return "\n\n".join(parts) + "\n"


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _presets_table(task: str, cases: dict[str, Any]) -> str:
    rows = [
        [
            name,
            each["layout"],
            f"{each['rate']:,.0f}",
            f"{each['policy_lag']:.2f}",
            f"{each['gradient_asynchrony']:.2f}",
            f"{each['computing']:.0%}",
            f"{each['waiting']:.0%}",
        ]
        for name, by_workers in cases.items()
        for each in by_workers.values()
    ]
    head = ["preset", "layout", "samples/s", "PL (versions)", "GA (updates)", "computing", "waiting"]
    return _table(f"Presets: {task}", head, rows)


def _free(check: dict[str, Any], count: str) -> Network:
    """The network of the hosts as it is: what is left of the time where nothing is slowed down."""
    seconds = {int(size): each for size, each in check[count]["as it is"]["sums"].items()}
    small, large = seconds[min(seconds)], seconds[max(seconds)]
    levels, learners = math.ceil(math.log2(int(count))), int(count)
    latency = small / (4 * levels)
    return Network(latency, 2 * (1 - 1 / learners) * max(seconds) / max(large - small, 1e-9))


def _joined(free: Network, slow: Network) -> Network:
    """Both, one behind the other."""
    return Network(free.latency + slow.latency, 1 / (1 / free.bandwidth + 1 / slow.bandwidth))


def _sums_table(check: dict[str, Any]) -> str:
    rows = []
    for count, networks in check.items():
        free = _free(check, count)
        for name, seen in networks.items():
            network = _joined(free, Network(**seen["network"]))
            row = [count, name]
            for size, measured in seen["sums"].items():
                expected = tree_seconds(int(count), int(size), network)
                row.append(f"{1000 * measured:,.1f} ({1000 * expected:,.1f})")
            rows.append(row)
    sizes = next(iter(check["2"].values()))["sums"]
    head = ["hosts", "network", *(f"{int(size):,} bytes" for size in sizes)]
    return _table("One sum, in milliseconds: measured (model)", head, rows)


def _runs_table(check: dict[str, Any]) -> str:
    rows = []
    for count, networks in check.items():
        free = _free(check, count)
        for name, seen in networks.items():
            if not seen["runs"]:
                continue
            network = _joined(free, Network(**seen["network"]))
            row = [count, name]
            for label, run in seen["runs"].items():
                work = Work(0, 0.0, 0.0, run["steps"], run["bytes"], reductions=run["reductions"])
                base = networks["as it is"]["runs"][label]["seconds"]
                added = project(int(count), work, network).network - project(int(count), work, free).network
                row.append(f"{run['seconds']:.3f} ({base + added:.3f})")
            rows.append(row)
    head = ["hosts", "network", *check["2"]["as it is"]["runs"]]
    return _table("One iteration, in seconds: measured (model)", head, rows)


def _projection_table(name: str, work: Work) -> str:
    rows = []
    for label, network in NETWORKS.items():
        for apart in (False, True):
            cells: list[Projected] = [project(n, work, network, apart=apart) for n in LEARNERS]
            rows.append(
                [
                    label,
                    "collectors apart, lag 1" if apart else "together",
                    *(f"{each.rate:,.0f} ({each.efficiency:.0%})" for each in cells),
                ]
            )
    alone = project(1, work, Network(0.0)).rate
    title = f"{name}: samples/s and efficiency by number of learners, of which one alone does {alone:,.0f}"
    return _table(title, ["network", "roles", *map(str, LEARNERS)], rows)
