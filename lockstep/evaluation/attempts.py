"""Evaluates policies on fixed levels. Every attempt plays each level once. The score is the best attempt's mean.

Shape legend: A attempts, L levels.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import envs
from lockstep.config.options import EvaluationSettings
from lockstep.config.settings import SettingsError
from lockstep.envs.settings import EnvConfig
from lockstep.evaluation.policy import Policy
from lockstep.evaluation.progress import EpisodeProgress
from lockstep.evaluation.scores import Evaluation, described, evaluate_policy, evaluate_run, prepared, training_of
from lockstep.evaluation.statistics import Interval, estimate, mean, readable
from lockstep.run.checkpoint import CheckpointError, iteration_of, list_checkpoints, open_checkpoint
from lockstep.run.folder import RunFolder
from lockstep.system.machine import cores
from lockstep.system.numerics import torch_configured
from lockstep.system.output import print_line


@dataclass(frozen=True)
class Attempts:
    """The scores of a policy on fixed levels, [A, L]."""

    scores: tuple[tuple[float, ...], ...]
    """Raw score of each level in each attempt; the mean over a match's agents that the policy plays, or over tasks."""
    lengths: tuple[tuple[float, ...], ...]
    """Environment steps, likewise."""
    levels: range
    protocol: str
    """One line about how these scores were measured."""
    acting: str = "sampled"
    """How the policy chose actions: sampled, greedy, deterministic, and so on."""

    @property
    def means(self) -> tuple[float, ...]:
        """The mean over levels of each attempt, [A]."""
        return tuple(np.mean(self.scores, axis=1).tolist())

    @property
    def best(self) -> float:
        """The highest of these means. It is a maximum over noisy numbers, so it rises with the number of attempts."""
        return max(self.means)

    @property
    def mean(self) -> float:
        """The mean over all attempts and levels."""
        return float(np.mean(self.scores))

    @cached_property
    def interval(self) -> Interval | None:
        """95% confidence interval of the mean on these levels: the bootstrap draws from the attempts at each level.
        None for a single attempt."""
        return estimate(mean, list(np.array(self.scores).T)).interval

    def __str__(self) -> str:
        interval = f", 95% CI {readable(self.interval[0])} to {readable(self.interval[1])}" if self.interval else ""
        if len(self.means) == 1:
            return f"score {readable(self.mean)} ({self.protocol})"
        listed = ", ".join(map(readable, self.means))
        return (
            f"best attempt {readable(self.best)}, mean of all {readable(self.mean)}{interval}; attempts: {listed} "
            f"({self.protocol})"
        )

    def to_json(self) -> dict[str, Any]:
        """All results as JSON values."""
        return {
            "best": self.best,
            "mean": self.mean,
            "interval95": list(self.interval) if self.interval else None,
            "attempts": list(self.means),
            "levels": list(self.levels),
            "scores": [list(row) for row in self.scores],
            "lengths": [list(row) for row in self.lengths],
            "protocol": self.protocol,
            "actions": self.acting,
        }


def evaluate_attempts(
    run: Path | str,
    *,
    levels: str,
    attempts: int = 5,
    greedy: bool = False,
    checkpoint: str | int | None = None,
    seed: int | None = None,
    num_envs: int | None = None,
    max_steps: int | None = None,
    opponents: tuple[str, ...] = (),
) -> Attempts:
    """Play each of some levels once in each attempt.

    PyTorchRL's paper (Bou and De Fabritiis 2020, arXiv:2007.02622, section 4.3) reports the highest of five such means
    on five levels that training does not see.

    Args:
        levels: the first and the last, as in "1001..1005".
        num_envs: environments that play attempts at one level at the same time; None takes up to 16.
        others: as of lockstep.evaluate.

    Raises:
        SettingsError: these environments have no levels; and as lockstep.evaluate.
    """
    settings = EvaluationSettings(
        levels=levels,
        attempts=attempts,
        greedy=greedy,
        seed=seed,
        num_envs=num_envs,
        max_steps=max_steps,
        opponents=opponents,
    )
    if settings.fixed_levels is None:
        raise SettingsError(f"levels={levels!r} must name the first and the last level, as in '1001..1005'.")
    return _attempts(run, settings, settings.fixed_levels, checkpoint)


def evaluate_either(
    run: Path | str, settings: EvaluationSettings, checkpoint: str | int | None
) -> Evaluation | Attempts:
    """Attempts at the fixed levels of the settings if they name some, otherwise episodes."""
    levels = settings.fixed_levels
    return evaluate_run(run, settings, checkpoint) if levels is None else _attempts(run, settings, levels, checkpoint)


