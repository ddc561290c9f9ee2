"""What worker 0 writes of a run: metrics, ledger, evaluations, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.evaluation.scores import evaluate_policy
from lockstep.experiment import Experiment
from lockstep.layout import Layout
from lockstep.learn import LearningReport
from lockstep.ledger import Ledger, fast_digest, ledger_head, structure_digests
from lockstep.recorder import IterationReport, Recorder
from lockstep.run import RunFolder, RunOptions
from lockstep.runtime import checkpoint
from lockstep.runtime.group import Group
from lockstep.storage.rollout import Rollout
from lockstep.worker import Worker


@dataclass
class Part:
    """What one worker tells worker 0 of an iteration."""

    rollout_digests: dict[int, dict[str, str]]
    gradient_digests: dict[int, str]
    episodes: dict[int, list[tuple[float, int]]]
    times: dict[str, float]


def part_of(worker: Worker, group: Group, rollouts: dict[int, Rollout], learned: LearningReport, begin: float) -> Part:
    """A worker's part of an iteration that began at `begin` (time.perf_counter)."""
    digests = {shard: structure_digests(rollout) for shard, rollout in rollouts.items()}
    times = {**worker.collector.times, "learning": worker.learner.seconds, "waiting": group.waited}
    times["other"] = max(0.0, time.perf_counter() - begin - sum(times.values()))
    return Part(digests, learned.gradient_digests, worker.collector.episodes(), times)


@dataclass(frozen=True)
class Resumed:
    """Where a resumed run goes on."""

    iteration: int
    counts: dict[str, int]
    recorder: dict[str, Any]


class Book:
    """What worker 0 writes: recorder, ledger, evaluations."""

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment,
        layout: Layout,
        options: RunOptions,
        worker: Worker,
        alive: Callable[[], None],
        resumed: Resumed | None,
    ) -> None:
        self._folder, self._experiment, self._options = folder, experiment, options
        self._worker, self._alive = worker, alive
        if resumed is None:
            self._ledger = Ledger.create(folder.ledger, ledger_head(experiment))
        else:
            self._ledger = Ledger.reopen(folder.ledger, resumed.iteration)
            folder.truncate_metrics(resumed.iteration)
        self._recorder = Recorder(folder, experiment, layout, options, resumed.recorder if resumed else None)

    def score(self) -> float | None:
        """Mean raw score of the last 100 training episodes."""
        return self._recorder.score()

    def record(
        self,
        iteration: int,
        collected_with: int,
        counts: dict[str, int],
        learned: LearningReport,
        parts: list[Part],
        seconds: float,
    ) -> None:
        """Write one iteration's metrics and its line of the ledger."""
        worker = self._worker
        rollouts: dict[int, dict[str, str]] = {}
        gradients: dict[int, str] = {}
        episodes: dict[int, list[tuple[float, int]]] = {}
        for part in parts:
            rollouts |= part.rollout_digests
            gradients |= part.gradient_digests
            episodes |= part.episodes
        self._ledger.append(
            {
                "iteration": iteration,
                "collected_with": collected_with,
                "rollout": {str(shard): rollouts[shard] for shard in sorted(rollouts)},
                "gradient": {str(shard): gradients[shard] for shard in sorted(gradients)},
                "parameters": {name: fast_digest(tensor) for name, tensor in worker.flat.named().items()},
                "normalizer": {name: fast_digest(tensor) for name, tensor in worker.normalizers.state().items()},
            }
        )
        times = {name: sum(part.times[name] for part in parts) / len(parts) for name in parts[0].times}
        self._recorder.record(
            IterationReport(
                iteration=iteration + 1,
                samples=counts["samples"],
                frames=counts["samples"] * worker.collector.frames_per_step,
                updates=counts["updates"],
                metrics=learned.metrics,
                episodes=[episode for shard in sorted(episodes) for episode in episodes[shard]],
                times=times,
                seconds=seconds,
                policy_lag=iteration - collected_with,
            )
        )

    def evaluate(self, iterations: int) -> None:
        """Score the current version on environments of its own, if it is time to."""
        options, worker = self._options, self._worker
        if options.eval_every and iterations % options.eval_every == 0:
            actor = worker.model.for_acting()
            worker.normalizers.apply(actor)
            self._recorder.evaluation(
                iterations,
                evaluate_policy(actor, self._experiment, episodes=options.eval_episodes, alive=self._alive),
            )

    def finish_checkpoint(self, iterations: int, counts: dict[str, int], parts: list[list[dict[str, Any]]]) -> None:
        """Complete a checkpoint whose parts all workers have written."""
        self._ledger.sync()  # a checkpoint relies on the ledger up to it
        best = self._recorder.is_best()
        checkpoint.finish(
            self._folder.checkpoints,
            iterations,
            [part for of_worker in parts for part in of_worker],
            {"counts": dict(counts), "recorder": self._recorder.state()},
            keep=self._options.keep_checkpoints,
            best=best,
        )
        self._recorder.message(f"checkpoint {iterations:08d}")

    def close(self) -> None:
        self._recorder.close()
        self._ledger.close()
