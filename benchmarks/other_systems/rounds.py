"""Rates of several systems, measured in turn, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from other_systems.installed import PeerError


def interleave(
    rows: Mapping[str, Callable[[], float]], rounds: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Measure every row once a round, in turns that go forth and back. A peer that cannot run is left out."""
    found: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(1, rounds + 1):
        for name in list(found) if number % 2 else list(reversed(found)):
            try:
                found[name].append(rows[name]())
            except PeerError as error:
                say(f"{name} is left out: {error}")
                del found[name]
                continue
            say(f"round {number} of {rounds}: {name} {found[name][-1]:,.0f} samples/s")
    return found


def table(found: Mapping[str, Sequence[float]], beside: Sequence[str]) -> str:
    """Markdown: medians, minimum and maximum, and the ratio to the fastest row whose name begins with each peer's."""
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    best = {peer: max((rate for name, rate in medians.items() if name.startswith(peer)), default=0) for peer in beside}
    best = {peer: rate for peer, rate in best.items() if rate}
    heads = ["", "samples/s", *(f"beside {peer}" for peer in best)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, rates in found.items():
        cells = [name, f"{medians[name]:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"]
        cells += [f"{medians[name] / rate:.2f} ×" for rate in best.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
