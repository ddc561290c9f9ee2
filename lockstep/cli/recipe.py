"""The experiment that a command's recipe, preset and flags mean."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import gymnasium

from lockstep import envs
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.cli.common import parse, say, unknown
from lockstep.cli.help import asks, columns, width_of_terminal
from lockstep.cli.main import VERBS
from lockstep.cli.suggest import recipes_like
from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError, check_values
from lockstep.config.user_code import files_named, load_value
from lockstep.experiment import Experiment, WarmStart
from lockstep.run.files import reading
from lockstep.run.folder import RunFolder
from lockstep.system.output import Explained

T = TypeVar("T")


def asked(
    verb: str, arguments: list[str], default: Callable[[Experiment, str], T], layout: str = "auto"
) -> tuple[T, T]:
    """Parse the arguments of a command that begin with a recipe.

    Args:
        default: the arguments without flags, given the recipe's experiment and the layout. A preset may change both.
        layout: the default.

    Returns:
        The arguments with their flags, and without.

    Raises:
        Explained: help was printed.
        SettingsError: the recipe, the preset or a flag does not exist, or a value is not valid.
    """
    recipe, flags = recipe_and_flags(verb, arguments)
    without = default(*with_preset(load_recipe(recipe), flags, layout))
    return parse_experiment(without, f"{verb} {recipe}", flags), without


def recipe_and_flags(verb: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The recipe with which the arguments of train, bench, tune or submit begin, and the other arguments.

    Raises:
        Explained: help was printed.
        SettingsError: no recipe is given.
    """
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    from lockstep.recipes import RECIPES

    if asks(arguments[:1]):
        about = VERBS[verb][1].partition(":")[0]
        say(f"usage: lockstep {verb} RECIPE [FLAGS]\n\n{about[0].upper()}{about[1:]}.\n")
        say("RECIPE is one of these (lockstep recipes describes them):\n")
        kinds = dict.fromkeys(name.partition("-")[0] for name in RECIPES)
        listed = [(kind, " ".join(name for name in RECIPES if name.startswith(f"{kind}-"))) for kind in kinds]
        say(columns(listed, width_of_terminal()))
        say("\nor FILE.py:FUNCTION for your own recipe, or a run's folder for its settings.\n")
        say(f"lockstep {verb} RECIPE --help shows the most important flags, for example")
        say(f"    lockstep {verb} ppo-cartpole --help")
        raise Explained(0)
    raise SettingsError(
        f"{verb} needs a recipe as its first argument, FILE.py:FUNCTION for your own, or the folder of a run, whose "
        "settings it takes. lockstep recipes lists all recipes. "
        f"For example: lockstep {verb} ppo-cartpole{' --total-steps 100k' if verb == 'train' else ''}"
    )


def load_recipe(name: str) -> Experiment:
    """The experiment that a recipe's name, a run's folder or a reference to a user's function means.

    Raises:
        SettingsError: the recipe does not exist, or the function returns something else.
    """
    from lockstep.recipes import RECIPES

    with reading(name):
        is_folder = name not in RECIPES and Path(name).is_dir()
    if is_folder:
        return _of_run(name)
    if name not in RECIPES and ":" not in name:
        if like := recipes_like(name):
            raise SettingsError(like)
        raise unknown(
            "recipe",
            name,
            RECIPES,
            "lockstep recipes lists all. For your own recipe, write FILE.py:FUNCTION; for a run's settings, its "
            "folder.",
        )
    experiment = RECIPES[name]() if name in RECIPES else load_value(name)
    if isinstance(experiment, gymnasium.Env):
        raise SettingsError(
            f"{name} is an environment, not a recipe. Train on it with a recipe for its kind of observations and "
            f"actions, as in: lockstep train ppo-cartpole --env.id {name}"
        )
    if not isinstance(experiment, Experiment):
        raise SettingsError(
            f"{name} gives a {type(experiment).__name__}, not an Experiment. A recipe is a function that can be "
            "called without arguments and returns a lockstep.Experiment."
        )
    check_values(experiment)  # the flags' parser would only warn about these
    return experiment


def _of_run(name: str) -> Experiment:
    """A run's settings, without the metrics that its environments report by default, since flags may change these.

    Raises:
        SettingsError: there is no run, or its settings need files that the current folder does not contain.
    """
    run = RunFolder.open(name)
    experiment, home = run.experiment(), run.facts().get("directory", "")
    files = [file for file in files_named(to_json(experiment)) if not os.path.isabs(file)]
    if files and home and os.path.realpath(home) != os.path.realpath(os.curdir):
        raise SettingsError(
            f"The settings of {name} name {files[0]}, which is relative to {home}. Run the command there."
        )
    if experiment.env.metrics:
        experiment = experiment.replace(**{"env.metrics": envs.asked_metrics(experiment.env)})
    return experiment


def with_preset(experiment: Experiment, flags: list[str], layout: str = "auto") -> tuple[Experiment, str]:
    """The experiment and the default layout, after the preset that the flags name, if any. Other flags can change both.

    Raises:
        SettingsError: the preset does not exist, or does not fit the experiment.
    """
    words = [word for flag in flags for word in flag.split("=", 1)]
    names = [name for flag, name in itertools.pairwise(words) if flag == "--preset"]
    if not names:
        return experiment, layout
    from lockstep.recipes.presets import PRESETS

    if names[-1] not in PRESETS:
        raise unknown("preset", names[-1], PRESETS, "lockstep schemes draws them.")
    composed = PRESETS[names[-1]](experiment)
    return composed.experiment, str(composed.layout)


def parse_experiment(default: T, verb: str, flags: list[str]) -> T:
    """Parse the flags of a command whose arguments contain an experiment.

    Args:
        default: the arguments without flags, with the recipe's experiment.

    Raises:
        Explained: help was printed.
        SettingsError: a flag does not exist, or its value is not valid.
    """
    recipe: Any = default
    given: Any = parse(type(default), verb, flags, default)
    return dataclasses.replace(given, experiment=_begun_anew(given.experiment, recipe.experiment))


def _begun_anew(experiment: Experiment, recipe: Experiment) -> Experiment:
    """The experiment, without the digest and the derived settings of the recipe's replay data and warm start if flags
    name others."""
    if isinstance(experiment.algorithm, OffPolicyConfig) and isinstance(recipe.algorithm, OffPolicyConfig):
        replay, known = experiment.algorithm.replay, recipe.algorithm.replay
        if replay.data != known.data and replay.data_digest == known.data_digest:
            experiment = experiment.replace(**{"algorithm.replay.data_digest": ""})
    start, before, default = experiment.warm_start, recipe.warm_start, WarmStart()
    if start == before or not before.digest:
        return experiment
    if start.run == before.run:  # another checkpoint or other parts of the same run
        digest = "" if start.digest == before.digest else start.digest
        return experiment.replace(**{"warm_start.digest": digest})
    names = [field.name for field in dataclasses.fields(start) if field.name != "run"]
    same = {name: getattr(default, name) for name in names if getattr(start, name) == getattr(before, name)}
    return experiment.replace(warm_start=dataclasses.replace(start, **same))
