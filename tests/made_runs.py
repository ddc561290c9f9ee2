"""Folders of runs that nobody trained: what plots, reports and comparisons read."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lockstep.sweep.proposals import Proposals
from lockstep.sweep.queue import Outcome, Queue
from lockstep.sweep.slots import Machine, Process, Share

SAMPLES, FRAMES, UPDATES, SECONDS = 16_384, 65_536, 16, 200.0
"""Of one iteration."""


def write_run(
    path: Path,
    *,
    seed: int = 1,
    lag: int | str = 0,
    algorithm: str = "PPO",
    task: str = "Breakout",
    iterations: int = 60,
    planned: int | None = None,
    score: Callable[[float], float] | None = None,
    metrics: dict[str, float] | None = None,
) -> Path:
    """Write experiment.json, run.json and metrics.jsonl.

    Args:
        planned: iterations that it was to have; None means that it is finished.
        score: score/mean by the share of `iterations` that is done; by default it rises, with noise of the seed.
        metrics: further metrics, the same in every iteration.
    """
    path.mkdir(parents=True)
    settings: dict[str, Any] = {
        "$type": "lockstep.experiment:Experiment",
        "env": {"$type": "lockstep.envs.base:EnvConfig", "id": task},
        "algorithm": {
            "$type": f"lockstep.algorithms.x:{algorithm}Config",
            "rollout": 128 if algorithm == "PPO" else 20,
        },
        "scheme": {"$type": "lockstep.scheme:Scheme", "lag": lag},
        "total_steps": (planned or iterations) * SAMPLES,
        "seed": seed,
    }
    (path / "experiment.json").write_text(json.dumps(settings))
    facts = {
        "layout": "inline",
        "command": f"lockstep train x --seed {seed}",
        "versions": {"lockstep": "0.1.0", "torch": "2.13.0"},
        "cores": 2,
    }
    (path / "run.json").write_text(json.dumps(facts))
    noise = np.random.default_rng(seed).normal(0, 8, iterations)
    with (path / "metrics.jsonl").open("w") as file:
        for i in range(iterations):
            line: dict[str, float | None] = {
                "iteration": i + 1,
                "samples": (i + 1) * SAMPLES,
                "frames": (i + 1) * FRAMES,
                "updates": (i + 1) * UPDATES,
                "seconds": (i + 1) * SECONDS,
                "loss/value": None if i == 0 else 1 / (i + 1),
                "lag/policy_versions": 0 if lag == "async" else float(lag),
                "time/env": 0.25,
                "time/learning": 0.75,
                **(metrics or {}),
            }
            if i > 1:
                share = (i + 1) / iterations
                rising = float((300 - 60 * (0 if lag == "async" else int(lag))) * i / iterations + noise[i])
                line["score/mean"] = score(share) if score else rising
            file.write(json.dumps(line) + "\n")
    return path


ProposalsT = TypeVar("ProposalsT", bound=Proposals[Any])


def carry_out(proposals: ProposalsT, queue: Queue, step: Callable[[ProposalsT], None], *, again: bool) -> ProposalsT:
    """A whole search, or population, part by part; again: by a new process for each."""
    proposals.begin()
    while not proposals.complete:
        if again:
            found = type(proposals).open(queue)
            assert found is not None
            proposals = found
            proposals.begin()
        step(proposals)
    return proposals


class Instant(Machine):
    """Where the runs of a sweep end at once."""

    def start(self, queue: Queue, name: str, share: Share) -> Process:
        queue.end(name, Outcome("done", "ab" * 32, 10, 1.0))
        return subprocess.Popen(["true"])
