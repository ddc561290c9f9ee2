"""A search for settings: what is tried, with which runs, and what makes a trial good."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError, parse_count
from lockstep.experiment import Experiment
from lockstep.run.files import read_objects
from lockstep.sweep.spec import Run, changed, plain, replaced, setting

OBJECTIVE, TRIALS = "score/mean", 20
HOW_TO_SEARCH = "Write LOW..HIGH, log:LOW..HIGH, or the values themselves with commas between."
_DIGITS = 4
"""Digits of a number that is tried. More would make no visible difference."""


@dataclass(frozen=True)
class Between:
    """Any number from low to high; a whole one if both are whole and the setting is."""

    low: float
    high: float
    log: bool = False
    """Whether every order of magnitude is tried equally often."""

    def __str__(self) -> str:
        """In the form that --search takes."""
        return f"{'log:' if self.log else ''}{self.low}..{self.high}".replace("e-0", "e-")

    def near(self, value: float) -> float:
        """The number with few digits that a value stands for."""
        if isinstance(value, int):
            return value
        # Of discounts and the like, what counts is how far they are from 1.
        short = round(1 - float(f"{1 - value:.{_DIGITS}g}"), 15) if 0.9 < value < 1 else float(f"{value:.{_DIGITS}g}")
        return min(max(short, self.low), self.high)


@dataclass(frozen=True)
class OneOf:
    """One of some values, in no order."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        # As files of a sweep give them back: lists as tuples, each value once.
        values = list(from_json(to_json(plain(self.values))))
        object.__setattr__(self, "values", tuple(x for n, x in enumerate(values) if x not in values[:n]))

    def __str__(self) -> str:
        """In the form that --search takes."""
        return ",".join(" ".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in self.values)


@dataclass(frozen=True)
class Search:
    """Runs whose settings are searched for, trial by trial."""

    runs: Sequence[Run]
    """What every trial runs: experiments that differ in nothing but their seeds. More seeds tell good settings from
    lucky ones, and each costs a run a trial."""
    space: Mapping[str, Between | OneOf]
    """What is tried, by a setting's path, such as {"algorithm.learning_rate": Between(1e-5, 1e-3, log=True)}."""
    trials: int = TRIALS
    """More find better settings. The first ten are drawn blindly."""
    objective: str = OBJECTIVE
    """The metric (docs/metrics.md) to maximize: a trial's value is the mean, over its runs, of the last one of each."""
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
        check_objective(self.objective, self.runs)
        first = self.runs[0].experiment
        for name, space in self.space.items():
            check_space(name, space, setting(first, name))
            if len(self.space) == 1:  # of several, only combinations tell
                for value in _sure_to_be_tried(space, setting(first, name)):
                    replaced(first, name, value).validate()
        if any(run.experiment.replace(seed=first.seed) != first for run in self.runs):
            raise SettingsError(
                "The runs of a search may differ in their seeds alone: scores of other tasks or settings do not add up "
                "to the value of a trial. Give each flag but --seed one value, and search the others: "
                "--search algorithm.epochs=2,4,8."
            )

    def trial(self, number: int, values: Mapping[str, Any]) -> list[Run]:
        """The runs of a trial."""
        runs = []
        for run in self.runs:
            tried = dataclasses.replace(run, experiment=changed(run.experiment, values))
            runs.append(dataclasses.replace(tried, label=f"{tried.title}-t{number:03}"))
        return runs

    def identity(self) -> Any:
        """All that decides what a trial tries, and how it is judged; not how many trials there are."""
        experiments = [run.experiment.identity() for run in self.runs]
        return experiments, to_json(dict(self.space)), self.objective, self.seed


def space_of(name: str, text: str, alternatives: Callable[[], Sequence[Experiment]]) -> Between | OneOf:
    """Read LOW..HIGH, log:LOW..HIGH, or values with commas between.

    Args:
        name: path of the setting that is searched.
        alternatives: the experiments with each of the values, read as if they were given by the setting's own flag.

    Raises:
        SettingsError: it is none of them.
    """
    found = re.fullmatch(r"(log:)?([^\s,/]+?)\.\.([^\s,/]+)", text)  # paths have dots, too
    if found is None:
        values: list[Any] = []
        for experiment in alternatives():
            if (value := setting(experiment, name)) not in values:
                values.append(value)
        return OneOf(tuple(values))
    try:
        return Between(_number(found[2]), _number(found[3]), found[1] is not None)
    except ValueError:
        raise SettingsError(f"--search {name}={text} is no range of numbers. {HOW_TO_SEARCH}") from None


