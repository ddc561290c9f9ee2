"""What Ray costs: seconds until the first iteration, and of an iteration, against processes of one machine.

    python benchmarks/ray_overhead.py [--rounds 3]          startup and iterations, a table

All layouts run in turn, so that they share whatever else the machine does. Local Ray clusters are started for each run,
as `lockstep train --layout ray:…` does; `existing` is a run on a cluster that was there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # as with other layouts

from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train

LAYOUTS = ("processes:2", "ray:2", "cpu:a1-l1", "ray:a1-l1", "ray:a1-l1,compress=1")


def tasks() -> dict[str, Experiment]:
    """Iterations of a few milliseconds, and of a second with 14 MB of images."""
    cartpole, atari = recipes.ppo_cartpole(), recipes.ppo_atari()
    return {
        "CartPole, 256 samples an iteration": cartpole.replace(
            env=dataclasses.replace(cartpole.env, num_envs=8, adapter="gymnasium"),
            algorithm=dataclasses.replace(cartpole.algorithm, rollout=32, epochs=1, minibatches=1),
            scheme=dataclasses.replace(cartpole.scheme, shards=4, lag=1, acting_batch=0),
            total_steps=256 * 150,
        ),
        "Breakout, 512 samples an iteration": atari.replace(
            env=dataclasses.replace(atari.env, num_envs=16),
            algorithm=dataclasses.replace(atari.algorithm, rollout=32, epochs=1, minibatches=4),
            scheme=dataclasses.replace(atari.scheme, shards=4, lag=1, acting_batch=0),
            total_steps=512 * 40,
        ),
    }


def once(task: str, layout: str, *, existing: bool = False) -> tuple[float, float]:
    """Seconds until the first iteration has ended, and of one after the first ten (median), in a new process."""
    command = [sys.executable, __file__, "--one", task, layout, *["--existing"] * existing]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    first, each = json.loads(out.splitlines()[-1])
    return first, each


def one(task: str, layout: str, *, existing: bool) -> None:
    if existing:
        import ray

        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        done = threading.Event()

        def watch() -> None:
            while not ends and not done.wait(0.005):
                if metrics.exists() and metrics.stat().st_size:
                    ends.append(time.perf_counter())

        watcher = threading.Thread(target=watch)
        begin = time.perf_counter()
        watcher.start()
        options = RunOptions(run=f"{folder}/run", checkpoint_every=1000, display="none", tensorboard=False)
        train(tasks()[task], Layout.parse(layout), options)
        done.set()
        watcher.join()
        lines = [json.loads(line)["seconds"] for line in metrics.read_text().splitlines()]
    seconds = [after - before for before, after in pairwise(lines[10:])]
    print(json.dumps([ends[0] - begin, statistics.median(seconds)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--existing", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return one(*given.one, existing=given.existing)
    cases = [(layout, False) for layout in LAYOUTS] + [("ray:a1-l1", True)]
    print("| task | layout | until the first iteration, s | iteration, ms |\n|---|---|---|---|")
    for task in tasks():
        measured = {case: [] for case in cases}
        for _ in range(given.rounds):
            for case in cases:
                measured[case].append(once(task, case[0], existing=case[1]))
        for (layout, existing), figures in measured.items():
            first, each = (statistics.median(column) for column in zip(*figures, strict=True))
            name = f"`{layout}`" + ", existing cluster" * existing
            print(f"| {task} | {name} | {first:.1f} | {each * 1000:.1f} |", flush=True)


if __name__ == "__main__":
    main()
