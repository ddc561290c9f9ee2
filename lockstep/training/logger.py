"""Reports a run's metrics to metrics.jsonl, TensorBoard, other trackers, and the display. docs/metrics.md defines the
metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import statistics
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.core.rollout import Episode
from lockstep.envs.info import labels
from lockstep.evaluation.scores import Evaluation
from lockstep.experiment import Experiment
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import Rows
from lockstep.system.machine import cores_of_the_run
from lockstep.training.display import PARTS, Display, make_display
from lockstep.training.recent import RecentEpisodes, RecentNumbers, mean
from lockstep.training.status import Status, waste
from lockstep.training.trackers import trackers_of

WINDOW = 100
"""The running score is the mean of this many episodes."""
_HISTORY = 256
_SETTLED = 4, 10.0
"""Iterations and seconds after which the layout is checked for waste."""


@dataclass
class IterationReport:
    """The numbers of one iteration, over all workers."""

    iteration: int
    """Iterations done, including this one."""
    samples: int
    """Agent samples collected since the run began, including this iteration."""
    frames: int
    """Environment frames since the run began, including this iteration."""
    updates: int
    """Gradient steps since the run began, including this iteration."""
    metrics: dict[str, float]
    """Global means, such as "loss/policy"."""
    episodes: list[Episode]
    """The episodes that ended in this iteration."""
    times: dict[str, float]
    """Seconds of this iteration by part, as means over workers: env, inference, learning, waiting, other."""
    seconds: float
    """Wall time of this iteration."""
    lags: dict[str, float]
    """The age of its data: `policy_versions` and, if timing decides, more (lockstep.training.lags). Empty without new
    data."""
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds that learners waited for `rollouts` and collectors for `parameters`, if they are separate processes."""
    environment_fault: str = ""
    """Which non-finite values environments returned, if any."""


@dataclass
class _Totals:
    """Totals that survive a stop and a resume."""

    samples: int = 0
    frames: int = 0
    seconds: float = 0.0
    episodes: int = 0
    best: float | None = None
    best_checkpoint: float | None = None
    window: list[list[float]] = field(default_factory=list)
    """For each of the last episodes: its score, length and metrics."""
    history: list[float] = field(default_factory=list)


