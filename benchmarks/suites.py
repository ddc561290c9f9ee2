"""Runs of a suite, gathered beside published scores.

    lockstep sweep runs/der der-atari100k --suite atari100k --seed 1..3 --eval-every 100000 --eval-episodes 100
    lockstep sweep runs/ppo ppo-mujoco --suite mujoco --seed 1..5 --eval-every 489 --eval-episodes 10
    python benchmarks/suites.py atari100k runs/der          # gathers what has ended; writes into benchmarks/suites/
    python benchmarks/suites.py atari100k runs/der --prune  # and deletes the replay memories of gathered runs

Calls add up: what one has gathered stays. So runs may be trained on several machines, and their folders need not be
kept. A run's evaluation is its last one; a run without one is evaluated on 100 episodes. Tables show the suite's
metric: evaluations of Atari 100k, the last training episodes of the others. A suite with normalized scores also gets a
picture, NAME.png: the share of tasks on which each method's mean is above a threshold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from lockstep.config.settings import SettingsError
from lockstep.evaluation.scores import evaluate
from lockstep.evaluation.statistics import readable, thinned
from lockstep.reports import atari
from lockstep.reports.plots import COLORS, STYLE
from lockstep.reports.runs import Method, Run, methods
from lockstep.reports.scales import scale_of
from lockstep.reports.suites import AGGREGATES, Standing, published, sources, standing, suite_of
from lockstep.sweep.queue import Entry, Queue, write_json

RESULTS = Path(__file__).parent / "suites"
_EPISODES = 100
_POINTS = 100
"""Of a curve that is kept."""
_HIGHEST = 1.5
"""The highest threshold of a profile: few agents exceed it on more than two games."""


def gather(name: str, root: Path, out: Path = RESULTS, *, prune: bool = False) -> int:
    """Write the runs of a sweep that have ended into out/NAME.json, and tables into NAME.md. How many are new."""
    suite, queue, path = suite_of(name), Queue.open(root), out / f"{name}.json"
    out.mkdir(exist_ok=True)
    known: dict[str, dict[str, Any]] = {each["run"]: each for each in _read(path)}
    new = 0
    for entry in queue.entries():
        outcome, folder = queue.outcome(entry.name), queue.run(entry.name)
        if outcome is None or outcome.state != "done" or not suite.has(entry.env) or not folder.exists():
            continue
        if known.get(entry.name, {}).get("digest") != outcome.digest:
            known[entry.name] = _gathered(entry, queue, outcome.digest)
            write_json(path, {"runs": list(known.values())})  # lest an end loses it
            new += 1
        for memory in folder.glob("checkpoints/*/replay-*") if prune else ():
            memory.unlink()
    if known:
        found = standing(name, _methods(list(known.values())), suite.metric)
        (out / f"{name}.md").write_text(_tables(name, found), encoding="utf-8")
        _draw_profiles(found, out / f"{name}.png")
        print(found)
    return new


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []


def _gathered(entry: Entry, queue: Queue, digest: str | None) -> dict[str, Any]:
    """Everything about a run that is published."""
    folder = queue.run(entry.name)
    run = Run.read(folder)
    with (folder / "ledger.jsonl").open(encoding="utf-8") as lines:
        platform = json.loads(next(lines))["platform"]
    if run.has("eval/score"):
        score, interval = run.last("eval/score"), [run.last("eval/score_low"), run.last("eval/score_high")]
        protocol = f"{run.facts['options']['eval_episodes']} episodes in the run's last evaluation"
    else:
        played = evaluate(folder, episodes=_EPISODES)
        score, interval, protocol = played.mean, list(played.interval or (math.nan, math.nan)), played.protocol
    ended = datetime.fromtimestamp((queue.folder / "outcomes" / f"{entry.name}.json").stat().st_mtime, timezone.utc)
    return {
        "run": entry.name,
        "method": re.sub(rf"(-{re.escape(entry.env.rpartition('/')[2])})?-s{run.seed}-[0-9a-f]+$", "", entry.name),
        "task": entry.env,
        "seed": run.seed,
        "digest": digest,
        "samples": int(run.last("samples")),
        "score": score,
        "interval95": interval,
        "protocol": protocol,
        "training": run.last("score/mean") if run.has("score/mean") else None,
        "hours": round(run.last("seconds") / 3600, 2),
        "command": run.facts.get("command"),
        "machine": platform["cpu"]["model"],
        "versions": {"torch": platform["torch"], **platform["libraries"]},
        "ended": ended.strftime("%Y-%m-%d"),
        "rules": {name: run.settings[name] for name in ("env.protocol", "total_steps") if name in run.settings},
        "curve": _curve(run),
    }


def _curve(run: Run) -> list[list[float]]:
    """Samples and training scores of a run, as many as a picture shows."""
    if not run.has("score/mean"):
        return []
    points = zip(*thinned(run.curve("samples", "score/mean"), _POINTS), strict=True)
    return [[int(samples), round(float(score), 3)] for samples, score in points]


def _methods(known: list[dict[str, Any]]) -> list[Method]:
    """The gathered runs, as a report reads them."""
    found = []
    for each in known:
        settings = {"env.id": each["task"], "algorithm.$type": each["method"], **each["rules"]}
        scores = {"eval/score": each["score"], "score/mean": each["training"]}
        records = [{"samples": each["samples"], **{name: score for name, score in scores.items() if score is not None}}]
        found.append(Run(Path(each["run"]), each["seed"], settings, {}, records))
    groups = methods(found, across_tasks=True)
    for group in groups:
        group.label = str(group.settings["algorithm.$type"])
    return groups


def _tables(name: str, found: Standing) -> str:
    """Scores of each task beside published ones, and aggregates."""
    labels = list(dict.fromkeys(label for row in found.rows for label in row.scores))
    theirs = list(published(name))
    scaled = any(row.task in atari.RANDOM_AND_HUMAN for row in found.rows)
    lines = [" | ".join(["| task", *(("random", "human") if scaled else ()), *labels, *theirs]) + " |"]
    lines.append("|---" * lines[0].count(" | ") + "|---|")
    for row in found.rows:
        cells = [row.task, *(map(readable, atari.RANDOM_AND_HUMAN[row.task]) if scaled else ())]
        cells += [str(row.scores.get(label, "")) for label in labels]
        cells += [readable(row.published[m]) if m in row.published else "" for m in theirs]
        lines.append("| " + " | ".join(cells) + " |")
    if found.aggregates:
        lines += ["", f"Over {len(found.shared)} of {len(suite_of(name).tasks)} tasks, normalized:", ""]
        lines += ["| method | " + " | ".join(AGGREGATES) + " |", "|---" * (1 + len(AGGREGATES)) + "|"]
    for label, each in found.aggregates.items():
        lines.append("| " + " | ".join([label, *(str(each.get(kind, "")) for kind in AGGREGATES)]) + " |")
    return "\n".join([*lines, "", *found.notes, "", sources(name), ""])


def _draw_profiles(found: Standing, out: Path) -> None:
    """Draw each method's share of the shared tasks whose mean normalized score is above τ, as Agarwal et al. 2021
    (arXiv:2108.13264) do. A suite without normalized scores gets no picture."""
    shared = [row for row in found.rows if row.task in found.shared and row.normalized]
    if len(shared) < 2:
        return
    compared = [label for label in shared[0].normalized if label in found.aggregates]
    methods = {label: [row.normalized[label] for row in shared] for label in compared}
    for label in published(found.suite):
        scales = [scale_of(row.task, "score/mean") for row in shared]
        methods[label] = [
            float(scale.of(np.asarray(row.published[label])))
            for row, scale in zip(shared, scales, strict=True)
            if scale is not None and label in row.published
        ]
    thresholds = np.linspace(0.0, _HIGHEST, 201)
    with plt.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 4.8), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        complete = {label: scores for label, scores in methods.items() if len(scores) == len(shared)}
        lines = itertools.product(("-", "--", ":"), COLORS)
        for (style, color), (label, scores) in zip(lines, complete.items(), strict=False):
            ours = label in compared
            share = (np.asarray(scores)[:, None] > thresholds).mean(axis=0)
            axes.step(
                thresholds, share, where="post", color=color, ls=style, linewidth=2.4 if ours else 1.2, label=label
            )
        axes.set_xlabel("normalized score τ")
        axes.set_ylabel(f"share of {len(shared)} tasks with a mean above τ")
        axes.set_title(suite_of(found.suite).title)
        axes.set_ylim(0.0, 1.0)
        axes.margins(x=0.0)
        axes.legend(loc="upper right", labelcolor="#333333")
        figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write; default: %(default)s")
    parser.add_argument("--prune", action="store_true", help="delete the replay memories of gathered runs")
    given = parser.parse_args()
    try:
        print(f"{gather(given.suite, given.sweep, given.out, prune=given.prune)} new runs")
    except SettingsError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
