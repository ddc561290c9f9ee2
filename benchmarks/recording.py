"""What recording the events of a free-running run costs: bytes, and CPU time in paired runs.

    python benchmarks/recording.py [--pairs 10]

A free-running run is made once. Then it is replayed inline, so that the work is the same each time, alternately with
and without the events in the ledger; the CPU time of the pairs is compared. So noise shows as spread around 1. Since it
is larger than what is looked for, the writing of the ledger's lines is timed by itself too, with and without events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lockstep
from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.experiment import Experiment
from lockstep.reproducibility.replay import recorded_schedule
from lockstep.run import ledger
from lockstep.run.ledger import Ledger, _canonical, _seal
from lockstep.scheme import Scheme


def experiment() -> Experiment:
    """IMPALA on Pong with short rollouts and weights refreshed at every step: many events for little work."""
    base = recipes.impala_atari("Pong")
    scheme = Scheme(shards=4, lag="async", refresh="step")
    return base.replace(env=replace(base.env, num_envs=16), scheme=scheme, total_steps=60 * 20 * 16)


def without_events(self: Ledger, entry: dict[str, Any], original: Any = Ledger._write) -> None:
    original(self, {name: value for name, value in entry.items() if name != "events"})


def cpu_seconds(settings: Experiment, lines: list[dict[str, Any]], run: Path) -> float:
    begin = time.process_time()
    options = RunOptions(run=str(run), display="none", tensorboard=False, checkpoint_every=10**6)
    lockstep.launchers.launch.launch(settings, Layout(), options, recorded=recorded_schedule(settings, lines, run))
    return time.process_time() - begin


def writing(lines: list[dict[str, Any]], repeats: int = 50) -> float:
    """CPU seconds that events add to the writing of one line: median of pairs."""
    bare = [{name: value for name, value in line.items() if name != "events"} for line in lines]
    differences = []
    for _ in range(repeats):
        seconds = []
        for entries in (lines, bare):
            begin = time.process_time()
            for entry in entries:
                _seal(_canonical(entry), "0" * 64)
            seconds.append(time.process_time() - begin)
        differences.append((seconds[0] - seconds[1]) / len(lines))
    return statistics.median(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    given = parser.parse_args()
    settings = experiment()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = RunOptions(run=str(folder / "run"), display="none", tensorboard=False, checkpoint_every=10**6)
        lockstep.train(settings, Layout.parse("cpu:a2-l1"), options)
        path = folder / "run" / "ledger.jsonl"
        _, lines = ledger.read(path)
        events = sum(len(json.dumps(line["events"], separators=(",", ":"))) for line in lines)
        samples = len(lines) * settings.samples_per_iteration
        print(f"{events / samples:.2f} bytes of events a sample; {events / path.stat().st_size:.0%} of the ledger")
        ratios, whole = [], 1.0
        for pair in range(given.pairs):
            seconds: dict[bool, float] = {}
            for recording in (True, False) if pair % 2 else (False, True):
                run = folder / f"{pair}-{recording}"
                if recording:
                    seconds[True] = cpu_seconds(settings, lines, run)
                else:
                    with mock.patch.object(Ledger, "_write", without_events):
                        seconds[False] = cpu_seconds(settings, lines, run)
            ratios.append(seconds[True] / seconds[False])
            whole = seconds[True] / len(lines)
            print(f"pair {pair + 1}: {ratios[-1]:.4f}", flush=True)
    added = writing(lines)
    print(f"events add {1e6 * added:.0f} µs to an iteration of {1e3 * whole:.0f} ms of CPU time: {added / whole:.4%}")
    print(f"CPU time with / without events: median {statistics.median(ratios):.4f}", end="")
    print(f" ({min(ratios):.4f} to {max(ratios):.4f}, {given.pairs} pairs)")


if __name__ == "__main__":
    main()
