"""Evaluates policies: raw scores of whole episodes, in separate environments."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import envs
from lockstep.config.options import EvaluationSettings, Levels
from lockstep.config.settings import SettingsError
from lockstep.envs.base import StepResult
from lockstep.envs.info import labels
from lockstep.envs.mixed import describe, shares
from lockstep.envs.settings import EnvConfig
from lockstep.evaluation.opponents import resolved
from lockstep.evaluation.policy import Player, Policy, acting_of, load_policy
from lockstep.evaluation.progress import EpisodeProgress
from lockstep.evaluation.statistics import Interval, bootstrap_interval, readable
from lockstep.experiment import Experiment
from lockstep.models.base import PolicyModel
from lockstep.models.capture import MakesInference
from lockstep.models.normalize import Normalizers
from lockstep.run.folder import RunFolder
from lockstep.system.machine import cores
from lockstep.system.numerics import torch_configured
from lockstep.system.output import print_warning

MAX_ENVS = 16
MAX_STEPS = 27_000
"""Default limit of environment steps per episode with gymnasium: Atari's 108,000 frames at 4 per step."""


def _of(statistic: Callable[[Sequence[float]], Any], values: Sequence[float]) -> float:
    """A statistic of values, which may be infinite: NumPy would warn of differences that are not numbers."""
    with np.errstate(invalid="ignore"):
        return float(statistic(values))


@dataclass(frozen=True)
class Metric:
    """A number that the environment reported for a policy's episodes."""

    values: tuple[float, ...]
    """The number of each episode, by the episode's number; NaN if nothing was reported."""
    together: int = 1
    """As in Evaluation."""

    @property
    def known(self) -> list[float]:
        """The numbers of episodes that reported one."""
        return [value for value in self.values if not math.isnan(value)]

    @property
    def mean(self) -> float:
        """The mean; NaN if no episode reported a number."""
        return _of(np.mean, self.known) if self.known else math.nan

    @cached_property
    def interval(self) -> Interval | None:
        """95% confidence interval of the mean, as of scores; None for fewer than two episodes or matches."""
        matches = np.arange(len(self.values)) // self.together
        return bootstrap_interval(self.known, matches[~np.isnan(self.values)])

    def __str__(self) -> str:
        if not self.known:
            return "not reported"
        interval = f", 95% CI {readable(self.interval[0])} to {readable(self.interval[1])}" if self.interval else ""
        return f"{readable(self.mean)}{interval}"

    def to_json(self) -> dict[str, Any]:
        """All results as JSON values."""
        return {
            "mean": self.mean if self.known else None,
            "interval95": list(self.interval) if self.interval else None,
            "values": [None if math.isnan(value) else value for value in self.values],
        }


