"""A search for settings: which values it tries, with which runs, and how it judges a trial."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.algorithms.rnd import with_curiosity
from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError, did_you_mean, parse_count
from lockstep.envs.info import labels
from lockstep.experiment import Experiment
from lockstep.reports.runs import SCORES
from lockstep.run.files import read_objects
from lockstep.sweep.spec import Run, changed, plain, replaced, setting

OBJECTIVE, TRIALS = "score/mean", 20
_ALL_SCORES = (*SCORES, "score/length", "eval/score_low", "eval/score_high", "eval/length")
_COUNTS = ("samples", "frames", "updates", "iteration", "seconds", "episodes", "gradient_norm")
_OF_ANY_RUN = ("curriculum", "env", "eval", "hyper", "lag", "popart", "replay", "score", "speed", "time", "wait")
"""Groups of metrics that do not come from the loss."""
HOW_TO_SEARCH = "Write LOW..HIGH, log:LOW..HIGH, or values separated by commas."
_DIGITS = 4
"""Significant digits of the numbers that are tried. More would make no visible difference."""


@dataclass(frozen=True)
class Between:
    """Any number from low to high; only whole numbers if both bounds and the setting are whole."""

    low: float
    high: float
    log: bool = False
    """Whether every order of magnitude is tried equally often."""

    def __str__(self) -> str:
        """The form that --search takes."""
        return f"{'log:' if self.log else ''}{self.low}..{self.high}".replace("e-0", "e-")

    def near(self, value: float) -> float:
        """The value rounded to few digits."""
        if isinstance(value, int):
            return value
        # For discounts and the like, the distance from 1 matters.
        short = round(1 - float(f"{1 - value:.{_DIGITS}g}"), 15) if 0.9 < value < 1 else float(f"{value:.{_DIGITS}g}")
        return min(max(short, self.low), self.high)


@dataclass(frozen=True)
class OneOf:
    """One of some values, in no order."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        # As the sweep's files return them: lists as tuples, each value once.
        values = list(from_json(to_json(plain(self.values))))
        object.__setattr__(self, "values", tuple(x for n, x in enumerate(values) if x not in values[:n]))

    def __str__(self) -> str:
        """The form that --search takes."""
        return ",".join(" ".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in self.values)


@dataclass(frozen=True)
class Search:
    """Runs whose settings are searched for, trial by trial."""

    runs: Sequence[Run]
    """The runs of every trial: experiments that differ only in their seeds. More seeds tell good settings from lucky
    ones; each costs a run per trial."""
    space: Mapping[str, Between | OneOf]
    """The values to try, by a setting's path, such as {"algorithm.learning_rate": Between(1e-5, 1e-3, log=True)}."""
    trials: int = TRIALS
    """Number of trials. More find better settings. The first ten are drawn at random."""
    objective: str = OBJECTIVE
    """The metric (docs/metrics.md) to maximize. A trial's value is the mean of the last values of its runs."""
    seed: int = 0
    """Seed of the draws. Another seed tries other settings."""

    def validate(self) -> None:
        """Raise SettingsError for mistakes that can be found before anything runs."""
        check_kinds("A search", self.runs, self.space)
        if self.trials < 1 or not self.space or not self.runs:
            raise SettingsError(
                f"A search needs at least one trial (--trials {self.trials}), a run ({len(self.runs)} given) and a "
                f"setting to search ({len(self.space)} given), as in --search algorithm.learning_rate=log:1e-5..1e-3."
            )
        check_objective(self.objective, self.runs, self.space)
        first = self.runs[0].experiment
        for name, space in self.space.items():
            check_space(name, space, setting(first, name))
            if len(self.space) == 1:  # with several settings, only combinations can be checked
                for value in _sure_to_be_tried(space, setting(first, name)):
                    replaced(first, name, value).validate()
        if any(run.experiment.replace(seed=first.seed) != first for run in self.runs):
            raise SettingsError(
                "The runs of a search may only differ in their seeds: the scores of different tasks or settings "
                "cannot be averaged into the value of a trial. Give each flag but --seed one value, and search the "
                "others: --search algorithm.epochs=2,4,8."
            )

    def trial(self, number: int, values: Mapping[str, Any]) -> list[Run]:
        """The runs of a trial."""
        runs = []
        for run in self.runs:
            tried = dataclasses.replace(run, experiment=changed(run.experiment, values))
            runs.append(dataclasses.replace(tried, label=f"{tried.title}-t{number:03}"))
        return runs

    def identity(self) -> Any:
        """Everything that decides which values are tried and how they are judged, except the number of trials."""
        experiments = [run.experiment.identity() for run in self.runs]
        return experiments, to_json(dict(self.space)), self.objective, self.seed


def space_of(name: str, text: str, alternatives: Callable[[], Sequence[Experiment]]) -> Between | OneOf:
    """Read LOW..HIGH, log:LOW..HIGH, or values separated by commas.

    Args:
        name: path of the setting that is searched.
        alternatives: returns the experiments with each of the values, read as if the setting's own flag gave them.

    Raises:
        SettingsError: it has none of these forms.
    """
    found = re.fullmatch(r"(log:)?([^\s,/]+?)\.\.([^\s,/]+)", text)  # paths contain dots, too
    if found is None:
        values: list[Any] = []
        for experiment in alternatives():
            if (value := setting(experiment, name)) not in values:
                values.append(value)
        return OneOf(tuple(values))
    try:
        return Between(_number(found[2]), _number(found[3]), found[1] is not None)
    except ValueError:
        raise SettingsError(f"--search {name}={text} is not a range of numbers. {HOW_TO_SEARCH}") from None


