"""Writes the records of a run in learner 0: metrics, ledger, evaluations, checkpoints. It also calls the callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.buffers.batches import CollectedRollout
from lockstep.config.layout import Layout
from lockstep.core.digests import fast_digest
from lockstep.core.rollout import RolloutInfo
from lockstep.envs.curriculum import unpack
from lockstep.evaluation.progress import EpisodeProgress
from lockstep.evaluation.scores import evaluate_policy
from lockstep.experiment import Experiment
from lockstep.learners.process import LearnerProcess
from lockstep.learners.steps import Applied, LearningReport
from lockstep.run import checkpoint
from lockstep.run import metrics as rows
from lockstep.run.ledger import Ledger, ledger_head
from lockstep.training.callbacks import CallbackRunner, callback_of
from lockstep.training.curriculum import Curriculum
from lockstep.training.display import PARTS
from lockstep.training.divergence import Divergence
from lockstep.training.job import Job
from lockstep.training.lags import Lags
from lockstep.training.logger import IterationReport, MetricsLogger
from lockstep.transport.free_running import Pace


@dataclass(frozen=True)
class ProcessReport:
    """A learner's report to learner 0 about an iteration."""

    infos: dict[int, list[RolloutInfo]]
    """By batch slot: the rollouts that it learned from."""
    gradient_digests: dict[int, str]
    """By batch slot."""
    applied: dict[int, Applied]
    """By position among the iteration's updates."""
    times: list[dict[str, float]]
    """Seconds of this process, and of the collectors whose times it reports."""
    waited: float
    """Seconds that this learner waited for rollouts."""


def report_of(
    process: LearnerProcess, taken: dict[int, list[CollectedRollout]], learned: LearningReport, begin: float
) -> ProcessReport:
    """A learner's report about an iteration that began at `begin` (time.perf_counter)."""
    rollouts = process.rollouts
    times = {**rollouts.own_times(), "learning": learned.seconds, "waiting": process.group.waited + rollouts.waited}
    times["other"] = max(0.0, time.perf_counter() - begin - sum(times.values()))
    infos = {slot: [each.info for each in of_slot] for slot, of_slot in taken.items()}
    times_of_all = [times, *rollouts.collector_times()]
    return ProcessReport(infos, learned.gradient_digests, learned.applied, times_of_all, rollouts.waited)


def _waits(reports: list[ProcessReport], layout: Layout, shards: int) -> dict[str, float]:
    """Seconds that the slowest learner waited for collectors, and that collectors waited on average for versions."""
    if not layout.split:
        return {}
    collectors = [times["waiting"] for report in reports for times in report.times[1:]]
    return {
        "rollouts": max(report.waited for report in reports),  # if timing decides, learner 0 waits for all
        # If timing decides, an iteration may take no rollouts of some collectors, and others that arrived before it
        # began. The mean is over all collectors. Otherwise the sum over iterations would exceed the time of the run.
        "parameters": sum(collectors) / layout.groups(shards),
    }


def _replay_ratio(experiment: Experiment, counts: dict[str, int]) -> dict[str, float]:
    """Samples learned from per sample collected since the warm-up, if timing decides it."""
    scheme, per_iteration = experiment.scheme, experiment.samples_per_iteration
    if not (scheme.free_running and experiment.algorithm.replays and counts["updates"]):
        return {}
    collected = counts["samples"] - per_iteration * Pace.of(experiment).warm
    return {"replay/ratio": counts["updates"] * experiment.gradient_steps[1] / collected}


@dataclass(frozen=True)
class Resumed:
    """The state that a run begins or continues with."""

    iteration: int
    """Iterations done; 0 in a new run."""
    counts: dict[str, int]
    """Samples and updates so far."""
    logger: dict[str, Any] | None
    """The logger's state to continue from; None in a new run."""
    metrics: dict[str, Any] | None = None
    """The seal of metrics.jsonl; None in a new run, and in checkpoints of earlier versions."""
    unevaluated: dict[str, float] | None = None
    """The latest line of metrics, if a request to stop ended the evaluation that follows it."""


class _Joined(NamedTuple):
    """The reports of all learners about an iteration."""

    acted: list[RolloutInfo]
    """The rollouts that were learned from, in the order of batch slots."""
    updates: list[Applied]
    """The updates in their order."""
    gradients: dict[int, str]
    """The digests of gradients, by batch slot in order."""
    times: dict[str, float]
    """Seconds of each part, as means over processes."""


