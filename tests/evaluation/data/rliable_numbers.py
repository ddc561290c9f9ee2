"""Writes rliable.json: what rliable says of a made-up table of 57 tasks and 5 runs, and of a better method with 4.

python -m venv V && V/bin/pip install rliable "pandas<3" && V/bin/python tests/evaluation/data/rliable_numbers.py
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np

THRESHOLDS = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]


def table(runs: int, gain: float) -> np.ndarray:
    """Scores [runs, 57]: skewed, with a spread that differs between tasks, and the same on every machine."""
    task, run = np.arange(57), np.arange(runs)
    level = ((task * 37) % 57 / 57) ** 3 * 6 - 0.1
    noise = ((task[None, :] * 7919 + run[:, None] * 104_729 + 31) % 1009) / 1009 - 0.5
    return gain * level[None, :] + noise * (0.2 + level[None, :] / 2)


def main() -> None:
    # By name, since type checkers do not have it.
    library: Any = importlib.import_module("rliable.library")
    metrics: Any = importlib.import_module("rliable.metrics")
    scores = {"a": table(5, 1.0), "b": table(4, 1.15)}
    kinds = ("mean", "median", "iqm", "optimality_gap")

    def aggregates(x: np.ndarray) -> np.ndarray:
        return np.array([getattr(metrics, f"aggregate_{kind}")(x) for kind in kinds])

    np.random.seed(0)
    points, intervals = library.get_interval_estimates(scores, aggregates, reps=10_000)
    pair = {"b,a": (scores["b"], scores["a"])}
    chance, chances = library.get_interval_estimates(pair, metrics.probability_of_improvement, reps=1_000)
    found: dict[str, Any] = {
        "version": importlib.metadata.version("rliable"),
        "thresholds": THRESHOLDS,
        "probability_of_improvement": {
            "value": float(chance["b,a"]),
            "interval": np.ravel(chances["b,a"]).tolist(),
        },
    }
    for name in scores:
        found[name] = {
            kind: {"value": float(points[name][i]), "interval": intervals[name][:, i].tolist()}
            for i, kind in enumerate(kinds)
        }
        for profile, by_run in (("run_profile", True), ("task_profile", False)):
            values, ends = library.create_performance_profile(
                {name: scores[name]}, np.array(THRESHOLDS), use_score_distribution=by_run, reps=1_000
            )
            found[name][profile] = {"value": values[name].tolist(), "interval": ends[name].tolist()}
    Path(__file__).with_name("rliable.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
