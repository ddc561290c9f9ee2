"""Flags with several values: `--seed 1..5 --algorithm.learning-rate 1e-3,3e-4` means ten runs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import tyro

from lockstep.cli.common import BY_NAME, MERGED, advising, refuse_repeated, with_values
from lockstep.cli.recipe import parse_experiment, with_preset
from lockstep.cli.suggest import check_flags
from lockstep.cli.unused import idle, sentence
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.sweep.options import SweepOptions
from lockstep.sweep.population import Population
from lockstep.sweep.search import HOW_TO_SEARCH, Between, OneOf, Search, space_of
from lockstep.sweep.spec import Run, labelled, setting, task
from lockstep.system.output import print_line


@dataclass(frozen=True)
class RecipeArguments:
    """Run one or several recipes, separated by commas, with every combination of settings, as one durable queue. Any
    setting may have several values: 1e-3,3e-4 (no space after a separating comma) or, for whole numbers, 1..5."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    layout: str = "auto"
    """The layout of each run, as for train. A run gets as many cores and GPUs as its layout keeps busy. auto gives each
    run one core, since many runs are faster side by side than one after the other."""
    preset: str | None = None
    """As for train. Presets that differ only in their layouts become one run."""
    sweep: Annotated[SweepOptions, tyro.conf.arg(name="")] = field(default_factory=SweepOptions)


_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_NAMED = r"(?=[\w-]+=)"
"""Before a NAME=VALUE."""
_LEARNED = {"--preset", *("--" + f.name.replace("_", "-") for f in dataclasses.fields(Experiment))}
"""Flags without a dot whose commas separate values. Other flags without a dot do not affect what is learned."""


@dataclass(frozen=True)
class _Axis:
    """A flag and its alternatives, each as words that include the flag."""

    flag: str
    alternatives: list[list[str]]

    @property
    def varied(self) -> bool:
        return len(self.alternatives) > 1


def runs_of(
    recipes: dict[str, Experiment], flags: list[str], folder: str, defaults: SweepOptions, advice: str = ""
) -> tuple[list[Run], SweepOptions]:
    """The runs that recipes and flags describe, and the sweep's options among the flags.

    Args:
        recipes: experiments by the names that the user gave.
        flags: flags of lockstep train and of the sweep.
        folder: the sweep's folder, for the help.
        defaults: the sweep's options before flags.
        advice: text to append to errors about a flag's value. By default, it says how to write several values if that
            may be the mistake.

    Raises:
        SettingsError: a flag is unknown, or its value or list of values is not valid.
        SystemExit: help was requested and printed.
    """
    named = _groups(flags)
    for flag, *values in named:
        if _normal(flag) in BY_NAME:
            # gravity=1, gravity=2 is a list of alternatives.
            refuse_repeated(_normal(flag), [value for value in values if not value.endswith(",")])
    groups = [each for group in named for each in _by_name(group)]
    axes = [_Axis(_normal(group[0]), _alternatives(group, [*recipes.values()])) for group in groups]
    settings = [axis for axis in axes if axis.flag not in MERGED and not _is_single(axis.flag)]
    counts = Counter(axis.flag for axis in settings if len(axis.alternatives[0]) > 1)
    if twice := [flag for flag, count in counts.items() if count > 1]:
        raise SettingsError(
            f"{twice[0]} is given twice, but only the last one would count. Write several values as one list, "
            f"{twice[0]} 1,2,3."
        )
    # Sweeps vary the seed most often, so it is set without parsing all other flags again.
    seeds = [
        _whole(" ".join(words[1:]))
        for axis in axes
        if axis.flag == "--seed" and axis.varied
        for words in axis.alternatives
    ]
    others = [axis for axis in axes if not (axis.flag == "--seed" and axis.varied)]
    runs: list[Run] = []
    options = defaults
    for name, recipe in recipes.items():
        for chosen in itertools.product(*(axis.alternatives for axis in others)):
            words = [word for alternative in chosen for word in alternative]
            experiment, layout = with_preset(recipe, words)
            arguments = RecipeArguments(experiment, layout=layout, sweep=defaults)
            with advising(advice or _how_to_list(recipe, groups)):
                given = parse_experiment(arguments, f"sweep {folder} {name}", words)
            options = given.sweep
            varied: dict[str, str] = {}
            for axis, alternative in zip(others, chosen):
                if axis.varied:
                    before = varied.get(axis.flag[2:])
                    varied[axis.flag[2:]] = "+".join(filter(None, (before, _value(alternative))))
            label = labelled(f"{name.rpartition(':')[2]}-{task(given.experiment)}", varied)
            for seed in seeds or [given.experiment.seed]:
                runs.append(Run(given.experiment.replace(seed=seed), given.layout, given.options, label))
    if not options.search:  # searched settings may make them effective
        _tell_idle(axes, [run.experiment for run in runs[:: len(seeds) or 1]])
    return runs, options