def _attempts(run: Path | str, settings: EvaluationSettings, levels: range, checkpoint: str | int | None) -> Attempts:
    policy, settings, stop = prepared(run, settings, checkpoint)
    experiment, attempts = policy.experiment, settings.attempts
    env = experiment.env
    if not envs.adapter_of(env).has_levels(env.id):
        raise SettingsError(
            f"--levels {settings.levels}: env.adapter={env.adapter} cannot choose the levels of env.id={env.id}. Leave "
            "it out."
        )
    env = replace(env, opponents=settings.opponents or env.opponents, start_level=levels[0], num_levels=len(levels))
    env.validate()
    agents = envs.whole_matches(replace(env, metrics=()), 1)
    played, progress = [], EpisodeProgress(len(levels) * attempts * agents)
    with torch_configured(experiment.torch_threads):
        for level in levels:
            played.append(
                evaluate_policy(
                    policy.model,
                    experiment.replace(env=replace(experiment.env, start_level=level, num_levels=1)),
                    replace(settings, levels="train", attempts=1, episodes=attempts * agents),
                    seed_purpose=f"test-level-{level}",  # so that levels have separate action noise
                    threads=cores(),
                    kernels=policy.kernels,
                    progress=progress,
                    stop=stop,
                )
            )
            progress.part(attempts * agents)

    def by_attempt(name: str) -> tuple[tuple[float, ...], ...]:
        found = np.array([getattr(each, name) for each in played]).reshape(len(levels), attempts, agents)
        return tuple(map(tuple, found.mean(-1).T.tolist()))

    acting = played[0].acting
    protocol = _protocol(policy, settings, env, acting)
    return Attempts(by_attempt("scores"), by_attempt("lengths"), levels, protocol, acting)


def _protocol(policy: Policy, settings: EvaluationSettings, env: EnvConfig, acting: str) -> str:
    seed = policy.experiment.seed if settings.seed is None else settings.seed
    attempts = f"{settings.attempts} attempt{'s' * (settings.attempts > 1)}"
    return (
        f"{attempts} at each of {env.num_levels} level{'s' * (env.num_levels > 1)} of {described(env, '')}, {acting} "
        f"actions, raw scores, seed {seed}/test, {training_of(policy)}"
    )


@dataclass(frozen=True)
class Point:
    """The evaluation of one checkpoint."""

    iteration: int
    samples: int
    training: float | None
    """The training score at that time (score/mean); None if no episode had ended."""
    result: Evaluation | Attempts

    def to_json(self) -> dict[str, Any]:
        """All results as JSON values."""
        return {
            "iteration": self.iteration,
            "samples": self.samples,
            "training_score": self.training,
            **self.result.to_json(),
        }


def evaluate_checkpoints(run: Path | str, settings: EvaluationSettings) -> list[Point]:
    """Evaluate all checkpoints that a run has kept, the oldest first, each with the same episodes. If the run is still
    training, those that it removes meanwhile are left out.

    Raises:
        SettingsError: there are no checkpoints, or as for evaluate.
    """
    folder = RunFolder.open(run)
    paths = {iteration_of(path): path for path in list_checkpoints(folder.checkpoints)}
    if not paths:
        raise SettingsError(f"{folder.path} has no checkpoint yet.")
    training = {record["iteration"]: record["score/mean"] for record in folder.records() if "score/mean" in record}
    points = []
    for iteration, path in sorted(paths.items()):
        try:
            samples = open_checkpoint(path, only=()).meta["recorder"]["samples"]
            result = evaluate_either(folder.path, settings, iteration)
        except CheckpointError:
            if path.exists():
                raise
            print_line(f"iteration {iteration}: left out, since the run has removed this checkpoint", sys.stderr)
            continue
        points.append(Point(iteration, samples, training.get(iteration), result))
        print_line(f"iteration {iteration}: {readable(result.mean)}", sys.stderr)
    if not points:
        raise SettingsError(
            f"{folder.path} is still training, and has removed each of its checkpoints before it was evaluated. Wait "
            "until the run has ended, or train with more --keep-checkpoints."
        )
    return points


def table(points: list[Point]) -> str:
    """The scores of checkpoints, one per line."""
    repeated = isinstance(points[0].result, Attempts)
    rows = [["iteration", "samples", "training", *(["best attempt"] if repeated else []), "mean", "95% CI"]]
    for point in points:
        result = point.result
        interval = " to ".join(map(readable, result.interval)) if result.interval else "-"
        best = [readable(result.best)] if isinstance(result, Attempts) else []
        training = "-" if point.training is None else readable(point.training)
        rows.append([f"{point.iteration:,}", f"{point.samples:,}", training, *best, readable(result.mean), interval])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)