def measured(metrics: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without damaged ones."""
    return [known for _, known in read_objects(metrics.read_bytes() if metrics.exists() else b"") if known]


def reached(lines: Sequence[Mapping[str, Any]], objective: str) -> tuple[float | None, int]:
    """The last value of a metric, and the samples so far. The value is None if the metric was never measured or the run
    diverged."""
    value, samples = None, 0
    for known in lines:
        value, samples = known.get(objective, value), known.get("samples", samples)
    trained = [line for line in lines if "eval/score" not in line]
    diverged = bool(trained) and None in trained[-1].values()
    return None if diverged else value, samples


def mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is unknown or not a number."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if len(known) == len(values) else None


def _number(text: str) -> float:
    try:
        return parse_count(text)
    except ValueError:
        return float(text)


def is_whole(space: Between, value: Any) -> bool:
    """Whether only the whole numbers of a range are tried, given a value of the setting."""
    return isinstance(space.low, int) and isinstance(space.high, int) and isinstance(value, int)


def _sure_to_be_tried(space: Between | OneOf, value: Any) -> Sequence[Any]:
    """Values that must be valid for the search to work. Whole numbers inside a range may be invalid, for example if
    they must divide another setting; the ends of other ranges are hardly ever tried."""
    if isinstance(space, OneOf):
        return space.values
    inside = 1e-6 * (space.high - space.low)
    return () if is_whole(space, value) else (space.low + inside, space.high - inside)


def check_kinds(what: str, runs: Sequence[Run], space: Mapping[str, Between | OneOf]) -> None:
    """Raise SettingsError if the parts of a search or a population have wrong types."""
    if not isinstance(runs, Sequence) or not isinstance(space, Mapping):
        raise SettingsError(
            f"{what} has runs={runs!r} and space={space!r}: runs must be a list of lockstep.sweep.Run, and space must "
            f"map settings to the values to try, as in [Run(experiment)] and {{'algorithm.epochs': OneOf((2, 4))}}."
        )
    for each, kind in (*((run, Run) for run in runs), *((each, (Between, OneOf)) for each in space.values())):
        if not isinstance(each, kind):
            raise SettingsError(
                f"{what} has {each!r} where it takes a lockstep.sweep.Run, or a Between or OneOf for a setting, as in "
                "Run(experiment) and {'algorithm.learning_rate': Between(1e-5, 1e-3, log=True)}."
            )


def check_objective(objective: str, runs: Sequence[Run], space: Mapping[str, Between | OneOf]) -> None:
    """Raise SettingsError if the runs will never measure the objective, with any settings of the space."""
    if re.match("score/|eval/(?!env/)", objective) and objective not in _ALL_SCORES:
        guess = did_you_mean(objective, _ALL_SCORES)
        raise SettingsError(f"There is no metric {objective} (--objective). {guess}docs/metrics.md lists them.")
    if objective.partition("/")[0] not in _OF_ANY_RUN:
        learned = [_learned(experiment) for run in runs for experiment in _examples(run.experiment, space)]
        names = sorted({*_COUNTS, *(name for each in learned for name in each or ())})
        # With several policies, each has its own metrics: loss/value/adversary.
        if None not in learned and not any(objective == name or objective.startswith(f"{name}/") for name in names):
            names = [*names, *_ALL_SCORES]
            raise SettingsError(
                f"There is no metric {objective} (--objective). {did_you_mean(objective, names)}These runs have "
                f"{', '.join(names)}, and others that docs/metrics.md lists."
            )
    if objective.startswith("eval/") and not all(run.options.eval_every for run in runs):
        raise SettingsError(
            f"--objective {objective} needs evaluations during training, which these runs do not have: add "
            "--eval-every N, in iterations."
        )
    group, _, name = objective.removeprefix("eval/").partition("/")
    if group == "env" and not all(name in labels(run.experiment.env.metrics) for run in runs):
        raise SettingsError(
            f"--objective {objective} needs the number that environments report as {name}, which these runs do not "
            "read: name it in --env.metrics."
        )


def _examples(experiment: Experiment, space: Mapping[str, Between | OneOf]) -> list[Experiment]:
    """The experiment, and others with one setting of the space changed: settings may add metrics."""
    found = [experiment]
    for name, each in space.items():
        values = each.values if isinstance(each, OneOf) else (each.low, each.high)
        found += [replaced(experiment, name, value) for value in values]
    return found


def _learned(experiment: Experiment) -> Sequence[str] | None:
    """The names of the metrics of the algorithm's loss; None if they are unknown."""
    try:
        algorithm = with_curiosity(experiment.algorithm.build())
        return list(algorithm.summarize(dict.fromkeys(algorithm.metric_names, 1.0)))
    except Exception:  # invalid settings are found later, and a user's summarize may not accept these numbers
        return None


def check_space(name: str, space: Between | OneOf, value: Any) -> None:
    """Raise SettingsError if a setting cannot be searched over this space, given a value of the setting."""
    if isinstance(space, OneOf):
        wrong = "" if space.values else "holds no value"
    elif isinstance(value, bool) or not (value is None or isinstance(value, (int, float))):
        wrong = f"is a range of numbers, but the setting is {value!r}: list the values, separated by commas"
    elif isinstance(value, int) and not is_whole(space, value):
        wrong = "is a range of fractions, but the setting is a whole number: give whole bounds"
    elif not -math.inf < space.low < space.high < math.inf or (space.log and space.low <= 0):
        wrong = "must have finite bounds, the lower one first, and be above 0 if it is logarithmic"
    else:
        wrong = ""
    if name == "seed":
        wrong = "would only find lucky seeds: give each trial several seeds with --seed 1..3"
    if wrong:
        raise SettingsError(f"The search of {name} over {space} {wrong}.")
