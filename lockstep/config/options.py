"""Options of a run: how it is evaluated, stored and displayed."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from lockstep.config.needs import Need
from lockstep.config.settings import Names, SettingsError, check_values, require

_MOST_EPISODES = 1_000_000
"""The maximum number of episodes of an evaluation."""


Levels = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Which episodes an evaluation plays, and how."""

    episodes: int = 10
    """Episodes to play. More narrow the confidence interval."""
    greedy: bool = False
    """Take the most likely action, like an exported policy. By default actions are drawn from the policy."""
    seed: int | None = None
    """Seed of environments and action noise. Default: the experiment's."""
    num_envs: int | None = None
    """Environments that run at once. Default: up to 16."""
    levels: str | None = "train"
    """Levels to play if the run was trained on some of them (env.num_levels). train plays the same levels, and test all
    others. FIRST..LAST, as in 1001..1005, plays these levels once in each attempt. None plays all other levels, since
    training scores cover the same."""
    attempts: int = 1
    """How often each of the levels FIRST..LAST is played. The result is the best attempt and the mean of all attempts.
    More attempts raise the best one by luck alone."""
    max_steps: int | None = None
    """The maximum number of environment steps of an episode with gymnasium, whose tasks may never end. Default:
    27,000."""
    opponents: tuple[str, ...] = ()
    """Players of the other agents in matches: random, RUN, RUN@ITERATION or file.py:play. Default: as in training."""
    metrics: Names = ()
    """Numbers in the environment's info to report, in the form of --env.metrics. Default: those of training."""

    def validate(self) -> None:
        """Raise SettingsError for values of another type or out of range."""
        check_values(self)
        check_episodes(self.episodes, "--episodes")
        if self.fixed_levels is None and self.attempts != 1:
            raise SettingsError(
                f"--attempts {self.attempts} repeats the same levels: name them, as in --levels 1001..1005, or leave "
                "it out."
            )
        if self.fixed_levels is not None and self.episodes != EvaluationSettings.episodes:
            raise SettingsError(
                f"--episodes {self.episodes} with --levels {self.levels}: every attempt plays each of these levels "
                "once. Use --attempts for more episodes."
            )
        if self.fixed_levels is not None and self.metrics:
            raise SettingsError(
                f"--metrics {' '.join(self.metrics)} with --levels {self.levels}: attempts report scores alone. Leave "
                "it out, or evaluate without --levels."
            )
        for flag, value in (
            ("--attempts", self.attempts),
            ("--num-envs", self.num_envs),
            ("--max-steps", self.max_steps),
        ):
            if value is not None and value < 1:
                raise SettingsError(f"{flag} {value} is out of range: it must be at least 1.")

    @property
    def fixed_levels(self) -> range | None:
        """The levels FIRST..LAST; None if episodes draw their levels.

        Raises:
            SettingsError: the levels have no known form.
        """
        if self.levels is None or self.levels in get_args(Levels):
            return None
        found = re.fullmatch(r"(\d{1,10})\.\.(\d{1,10})", self.levels)
        levels = range(int(found[1]), int(found[2]) + 1) if found else range(0)
        if not levels:
            raise SettingsError(
                f"--levels {self.levels} must be train, test, or the first and the last level, as in --levels "
                "1001..1005."
            )
        return levels


@dataclass(frozen=True)
class RunOptions:
    """How a run is stored and displayed. No option changes a bit of the result."""

    run: str | None = None
    """Folder of the run. It must be new or empty. Default: a new folder below runs/."""
    checkpoint_every: int = 50
    """Iterations between checkpoints. Lower loses less work when a machine fails; higher writes less to disk."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints are kept. The best one is always kept, too."""
    eval_every: int = 0
    """Iterations between evaluations, which use separate environments. Lower evaluates more often and takes longer; 0
    switches evaluations off."""
    eval_episodes: int = 10
    """Episodes of each evaluation. More give a narrower confidence interval and take longer."""
    eval_greedy: bool = False
    """Take the most likely action in evaluations instead of drawing one, as for published scores of SAC and MPO."""
    eval_opponents: tuple[str, ...] = ()
    """Players of the other agents in evaluations, in the form of env.opponents. Default: as in training."""
    on_nonfinite: Literal["stop", "continue"] = "stop"
    """What to do when an environment returns NaN or an infinity, or when learning diverges: parameters are not finite,
    or losses have not been finite for 5 iterations. stop ends the run with exit code 1 and names the environment or the
    last finite checkpoint. continue warns once and keeps that checkpoint. Runs that stay finite are not affected."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """A live panel, plain lines, or nothing. auto is live on a terminal and plain elsewhere."""
    tensorboard: bool = True
    """Write TensorBoard events to the run's folder."""
    check_env: bool = True
    """Test your own environment briefly before a new run, and warn if resume or verify could not repeat it (a short
    lockstep check-env). Switch it off to save a few seconds with slow environments."""
    callback: str | None = None
    """Your function or lockstep.Callback (file.py:follow). It is called after every iteration and may end the run."""
    wandb: str | None = None
    """Weights & Biases project to send the metrics to as well (needs the extra wandb)."""
    trackio: str | None = None
    """trackio project to send the metrics to as well (needs the extra trackio)."""

    needs: ClassVar[tuple[Need, ...]] = (
        Need(("eval_episodes", "eval_greedy", "eval_opponents"), ("eval_every",), words="above 0"),
    )

    @property
    def evaluation(self) -> EvaluationSettings:
        """The settings of evaluations during training."""
        return EvaluationSettings(
            episodes=self.eval_episodes, greedy=self.eval_greedy, opponents=self.eval_opponents, levels=None
        )

    def __post_init__(self) -> None:
        if isinstance(self.eval_opponents, list):  # from JSON
            object.__setattr__(self, "eval_opponents", tuple(self.eval_opponents))

    @staticmethod
    def of(given: RunOptions | str | Path | None) -> RunOptions:
        """The options as given, or options with this folder; None means the defaults."""
        if isinstance(given, (str, Path)):
            return RunOptions(run=str(given))
        if not (given is None or isinstance(given, RunOptions)):
            raise SettingsError(f"{given!r} is neither RunOptions nor a folder: write RunOptions(run='runs/pong').")
        return given or RunOptions()

    def validate(self) -> None:
        """Raise SettingsError for values out of range, and for trackers that are not installed."""
        check_values(dataclasses.replace(self, run=str(self.run) if isinstance(self.run, Path) else self.run))
        if self.run == "":
            raise SettingsError("--run has an empty name. Name a folder, or leave it out for a new one below runs/.")
        for name, least in (("checkpoint_every", 1), ("keep_checkpoints", 1), ("eval_every", 0)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise SettingsError(f"--{flag} {getattr(self, name)} is out of range: it must be at least {least}.")
        check_episodes(self.eval_episodes, "--eval-episodes")
        for tracker in ("wandb", "trackio"):
            if project := getattr(self, tracker):
                otherwise = f"Or leave --{tracker} out: metrics.jsonl and TensorBoard are always written."
                require(tracker, tracker, f"--{tracker} {project}", otherwise)


def check_episodes(episodes: int, flag: str) -> None:
    """Raise SettingsError for an invalid number of an evaluation's episodes. flag: the flag that set it."""
    if not 1 <= episodes <= _MOST_EPISODES:
        raise SettingsError(f"{flag} {episodes} is out of range: an evaluation has 1 to {_MOST_EPISODES:,}.")
