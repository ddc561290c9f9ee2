"""Whether collectors that yield to learners (nice=10) and processes that keep to their cores (pin=1) make APPO faster.

    python benchmarks/priorities.py breakout battle --rounds 4 --seconds 3

All layouts of a task are started once, and then take turns. Prints a table for each task, and writes
benchmarks/priorities/TASK.json: samples a second of each turn, and their ratio to the same layout without options.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from other_systems.rounds import interleave
from peers import appo_battle, appo_breakout

from lockstep.config.layout import Layout
from lockstep.speed.trial import Trial
from lockstep.training.prepare import prepare

RESULTS = Path(__file__).parent / "priorities"
TASKS = {"breakout": lambda: appo_breakout(32), "battle": lambda: appo_battle(32)}
LAYOUTS = ("cpu:a1-l1", "cpu:a2-l1")
OPTIONS = ("", ",nice=10", ",pin=1", ",pin=1,nice=10")


def measure(task: str, layouts: list[str], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Samples a second of each layout in each round."""

    def rate(trial: Trial) -> float:
        return trial.run(seconds, iterations=2).rate

    rows: dict[str, Callable[[], float]] = {}
    with contextlib.ExitStack() as stack:
        for text in layouts:
            layout = Layout.parse(text)
            trial = stack.enter_context(contextlib.closing(Trial(prepare(TASKS[task](), layout), layout)))
            trial.run(1.0, iterations=2 * trial.settling)
            rows[text] = functools.partial(rate, trial)
        return interleave(rows, rounds, functools.partial(print, f"{task}:", flush=True))


def table(rates: dict[str, list[float]]) -> str:
    """A row for each layout."""
    rows = ["| layout | samples/s | min to max | beside no options | min to max |", "|---|---|---|---|---|"]
    for text, own in rates.items():
        ratios = [mine / other for mine, other in zip(own, rates[text.partition(",")[0]], strict=True)]
        rows.append(
            f"| `{text}` | {statistics.median(own):,.0f} | {min(own):,.0f} to {max(own):,.0f} "
            f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=list(TASKS))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    given = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for task in given.tasks:
        rates = measure(
            task, [layout + each for layout in given.layouts for each in OPTIONS], given.rounds, given.seconds
        )
        report = {"task": task, "date": time.strftime("%Y-%m-%d"), "seconds": given.seconds, "rates": rates}
        (RESULTS / f"{task}.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"{task}: done\n\n{table(rates)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