def measured(metrics: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without damaged ones."""
    return [known for _, known in read_objects(metrics.read_bytes() if metrics.exists() else b"") if known]


def reached(lines: Sequence[Mapping[str, Any]], objective: str) -> tuple[float | None, int]:
    """The last value of a metric that was measured, None if there is none or the run had diverged by its end, and the
    samples so far."""
    value, samples = None, 0
    for known in lines:
        value, samples = known.get(objective, value), known.get("samples", samples)
    trained = [line for line in lines if "eval/score" not in line]
    diverged = bool(trained) and None in trained[-1].values()
    return None if diverged else value, samples


def mean(values: Sequence[float | None]) -> float | None:
    """None if one of them is unknown, or no number."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if len(known) == len(values) else None


def _number(text: str) -> float:
    try:
        return parse_count(text)
    except ValueError:
        return float(text)


def is_whole(space: Between, value: Any) -> bool:
    """Whether only whole numbers of a range are tried, for a setting whose value is known."""
    return isinstance(space.low, int) and isinstance(space.high, int) and isinstance(value, int)


def _sure_to_be_tried(space: Between | OneOf, value: Any) -> Sequence[Any]:
    """Values that have to fit. Of whole numbers those between the ends may, where others divide by them; the ends of
    other ranges are hardly ever tried."""
    if isinstance(space, OneOf):
        return space.values
    inside = 1e-6 * (space.high - space.low)
    return () if is_whole(space, value) else (space.low + inside, space.high - inside)


def check_kinds(what: str, runs: Sequence[Run], space: Mapping[str, Between | OneOf]) -> None:
    """Raise SettingsError if the parts of a search, or of a population, are something else."""
    if not isinstance(runs, Sequence) or not isinstance(space, Mapping):
        raise SettingsError(
            f"{what} has runs={runs!r} and space={space!r}: runs is a list of lockstep.sweep.Run, and space maps "
            "settings to what is tried, as in [Run(experiment)] and {'algorithm.epochs': OneOf((2, 4))}."
        )
    for each, kind in (*((run, Run) for run in runs), *((each, (Between, OneOf)) for each in space.values())):
        if not isinstance(each, kind):
            raise SettingsError(
                f"{what} has {each!r} where it takes a lockstep.sweep.Run, or a Between or OneOf for a setting, as in "
                "Run(experiment) and {'algorithm.learning_rate': Between(1e-5, 1e-3, log=True)}."
            )


def check_objective(objective: str, runs: Sequence[Run]) -> None:
    """Raise SettingsError if runs will never measure what they are to be judged by."""
    if objective.startswith("eval/") and not all(run.options.eval_every for run in runs):
        raise SettingsError(
            f"--objective {objective} is measured by evaluations during training, which these runs do not have: add "
            "--eval-every N, in iterations."
        )


def check_space(name: str, space: Between | OneOf, value: Any) -> None:
    """Raise SettingsError if a setting, whose value is known, cannot be searched so."""
    if isinstance(space, OneOf):
        wrong = "" if space.values else "holds no value"
    elif isinstance(value, bool) or not (value is None or isinstance(value, (int, float))):
        wrong = f"is a range of numbers, but the setting is {value!r}: list the values, with commas between"
    elif isinstance(value, int) and not is_whole(space, value):
        wrong = "is a range of fractions, but the setting is a whole number: give whole bounds"
    elif not -math.inf < space.low < space.high < math.inf or (space.log and space.low <= 0):
        wrong = "must begin below its end, above 0 if it is logarithmic, and be finite"
    else:
        wrong = ""
    if name == "seed":
        wrong = "would search for luck: give several seeds to each trial, --seed 1..3"
    if wrong:
        raise SettingsError(f"The search of {name} over {space} {wrong}.")
