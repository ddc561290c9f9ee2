"""Whether collecting and learning overlap: an iteration should take max(collect, learn), not their sum.

    python benchmarks/overlap.py [--rounds 3] [--iterations 8]

PPO on Breakout with lag 1. `inline` does one after the other and says how long each takes; `cpu:a1-l1` has a process
for each. Rounds are interleaved, so that both see the same machine. Both parts are also measured at once, in two inline
runs side by side: a core is slower while the other one works, and that is the machine's doing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import lockstep
from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.experiment import Experiment
from lockstep.scheme import Scheme


def experiment(num_envs: int, iterations: int) -> Experiment:
    base = recipes.ppo_atari("Breakout")
    return base.replace(
        env=replace(base.env, num_envs=num_envs),
        algorithm=replace(base.algorithm, rollout=64, epochs=2),
        scheme=Scheme(shards=4, lag=1),
        total_steps=iterations * 64 * num_envs,
    )


def seconds_per_iteration(settings: Experiment, layout: str) -> dict[str, float]:
    """Median seconds of an iteration, and of its parts, the first two iterations left out."""
    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(run=f"{folder}/run", display="none", tensorboard=False, checkpoint_every=10**6)
        lockstep.train(settings, Layout.parse(layout), options)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines[1:])]
    parts: dict[str, list[float]] = {"iteration": seconds, "collect": [], "learn": []}
    for line, whole in zip(lines[2:], seconds, strict=True):
        parts["collect"].append(whole * (line["time/env"] + line["time/inference"]))
        parts["learn"].append(whole * line["time/learning"])
    return {name: statistics.median(values) for name, values in parts.items()}


def _side_by_side(settings: Experiment, answers: Any) -> None:
    answers.put(seconds_per_iteration(settings, "inline"))


def two_at_once(settings: Experiment) -> dict[str, float]:
    """An inline run while another one loads the other core."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_side_by_side, args=(settings, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return {name: statistics.mean(each[name] for each in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--num-envs", type=int, default=32)
    given = parser.parse_args()
    settings = experiment(given.num_envs, given.iterations)
    rows: dict[str, list[float]] = {}
    for number in range(1, given.rounds + 1):
        alone, pair = seconds_per_iteration(settings, "inline"), two_at_once(settings)
        split = seconds_per_iteration(settings, "cpu:a1-l1")["iteration"]
        figures = {
            "collect / learn": alone["collect"] / alone["learn"],
            "cpu:a1-l1 / (collect + learn), one core busy": split / (alone["collect"] + alone["learn"]),
            "cpu:a1-l1 / max(collect, learn), one core busy": split / max(alone["collect"], alone["learn"]),
            "cpu:a1-l1 / max(collect, learn), both cores busy": split / max(pair["collect"], pair["learn"]),
        }
        for name, value in figures.items():
            rows.setdefault(name, []).append(value)
        print(f"round {number}: " + ", ".join(f"{name} {value:.2f}" for name, value in figures.items()), flush=True)
    print("\n| figure | median | min | max |\n|---|---|---|---|")
    for name, values in rows.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |")


if __name__ == "__main__":
    main()