@dataclass(frozen=True)
class Evaluation:
    """The scores of a policy."""

    scores: tuple[float, ...]
    """Sum of raw rewards of each episode, by the episode's number."""
    lengths: tuple[int, ...]
    """Environment steps of each episode."""
    protocol: str
    """One line about how these scores were measured."""
    acting: str = "sampled"
    """How the policy chose actions: sampled, greedy, deterministic, and so on."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """The numbers that the environment reported (env.metrics), by name."""
    together: int = 1
    """How many consecutive episodes are one match, so that they depend on each other: one for each agent that policies
    of the run play."""

    @property
    def mean(self) -> float:
        return _of(np.mean, self.scores)

    @property
    def std(self) -> float:
        """Sample standard deviation (n - 1) over episodes; 0 for a single one."""
        return _of(partial(np.std, ddof=1), self.scores) if len(self.scores) > 1 else 0.0

    @property
    def median(self) -> float:
        return _of(np.median, self.scores)

    @cached_property
    def interval(self) -> Interval | None:
        """95% confidence interval of the mean (see statistics.bootstrap_interval), for which whole matches are drawn;
        None for a single episode or match, or if a score is not finite."""
        return bootstrap_interval(self.scores, np.arange(len(self.scores)) // self.together)

    def __str__(self) -> str:
        interval = f", 95% CI {readable(self.interval[0])} to {readable(self.interval[1])}" if self.interval else ""
        spread = readable(self.mean) + f" ± {readable(self.std)}" * (len(self.scores) > 1)
        reported = "".join(f", {name} {metric}" for name, metric in self.metrics.items())
        return f"score {spread}{interval}, median {readable(self.median)}{reported} ({self.protocol})"

    def to_json(self) -> dict[str, Any]:
        """All results as JSON values."""
        return {
            "mean": self.mean,
            "std": self.std if len(self.scores) > 1 else None,
            "median": self.median,
            "interval95": list(self.interval) if self.interval else None,
            "episodes": len(self.scores),
            "scores": list(self.scores),
            "lengths": list(self.lengths),
            "protocol": self.protocol,
            "actions": self.acting,
            "metrics": {name: metric.to_json() for name, metric in self.metrics.items()},
        }


def evaluate(
    run: Path | str,
    *,
    episodes: int = 10,
    greedy: bool = False,
    checkpoint: str | int | None = None,
    seed: int | None = None,
    num_envs: int | None = None,
    levels: Levels = "train",
    max_steps: int | None = None,
    opponents: tuple[str, ...] = (),
    metrics: tuple[str, ...] = (),
) -> Evaluation:
    """Play whole episodes with a run's policy and report their raw scores.

    The episodes differ from those of evaluations during training, which may have selected the best checkpoint. Equal
    arguments give equal scores on the same platform.

    Args:
        run: folder of the run.
        episodes: how many to play.
        greedy: take the most likely action. Otherwise a stochastic policy samples, a policy of action values takes the
        best action except once in a thousand steps, and a policy with a single action takes it without noise.
        checkpoint: latest (also None), best, or an iteration.
        seed: of environments and action noise; None takes the experiment's.
        num_envs: environments that play at the same time, at most `episodes`; None takes up to 16.
        levels: train plays the levels of training; test plays all higher ones (see EnvConfig.num_levels).
        max_steps: the limit of an episode with gymnasium, whose tasks may never end; None for 27,000.
        opponents: players of the other agents in matches, as in EnvConfig.opponents; none for those of training.
        metrics: numbers that environments report, as in EnvConfig.metrics; none for those of training.

    Raises:
        SettingsError: the run or checkpoint does not exist, or a number is out of range.
        NotFinite: an environment returned NaN or an infinity, and the run does not allow it.
    """
    settings = EvaluationSettings(
        episodes=episodes,
        greedy=greedy,
        seed=seed,
        num_envs=num_envs,
        levels=levels,
        max_steps=max_steps,
        opponents=opponents,
        metrics=metrics,
    )
    if settings.fixed_levels is not None:
        raise SettingsError(
            f"levels={levels!r} must be 'train' or 'test'. lockstep.evaluation.attempts.evaluate_attempts plays single "
            "levels."
        )
    return evaluate_run(run, settings, checkpoint)


def evaluate_run(run: Path | str, settings: EvaluationSettings, checkpoint: str | int | None) -> Evaluation:
    """As evaluate, with the settings in one object."""
    policy, settings, stop = prepared(run, settings, checkpoint)
    with torch_configured(policy.experiment.torch_threads):
        result = evaluate_policy(
            policy.model,
            policy.experiment,
            settings,
            seed_purpose="test",
            threads=cores(),
            kernels=policy.kernels,
            progress=EpisodeProgress(settings.episodes),
            stop=stop,
        )
    return replace(result, protocol=f"{result.protocol}, {training_of(policy)}")


def prepared(
    run: Path | str, settings: EvaluationSettings, checkpoint: str | int | None
) -> tuple[Policy, EvaluationSettings, bool]:
    """A run's policy, the settings of its evaluation with resolved opponents, and whether non-finite numbers are an
    error. Raises SettingsError like evaluate."""
    settings.validate()
    policy = load_policy(run, checkpoint)
    if not all(parameter.isfinite().all() for parameter in policy.model.parameters()):
        print_warning(f"{run} had diverged by then: its model has parameters that are not numbers.")
    settings = replace(settings, opponents=resolved(policy.experiment.env, settings.opponents))
    return policy, settings, RunFolder.open(run).options().on_nonfinite == "stop"


def training_of(policy: Policy) -> str:
    """A description of how long a policy was trained, for a protocol."""
    frames = f", {policy.frames:,} frames" * (policy.frames != policy.samples)
    trained = f"checkpoint of iteration {policy.iteration}, after {policy.samples:,} samples{frames}"
    sampling = describe(shares(policy.experiment.env.id))
    return trained + f" ({sampling})" * bool(sampling)


def evaluate_policy(
    model: PolicyModel,
    experiment: Experiment,
    settings: EvaluationSettings,
    *,
    seed_purpose: str = "eval",
    threads: int = 1,
    kernels: MakesInference | None = None,
    normalizers: Normalizers | None = None,
    heartbeat: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda ended: None,
    stop: bool = True,
) -> Evaluation:
    """Play whole episodes with a model in its current state, without touching the ongoing training.

    Environment j of N plays the episodes j, j + N, j + 2N, …, so it is fixed in advance which episodes count. Counting
    the first to end would favor short episodes. Environments are numbered by groups, so that the agents of a match, or
    all tasks, have equally many episodes.

    Args:
        seed_purpose: names the random streams; equal names, seeds and numbers of environments repeat the episodes.
        threads: to step the environments; does not change results.
        kernels: those of the experiment, as for Player.
        normalizers: the statistics for the policy; None keeps its own.
        heartbeat: called at every step, to report progress to the supervisor.
        progress: called at every step with the number of episodes that have ended, to report progress to the user.
        stop: whether non-finite numbers from environments are an error; otherwise they cause one warning.

    Raises:
        SettingsError, NotFinite: as evaluate.
    """
    settings.validate()
    episodes, max_steps = settings.episodes, settings.max_steps
    adapter = envs.adapter_of(experiment.env)
    limits = adapter.limits_episodes
    if max_steps is not None and not limits:
        raise _has_own_limit(envs.resolve(experiment.env), max_steps)
    longest = (max_steps or MAX_STEPS) if limits else sys.maxsize
    player = Player(
        model,
        experiment,
        replace(settings, num_envs=min(episodes, settings.num_envs or MAX_ENVS), max_steps=longest),
        purpose=seed_purpose,
        threads=threads,
        kernels=kernels,
        normalizers=normalizers,
        stop=stop,
    )
    config = player.config
    count, names = player.env.num_envs, labels(config.metrics)
    first = np.concatenate(adapter.group_rows(config, count)).argsort()  # the numbers of a group are consecutive
    tally = _Tally(episodes, len(names), first, longest)
    try:
        if max_steps is not None and not player.env.limits_episodes:
            raise _has_own_limit(config, max_steps)
        while tally.unfinished:
            step = player.step()
            heartbeat()
            tally.add(step)
            progress(tally.done)
    finally:
        player.close()
    acting = acting_of(model, greedy=settings.greedy)
    limited = f"{tally.cut} ended at the limit of {longest:,} steps, " if tally.cut else ""
    protocol = (
        f"{episodes} {'whole ' * (not tally.cut)}episode{'s' if episodes > 1 else ''} of "
        f"{described(config, player.env.emulator)}, {limited}"
        f"{acting} actions, raw scores, {count} environment{'s' * (count != 1)}, "
        f"seed {player.seed}/{seed_purpose}"
    )
    together = 1 if shares(config.id) else adapter.group_size(config)  # several tasks play by themselves
    reported = zip(names, tally.metrics.T.tolist(), strict=True)
    metrics = {name: Metric(tuple(values), together) for name, values in reported}
    scores, lengths = tuple(map(float, tally.scores)), tuple(map(int, tally.lengths))
    return Evaluation(scores, lengths, protocol, acting, metrics, together)


class _Tally:
    """Adds up the rewards and steps of each episode.

    Args:
        metrics: how many numbers episodes report.
        first: int64 [N]: the number of the first episode of each environment.
        longest: the limit of an episode's steps.
    """

    def __init__(self, episodes: int, metrics: int, first: np.ndarray, longest: int) -> None:
        self.scores, self.lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
        self.metrics = np.full((episodes, metrics), np.nan)
        self.done = self.cut = 0
        """Episodes that have ended, and those of them that reached the limit."""
        self._episode, self._longest = first, longest

    @property
    def unfinished(self) -> bool:
        return bool((self._episode < len(self.scores)).any())

    def add(self, step: StepResult) -> None:
        episode = self._episode
        counted, ended = (episode < len(self.scores)) & ~step.first, step.terminated | step.truncated
        self.scores[episode[counted]] += step.reward[counted]
        self.lengths[episode[counted]] += 1
        self.cut += int(np.sum(self.lengths[episode[counted & step.truncated]] == self._longest))
        if step.metrics is not None:
            self.metrics[episode[counted & ended]] = step.metrics[counted & ended]
        self.done += int(np.sum(counted & ended))
        episode[ended] += len(episode)


def _has_own_limit(config: EnvConfig, max_steps: int) -> SettingsError:
    return SettingsError(
        f"--max-steps {max_steps} cannot limit the episodes of {config.id}, because "
        f"env.adapter={config.adapter} has its own limit, an option of the environment. Leave out --max-steps."
    )


def described(env: EnvConfig, emulator: str) -> str:
    """A description of an evaluation's environments, for a protocol."""
    notes = [f"{env.protocol} protocol"] if env.protocol != "none" else []
    notes += [emulator] if emulator else []
    notes += [f"{name}={value}" for name, value in env.options.items()]
    if env.opponents:
        notes.append(f"against {', '.join(name.partition('#')[0] for name in env.opponents)}")
    if env.num_levels:
        notes.append(f"levels {env.start_level} to {env.start_level + env.num_levels - 1}")
    return f"{env.id} ({', '.join([*notes, env.adapter])})"