def _inside(path: str) -> bool:
    """Whether a path names a part of a setting that has no flag: an option, or one of several numbers."""
    whole, _, last = path.rpartition(".")
    return whole.endswith(".options") or last.isdigit()


def search_of(
    recipes: dict[str, Experiment], flags: list[str], folder: str, defaults: SweepOptions
) -> tuple[Search | Population, SweepOptions]:
    """The search that recipes and flags describe, or the population if --population is given, and the sweep's options.

    Raises:
        SettingsError: a searched setting does not exist, or its values are not valid.
        SystemExit: see runs_of.
    """
    groups = _groups(flags)
    refuse_repeated("--search", [word for flag, *words in groups if flag == "--search" for word in words])
    runs, options = runs_of(recipes, flags, folder, defaults)

    def alternatives(name: str, values: str) -> list[Experiment]:
        flag = "--" + _normal(name)
        others = [word for group in groups if _normal(group[0]) != flag for word in group]
        given = [*others, flag, *values.split()]
        advice = f"--search {name}={values} is neither a range nor a list of values of {flag}. {HOW_TO_SEARCH}"
        return [run.experiment for run in runs_of(recipes, given, folder, defaults, advice)[0]]

    space: dict[str, Between | OneOf] = {}
    for name, text in options.search.items():
        path = name.replace("-", "_")
        if not _inside(path):
            check_flags("sweep", [[f"--{name}"]], runs[0].experiment)
        setting(runs[0].experiment, path)
        space[path] = space_of(path, str(text), partial(alternatives, name, str(text)))
    for flag in dict.fromkeys(_normal(group[0]) for group in groups):
        if flag[2:].replace("-", "_") in space and not options.evolution:  # with evolution, all members begin with it
            print_line(f"{flag} has no effect, because --search chooses its values.", sys.stderr)
    if options.population is None:
        return Search(tuple(runs), space), options
    if len(runs) > 1:
        raise SettingsError(
            f"A population has one task, and its members' seeds follow from one seed, but {len(runs)} experiments "
            "were given. Give --env.id, --seed and all other flags one value, and each population its own folder."
        )
    return Population(runs[0], space, options.population), options


def _tell_idle(axes: list[_Axis], experiments: list[Experiment]) -> None:
    """Report flags that have no effect in any of the experiments."""
    lacking = [idle(experiment) for experiment in experiments]
    named = {axis.flag[2:].replace("-", "_") for axis in axes}
    for name, what in lacking[0].items():
        if name in named and all(name in each for each in lacking):
            print_line(sentence(name, what), sys.stderr)


def _how_to_list(recipe: Experiment, groups: list[list[str]]) -> str:
    """Advice after the parser has rejected flags, if one of them may have been meant as several values."""
    for flag, *values in groups:
        text = " ".join(values)
        if len(values) < 2 and not re.fullmatch(r"\d+-\d+", text):
            continue
        with contextlib.suppress(SettingsError):  # the parser reports settings that do not exist
            if not isinstance(setting(recipe, flag[2:]), (tuple, list, dict)):
                return (
                    f"If {flag} {text} means several values, separate them with commas, 1e-3,3e-4, or write a range, "
                    "1..3."
                )
    return ""


def _value(words: list[str]) -> str:
    """An alternative as it appears in a run's name."""
    return "+".join(words[1:]) or str(not words[0].rpartition(".")[2].startswith("no-"))