class _Abandoned(Exception):
    """A stop was requested during an evaluation."""


class RunWriter:
    """Writes the records of a run: metrics, ledger, evaluations, checkpoints."""

    def __init__(self, job: Job, process: LearnerProcess, heartbeat: Callable[[], None], resumed: Resumed) -> None:
        callback = None if job.callback is None else callback_of(job.callback)
        folder, experiment, layout, options = job.folder, job.experiment, job.layout, job.options
        self._folder, self._experiment, self._layout, self._options = folder, experiment, layout, options
        self._process, self._heartbeat, self._counts = process, heartbeat, dict(resumed.counts)
        self._damage: str | None = None
        if resumed.logger is None:
            self._ledger = Ledger.create(folder.ledger, ledger_head(experiment, layout))
        else:
            self._ledger = Ledger.reopen(folder.ledger, resumed.iteration)
            self._damage = rows.keep(folder, resumed.iteration, resumed.metrics)
        self._lags = Lags(experiment)
        self._divergence, self._stops = Divergence(folder, stop=job.stops), job.stops
        self._finite = True
        """Whether all numbers of the latest version are finite."""
        self._unevaluated: dict[str, float] | None = None
        """The latest line of metrics, if the evaluation that follows it was abandoned."""
        self._fault = ""
        """Which non-finite values environments returned, if any."""
        self._logger = MetricsLogger(folder, experiment, layout, options, resumed.logger)
        self._curriculum = Curriculum(experiment) if experiment.curriculum else None
        self._line: dict[str, float] = {}
        """The latest line of metrics."""
        self._callback = None
        if callback is not None:
            frames_per_step, line = process.rollouts.frames_per_step, resumed.unevaluated or {}
            self._callback = CallbackRunner(
                callback, folder.path, process.agent, frames_per_step, resumed.iteration, line
            )

    def asked_to_stop(self, iterations: int) -> bool:
        """Whether the callback has ended the run. iterations: how many are done."""
        if self._callback is None or not self._callback.stopped:
            return False
        if iterations < self._experiment.iterations:
            self._logger.message(f"the callback ends the run after iteration {iterations}; lockstep resume continues")
        return True

    def next_options(self) -> Tensor:
        """The options of training environments that the curriculum chooses after the latest iteration."""
        assert self._curriculum is not None
        return self._curriculum.next(self._line, self._process.agent.options)

    def score(self) -> float | None:
        """Mean raw score of the last 100 training episodes."""
        return self._logger.score()

    def record(
        self,
        iteration: int,
        count: int,
        learned: LearningReport,
        reports: list[ProcessReport],
        seconds: float,
        not_finite: Sequence[str] = (),
    ) -> None:
        """Write one iteration's metrics and its line of the ledger.

        Args:
            count: how many rollouts the iteration learned from.
            not_finite: names of parameters and statistics that are NaN or infinite.

        Raises:
            NotFinite: learning has diverged, and the run should stop then.
        """
        counts, experiment, self._finite = self._counts, self._experiment, not not_finite
        counts["samples"] += count * experiment.samples_per_rollout
        counts["updates"] += learned.updates
        agent, joined = self._process.agent, _joined(reports)
        options = unpack(experiment.env, agent.options) if len(agent.options) else {}
        self._ledger.append(self._ledger_line(iteration, joined, options))
        self._fault = self._fault or next((each.not_finite for each in joined.acted if each.not_finite), "")
        curriculum = {f"curriculum/{name}": float(value) for name, value in options.items()}
        behind = [update.behind for update in joined.updates]
        line = self._line = self._logger.record(
            IterationReport(
                iteration=iteration + 1,
                samples=counts["samples"],
                frames=counts["samples"] * self._process.rollouts.frames_per_step,
                updates=counts["updates"],
                metrics={**learned.metrics, **_replay_ratio(experiment, counts), **curriculum},
                episodes=[episode for info in joined.acted for episode in info.episodes],
                times=joined.times,
                seconds=seconds,
                lags=self._lags.record(iteration, counts["updates"] - learned.updates, joined.acted, behind),
                waits=_waits(reports, self._layout, experiment.scheme.shards),
                environment_fault=self._fault,
            )
        )
        self._divergence.check(iteration + 1, learned.metrics, not_finite, self._fault)
        if self._callback is not None:
            self._callback.iteration(iteration + 1, line)

    def _ledger_line(self, iteration: int, joined: _Joined, options: dict[str, Any]) -> dict[str, Any]:
        """The timing decisions of an iteration, and the digests of its results. options: those of a curriculum."""
        agent, scheme = self._process.agent, self._experiment.scheme
        line: dict[str, Any] = {"iteration": iteration}
        if scheme.free_running:
            line["events"] = [_event(info) for info in joined.acted]
        else:
            line["collected_with"] = joined.acted[0].first_version
        if scheme.preempt < 1:
            cut = [info for info in joined.acted if info.preempted_after is not None]
            line["cuts"] = [[info.shard, info.preempted_after] for info in cut]
        if scheme.gradient_lag == "async":
            line["updates"] = [[update.slot, update.behind] for update in joined.updates]
        line["rollout"] = {str(place): info.digests for place, info in enumerate(joined.acted)}
        line["gradient"] = {str(slot): digest for slot, digest in joined.gradients.items()}
        line["parameters"] = agent.flat.digests()
        line["normalizer"] = {name: fast_digest(tensor) for name, tensor in agent.normalizers.state().items()}
        return {**line, "curriculum": options} if options else line

    def evaluate(self, iterations: int, stop_requested: Callable[[], bool]) -> bool:
        """Evaluate the current version in separate environments. Returns False if it was abandoned because a stop was
        requested: an evaluation may take minutes."""
        options, agent = self._options, self._process.agent

        def heartbeat() -> None:
            self._heartbeat()
            if stop_requested():
                raise _Abandoned

        try:
            evaluation = evaluate_policy(
                agent.model,
                self._experiment,
                options.evaluation,
                kernels=agent.kernels,
                normalizers=agent.normalizers,
                heartbeat=heartbeat,
                progress=EpisodeProgress(options.evaluation.episodes, self._logger.message),
                stop=self._stops,
            )
        except _Abandoned:
            self._unevaluated = self._line
            self._logger.message("evaluation abandoned; lockstep resume repeats it")
            return False
        self._logger.evaluation(iterations, self._counts["updates"], evaluation)
        if self._callback is not None:
            self._callback.evaluation(evaluation)
        return True

    def finish_checkpoint(self, iterations: int, parts: list[dict[str, Any]]) -> None:
        """Complete a checkpoint after all processes have written their parts."""
        self._ledger.sync()  # a checkpoint relies on the ledger up to its iteration
        metrics = {**self._logger.seal(), **({"damage": self._damage} if self._damage else {})}
        best = self._finite and self._logger.mark_best()
        checkpoint.finish(
            self._folder.checkpoints,
            iterations,
            parts,
            {
                "counts": dict(self._counts),
                "recorder": self._logger.state(),
                "metrics": metrics,
                "unevaluated": self._unevaluated,
            },
            keep=self._options.keep_checkpoints,
            best=best,
            finite=self._finite,
        )
        self._folder.checkpointed.touch()
        self._logger.message(f"checkpoint {iterations:08d}")
        if self._callback is not None:
            self._callback.checkpoint(checkpoint.checkpoint_path(self._folder.checkpoints, iterations))

    def close(self) -> None:
        try:
            self._logger.close()
        finally:
            self._ledger.close()


def _joined(reports: list[ProcessReport]) -> _Joined:
    infos: dict[int, list[RolloutInfo]] = {}
    gradients: dict[int, str] = {}
    applied: dict[int, Applied] = {}
    for report in reports:
        infos |= report.infos
        gradients |= report.gradient_digests
        applied |= report.applied
    spent = [times for report in reports for times in report.times]
    return _Joined(
        acted=[info for slot in sorted(infos) for info in infos[slot]],
        updates=[applied[place] for place in sorted(applied)],
        gradients={slot: gradients[slot] for slot in sorted(gradients)},
        times={name: sum(entry.get(name, 0.0) for entry in spent) / len(spent) for name in PARTS},
    )


def _event(info: RolloutInfo) -> dict[str, Any]:
    event = {"shard": info.shard, "rollout": info.number, "versions": list(info.versions)}
    return event if info.noise is None else {**event, "noise": info.noise}