class MetricsLogger:
    """Receives one report per iteration and passes it on to files, trackers and the display."""

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment,
        layout: Layout,
        options: RunOptions,
        state: dict[str, Any] | None = None,
    ) -> None:
        """state is the result of state() at the resumed checkpoint, with "restored" added: the seconds and environment
        steps that rebuilding took. None starts a new record."""
        state = dict(state or {})
        restored = state.pop("restored", None)
        self._experiment = experiment
        self._layout = layout
        self._totals = _Totals(**state)
        kept = [Episode(score, int(length), tuple(metrics)) for score, length, *metrics in self._totals.window]
        self._episodes = RecentEpisodes(WINDOW, labels(experiment.env.metrics))
        self._episodes.add(kept)
        self._recent = RecentNumbers(32)
        self._not_finite: set[str] = set()
        self._busy_cores = os.getloadavg()[0]  # by other programs, since this run has not begun
        self._began, self._judged = self._totals.seconds, False
        self._rows = Rows(folder.metrics)
        self._trackers = trackers_of(folder, experiment, options, self._totals.samples)
        self._policy_lag = 0.0
        self._display: Display = make_display(options.display, _title(experiment, layout), str(folder.path))
        if restored:
            self.message(
                f"resumed at iteration {restored['iteration']} in {restored['seconds']:.1f} s, "
                f"replaying {restored['replayed_steps']:,} steps"
            )

    def score(self) -> float | None:
        """Mean raw score of the last 100 episodes, None before the first ends."""
        return self._episodes.score

    def mark_best(self) -> bool:
        """Whether the checkpoint that is being written has the highest score so far. Call it once per checkpoint. Until
        a tenth of the window is filled, the newest checkpoint counts as best, since a mean of few episodes may be luck
        and must not become the record."""
        score, best = self.score(), self._totals.best_checkpoint
        if score is None or not math.isfinite(score) or (best is not None and score <= best):
            return False
        if self._settled():
            self._totals.best_checkpoint = score
        return True

    def _settled(self) -> bool:
        return len(self._episodes) >= WINDOW // 10

    def record(self, report: IterationReport) -> dict[str, float]:
        """Write one iteration's line and refresh the display. Returns the line."""
        self._episodes.add(report.episodes)
        totals = self._totals
        totals.episodes += len(report.episodes)
        totals.seconds += report.seconds
        score = self.score()
        if score is not None and math.isfinite(score):
            if self._settled() and (totals.best is None or score > totals.best):
                totals.best = score
            totals.history.append(score)
            if len(totals.history) > _HISTORY:
                totals.history = totals.history[::2]
        status = self._status(report)
        line = _line(report, status)
        self._write(line)
        self._warn_once(report)
        self._judge_layout(status)
        self._display.update(status)
        return line

    def evaluation(self, iterations: int, updates: int, result: Evaluation) -> None:
        """Write an evaluation of the version after this many iterations and updates, as a separate line."""
        low, high = result.interval or (math.nan, math.nan)
        samples = self._totals.samples
        self._write(
            {
                "iteration": iterations,
                "samples": samples,
                "frames": self._totals.frames,
                "updates": updates,
                "seconds": self._totals.seconds,
                "eval/score": result.mean,
                "eval/score_low": low,
                "eval/score_high": high,
                "eval/length": statistics.fmean(result.lengths),
                **_of_evaluation(result),
            }
        )
        self.message(f"evaluation after {samples:,} samples: {result}")

    def message(self, text: str) -> None:
        """Show a line above the display, such as a checkpoint taken or an evaluation's result."""
        self._display.message(text)

    def state(self) -> dict[str, Any]:
        """Totals for a checkpoint, as JSON values: the episode window, the best score, the time spent, and others."""
        window = [[episode.score, episode.length, *episode.metrics] for episode in self._episodes]
        return {**dataclasses.asdict(self._totals), "window": window}

    def seal(self) -> dict[str, Any]:
        """Sync metrics.jsonl to disk, so that it survives a power failure. Returns its entry for a checkpoint."""
        return self._rows.seal()

    def close(self) -> None:
        """Flush everything."""
        with contextlib.ExitStack() as all_of_them:  # close every one even if the disk is full
            for each in reversed((self._display, self._rows, *self._trackers)):
                all_of_them.callback(each.close)

    def _write(self, line: dict[str, float]) -> None:
        self._rows.append(json.dumps({k: v if math.isfinite(v) else None for k, v in line.items()}))
        for tracker in self._trackers:
            tracker.log({k: v for k, v in line.items() if k != "samples"}, int(line["samples"]))

    def _status(self, report: IterationReport) -> Status:
        totals = self._totals
        spent = {"samples": report.samples - totals.samples, "frames": report.frames - totals.frames}
        totals.samples, totals.frames = report.samples, report.frames
        recent = self._recent.add({**spent, "seconds": report.seconds, **report.times, **report.waits})
        seconds = max(1e-9, recent["seconds"])
        iterations = self._experiment.iterations
        left = (iterations - report.iteration) * self._experiment.samples_per_iteration
        self._policy_lag = report.lags.get("policy_versions", self._policy_lag)
        return Status(
            iteration=report.iteration,
            iterations=iterations,
            samples=report.samples,
            total_samples=report.samples + left,
            frames=report.frames,
            updates=report.updates,
            samples_per_second=recent["samples"] / seconds,
            frames_per_second=recent["frames"] / seconds,
            seconds=self._totals.seconds,
            iteration_seconds=seconds / len(self._recent),
            score=self.score(),
            best=totals.best,
            length=self._episodes.length,
            reported=self._episodes.reported,
            episodes=self._totals.episodes,
            history=list(self._totals.history),
            shares=_shares({name: recent[name] for name in report.times}),
            policy_lag=self._policy_lag,
            metrics=dict(report.metrics),
            layout=self._layout,
            shards=self._experiment.scheme.shards,
            waits={name: recent[name] / len(self._recent) for name in report.waits},
            timing_decides=self._experiment.scheme.timing_decides,
            torch_threads=self._experiment.torch_threads,
        )

    def _judge_layout(self, status: Status) -> None:
        iterations, seconds = _SETTLED
        if self._judged or len(self._recent) < iterations or self._totals.seconds - self._began < seconds:
            return
        self._judged = True
        text = waste(status, cores_of_the_run(), self._busy_cores)
        if text is not None:
            self.message(text)

    def _warn_once(self, report: IterationReport) -> None:
        learned = {name: value for name, value in report.metrics.items() if not name.startswith("hyper/")}
        bad = {name for name, value in learned.items() if not math.isfinite(value)} - self._not_finite
        if bad:
            self._not_finite |= bad
            cause = (
                f"probably since {report.environment_fault}."
                if report.environment_fault
                else "a lower --algorithm.learning-rate or --algorithm.max-grad-norm usually helps."
            )
            self.message(
                f"Iteration {report.iteration}: {', '.join(sorted(bad))} is not finite. Learning has diverged: {cause}"
            )


def _line(report: IterationReport, status: Status) -> dict[str, float]:
    line: dict[str, float] = {
        "iteration": report.iteration,
        "samples": report.samples,
        "frames": report.frames,
        "updates": report.updates,
        "seconds": status.seconds,
        "episodes": status.episodes,
        "speed/samples_per_second": status.samples_per_second,
        "speed/frames_per_second": status.frames_per_second,
        **{f"lag/{name}": value for name, value in report.lags.items()},
        **{f"wait/{name}": seconds for name, seconds in report.waits.items()},
    }
    if status.score is not None and status.length is not None:
        line |= {"score/mean": status.score, "score/length": status.length}
    if status.best is not None:
        line["score/best"] = status.best
    if report.episodes:
        scores = [episode.score for episode in report.episodes]
        line |= {"score/iteration_mean": mean(scores), "score/iteration_max": max(scores)}
    line |= {f"env/{name}": value for name, value in status.reported.items()}
    line |= {f"time/{name}": share for name, share in _shares(report.times).items()}
    return line | report.metrics


def _of_evaluation(result: Evaluation) -> dict[str, float]:
    """The environment's metrics in an evaluation, with the bounds of their intervals."""
    line = {}
    for name, metric in result.metrics.items():
        low, high = metric.interval or (math.nan, math.nan)
        line |= {f"eval/env/{name}": metric.mean, f"eval/env/{name}_low": low, f"eval/env/{name}_high": high}
    return line


def _shares(times: dict[str, float]) -> dict[str, float]:
    busy = sum(times[name] for name in PARTS if name in times)
    return {name: times[name] / busy if busy > 0 else 0.0 for name in PARTS if name in times}


def _title(experiment: Experiment, layout: Layout) -> str:
    algorithm, env = experiment.algorithm.name, experiment.env
    return f"{algorithm} · {env.id} · {env.num_envs} environments · seed {experiment.seed} · {layout}"