def _groups(flags: list[str]) -> list[list[str]]:
    """Each flag with its values, in order."""
    groups: list[list[str]] = []
    for first, *values in with_values(flags):
        flag, equals, value = first.partition("=")
        groups.append([flag, value, *values] if equals and first.startswith("--") else [first, *values])
    return groups


def _normal(flag: str) -> str:
    return flag.replace("_", "-")


def _is_single(flag: str) -> bool:
    """Whether a flag does not affect what is learned, so that its commas belong to its value."""
    return "." not in flag and _normal(flag) not in _LEARNED


def _by_name(group: list[str]) -> list[list[str]]:
    """Split a flag with several NAME=VALUE into one flag for each. The value may be a list: NAME=1,2."""
    flag, text = group[0], " ".join(group[1:])
    if _normal(flag) not in BY_NAME or _is_single(flag):
        return [group]
    return [[flag, each] for each in _split(r"(?<!,)\s+(?!,)", text)]


def _alternatives(group: list[str], recipes: list[Experiment]) -> list[list[str]]:
    flag, text = group[0], " ".join(group[1:])
    merged = _normal(flag) in BY_NAME
    if _is_single(flag) or not ("," in text or _RANGE.fullmatch(text.rpartition("=")[2] if merged else text)):
        return [group]
    if _normal(flag) == "--algorithm.anneal":  # schedules contain commas, so the next value begins with a name
        return [[flag, *re.split(rf"\s+{_NAMED}", part)] for part in re.split(rf",\s*{_NAMED}", text)]
    found: list[list[str]] = []
    for part in map(str.strip, _split(",", text) if merged else text.split(",")):
        named = re.match(r"([^=\[({'\"]*)=", part) if merged else None
        name, equals, value = (named[1], "=", part[named.end() :]) if named else ("", "", part)
        numbers = _RANGE.fullmatch(value)
        begin, end = map(int, numbers.groups()) if numbers else (0, 0)
        if not part or begin > end:
            what = f"the range {part} is empty" if part else "a value is missing next to a comma"
            raise SettingsError(f"{flag} {text}: {what}. Write a list as 1,2,3 or whole numbers as 1..3.")
        values = [str(number) for number in range(begin, end + 1)] if numbers else [value]
        if merged and not equals and found:  # NAME=1,2
            name = found[-1][1].partition("=")[0]
            found += [[flag, f"{name}={each}"] for each in values]
        elif numbers:
            found += [[flag, f"{name}{equals}{each}"] for each in values]
        elif part.lower() in ("true", "false") and _is_switch(flag, recipes):
            found.append([_switch(flag, on=part.lower() == "true")])
        else:
            # A path, or an option's value, may contain spaces.
            found.append([flag, *([part] if merged or ".py:" in part else part.split())])
    return found


def _split(separator: str, text: str) -> list[str]:
    """Split a text at matches of a pattern outside brackets and quotes."""
    hidden, depth, quote = list(text), 0, ""
    for i, char in enumerate(text):
        opens = char in "'\"" and (depth > 0 or text[i - 1 : i] in ("", "=", ",", " "))
        if depth or quote or opens:
            hidden[i] = "_"
        if quote:
            quote = "" if char == quote and text[i - 1] != "\\" else quote
        elif opens:
            quote = char
        else:
            depth += (char in "[({") - (depth > 0 and char in "])}")
    begins = [0, *(found.end() for found in re.finditer(separator, "".join(hidden)))]
    ends = [*(found.start() for found in re.finditer(separator, "".join(hidden))), len(text)]
    return [text[begin:end] for begin, end in zip(begins, ends)]


def _is_switch(flag: str, recipes: list[Experiment]) -> bool:
    """Whether a flag's setting is on or off, in the recipes that have it."""
    for recipe in recipes:
        with contextlib.suppress(SettingsError):
            return isinstance(setting(recipe, flag[2:]), bool)
    return True  # the parser reports settings that do not exist


def _switch(flag: str, *, on: bool) -> str:
    """--algorithm.double, or --algorithm.no-double."""
    path, dot, name = flag[2:].rpartition(".")
    return f"--{path}{dot}{'' if on else 'no-'}{name}"


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SettingsError(
            f"--seed {text} is not a whole number. Several seeds are written as --seed 1..5 or --seed 3,7,9."
        ) from None
