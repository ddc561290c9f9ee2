"""The report of the many-seed proof: evaluates the runs of benchmarks/proof.py that have ended.

    python benchmarks/proof_report.py runs/seeds     # writes into benchmarks/seeds/

Reports add up: what one has written stays, scores and curves, as long as its settings do. So the runs may be trained on
several machines, and their folders need not be kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from proof import PARTS, Proof

from lockstep.config.names import name_of
from lockstep.config.settings import SettingsError
from lockstep.evaluation.scores import evaluate
from lockstep.evaluation.statistics import estimate, iqm, readable, thinned
from lockstep.reports.plots import plot
from lockstep.reports.runs import TASK
from lockstep.reports.runs import Run as RunData
from lockstep.sweep.queue import Queue, write_json

RESULTS = Path(__file__).parent / "seeds"


def report(root: Path) -> int:
    """Evaluate the runs that have ended; write a table, numbers and pictures of each part, with what earlier reports
    have found. How many runs have ended in this folder."""
    queue = Queue.open(root)
    queued = {entry.name for entry in queue.entries()}
    RESULTS.mkdir(exist_ok=True)
    found = 0
    for part, proofs in PARTS.items():
        rows, curves, lacking = [], dict[str, list[tuple[RunData, str]]](), set[str]()
        for name, proof in proofs.items():
            wanted = [proof.run(name, seed).name for seed in range(1, 1 + proof.seeds)]
            states = {run: queue.state(run) for run in wanted if run in queued}
            queued -= set(wanted)
            if other := [f"{run} {state}" for run, state in states.items() if state in ("failed", "stopped")]:
                print(f"not evaluated: {', '.join(other)}")
            ended = [run for run, state in states.items() if state == "done"]
            found += len(ended)
            scores = _scores(name, proof, queue, wanted, [run for run in ended if queue.run(run).exists()])
            if not scores:
                continue
            task, drawn = name.split("-")[0], _curves(proof, scores)
            curves.setdefault(task, []).extend((run, proof.label) for run in drawn)
            lacking |= set() if drawn else {task}  # lest its picture loses an algorithm
            draw(RESULTS / f"{name}.png", drawn, [proof.label] * len(drawn))
            for levels in proof.levels:
                if played := [each for each in scores if each["levels"] == levels]:
                    rows.append(_row(name, proof, played))
                    print(rows[-1], flush=True)
        for task, drawn in curves.items():
            if task not in lacking and len({label for _, label in drawn}) > 1:
                picture = task if part in ("minatar", "mujoco", "atari") else f"{part}-{task}"
                draw(RESULTS / f"{picture}.png", [run for run, _ in drawn], [label for _, label in drawn])
        if rows:
            (RESULTS / f"{part}.md").write_text("\n".join([*_HEAD, *rows]) + "\n")
    if queued:
        print(f"of other settings than here, and left out: {', '.join(sorted(queued))}")
    return found


def draw(path: Path, runs: list[RunData], labels: list[str]) -> None:
    """The runs in which an episode has ended."""
    known = [(run, label) for run, label in zip(runs, labels, strict=True) if run.has("score/mean")]
    if known:
        plot([run for run, _ in known], path, labels=[label for _, label in known])


_HEAD = (
    "| NAME | algorithm | steps | seeds | training: IQM (95% interval) | evaluation: IQM (95%) | range | published |",
    "|---|---|---|---|---|---|---|---|",
)
_POINTS = 200
"""Of a curve that is kept."""


def _scores(name: str, proof: Proof, queue: Queue, wanted: list[str], ended: list[str]) -> list[dict[str, Any]]:
    """Of every seed and kind of level: what ended here, evaluated unless that was done before, and what was written
    before of runs that are not here."""
    path = RESULTS / f"{name}.json"
    known = json.loads(path.read_text())["runs"] if path.is_file() else []
    found: list[dict[str, Any]] = []
    for run in wanted:
        outcome = queue.outcome(run) if run in ended else None
        for levels in proof.levels:
            how = {"run": run, "episodes": proof.episodes, "greedy": proof.greedy, "levels": levels}
            how |= {"digest": outcome.digest} if outcome else {}
            score = next((each for each in known if how.items() <= each.items()), None)
            if score is None and outcome:
                evaluation = evaluate(queue.run(run), episodes=proof.episodes, greedy=proof.greedy, levels=levels)
                score = {
                    **how,
                    "seed": queue.entry(run).experiment["seed"],
                    "training": outcome.score,
                    "evaluation": evaluation.mean,
                    "scores": list(evaluation.scores),
                    "protocol": evaluation.protocol,
                }
                write_json(path, {"runs": [*known, score]})  # lest an end loses it
                known.append(score)
            if score is not None:
                if outcome and "curve" not in score:
                    score["curve"] = _curve(queue.run(run))
                found.append(score)
    if found:
        write_json(path, {"runs": found})
    return found


def _curve(folder: Path) -> list[list[float]]:
    """Samples and training scores of a run, as many as a picture shows."""
    run = RunData.read(folder)
    if not run.has("score/mean"):
        return []
    points = zip(*thinned(run.curve("samples", "score/mean"), _POINTS), strict=True)
    return [[int(samples), round(float(score), 3)] for samples, score in points]


def _curves(proof: Proof, scores: list[dict[str, Any]]) -> list[RunData]:
    """The kept curves as runs; none if one is missing, lest a picture loses seeds."""
    if not all("curve" in each for each in scores):
        return []
    algorithm = name_of(type(proof.experiment.algorithm))
    settings = {TASK: proof.experiment.env.id, "algorithm.$type": algorithm}
    return [
        RunData(Path(run), each["seed"], settings, {}, [{"samples": x, "score/mean": y} for x, y in each["curve"]])
        for run, each in {each["run"]: each for each in scores}.items()
    ]


def _row(name: str, proof: Proof, scores: list[dict[str, Any]]) -> str:
    training = np.array([each["training"] for each in scores if each["training"] is not None])
    final = np.array([each["evaluation"] for each in scores])
    steps = proof.experiment.total_steps
    levels = f", {scores[0]['levels']} levels" if len(proof.levels) > 1 else ""
    cells = [
        f"`{name}`",
        proof.label + levels,
        f"{steps / 1e6:g}M" if steps >= 1_000_000 else f"{steps // 1000}k",
        str(len(scores)) if len(scores) == proof.seeds else f"{len(scores)} of {proof.seeds}",
        str(estimate(iqm, [training])) if len(training) else "—",
        str(estimate(iqm, [final])),
        f"{readable(final.min())} to {readable(final.max())}",
        proof.published,
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs/seeds"))
    given = parser.parse_args()
    try:
        if not report(given.runs):
            raise SettingsError(f"No run in {given.runs} has ended that has the settings of proof.py.")
    except SettingsError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
