"""`lockstep train RECIPE …` and `lockstep resume RUN …`."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import gymnasium
import numpy as np
import tyro

from lockstep import envs
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.cli.common import is_of, parse, progress_to_stderr, say, say_json, unknown, with_preset, with_values
from lockstep.cli.help import asks, columns, width_of_terminal
from lockstep.cli.main import VERBS
from lockstep.cli.suggest import recipes_like
from lockstep.cli.unused import unused, unused_options
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import flat, to_json
from lockstep.config.settings import SettingsError, check_values
from lockstep.config.synonyms import synonyms
from lockstep.config.user_code import files_named, load_value
from lockstep.experiment import Experiment, WarmStart
from lockstep.run.files import reading
from lockstep.run.finding import require_empty
from lockstep.run.folder import RunFolder
from lockstep.run.rows import diverged
from lockstep.system.output import Explained, print_line, print_warning, reader_gone

if TYPE_CHECKING:
    from lockstep.training.job import Result

T = TypeVar("T")


@dataclass(frozen=True)
class TrainArguments:
    """Train an agent. Every setting of the recipe has a flag with the same name."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    layout: str = "auto"
    """auto (lockstep chooses for this machine and prints its choice), inline (one process), processes:N, cpu:aC-lL (C
    collectors, L learners), a0-l1 (their GPUs), ray:N or ray:aC-lL (a Ray cluster) or torchrun. Options follow, as in
    processes:2,env_threads=2. It changes the result only if timing decides (--scheme.lag async, …)."""
    preset: str | None = None
    """A well-known scheme with a suitable layout: impala, ddppo, … (lockstep schemes draws them). Other flags can
    change both."""
    dry_run: bool = False
    """Print the settings and the values derived from them without training."""
    json: bool = False
    """Print one JSON document. Progress goes to standard error."""


@dataclass(frozen=True)
class ResumeArguments:
    """Continue a stopped or killed run exactly: it ends with the same bits as without the stop."""

    run: tyro.conf.Positional[str]
    """The run's folder."""
    options: Annotated[RunOptions, tyro.conf.arg(name="")]
    layout: str | None = None
    """The layout, as for train. It may differ from before. Default: the layout that the run was started with, where
    auto chooses again."""
    checkpoint: str | None = None
    """The checkpoint to continue from: latest, best, or an iteration. Newer ones are set aside. Default: latest."""
    json: bool = False
    """Print one JSON document. Progress goes to standard error."""


def train(arguments: list[str]) -> int:
    """Run `lockstep train`."""
    recipe, flags = recipe_and_flags("train", arguments)
    experiment, layout_of_preset = with_preset(load_recipe(recipe), flags)
    given = parse_experiment(TrainArguments(experiment, layout=layout_of_preset), f"train {recipe}", flags)
    layout = Layout.parse(given.layout)
    given.options.validate()
    # Flags that remove the recipe's warm start reset its other settings, too, which is nothing to tell.
    base = experiment if given.experiment.warm_start.run else experiment.replace(warm_start=WarmStart())
    for sentence in (*unused(given.experiment, base), *unused_options(given.options, RunOptions())):
        print_line(sentence, sys.stderr)
    if given.dry_run:
        return _dry_run(given, layout)
    from lockstep.launchers.launch import train as run

    with progress_to_stderr(given.json):
        result = run(given.experiment, layout, given.options)
    return report(result, json=given.json)


def resume(arguments: list[str]) -> int:
    """Run `lockstep resume`."""
    from lockstep.launchers.launch import resume as run

    if all(argument.startswith("-") for argument in arguments) and not asks(arguments):
        raise SettingsError("resume needs the folder of a run, as in: lockstep resume runs/breakout")
    _refuse_settings(arguments)
    # Parse twice, since the folder, wherever it is among the flags, provides the flags' defaults.
    given = parse(ResumeArguments, "resume", arguments, ResumeArguments(run=tyro.MISSING, options=RunOptions()))
    defaults = RunFolder.open(given.run).options()
    given = parse(ResumeArguments, "resume", arguments, ResumeArguments(run=tyro.MISSING, options=defaults))
    layout = None if given.layout is None else Layout.parse(given.layout)
    given.options.validate()
    if given.options.run != defaults.run:
        raise SettingsError(
            f"--run {given.options.run} is only for train: resume continues the run in its folder, {given.run}. Leave "
            "--run out."
        )
    for sentence in unused_options(given.options, defaults):
        print_line(sentence, sys.stderr)
    with progress_to_stderr(given.json):
        result = run(given.run, layout, given.options, checkpoint=given.checkpoint)
    return report(result, json=given.json)


def _refuse_settings(arguments: list[str]) -> None:
    """Raise SettingsError if flags of resume are settings of the experiment."""
    for first, *_ in with_values(arguments):
        flag = first.partition("=")[0]
        names = [flag, *(each.setting for each in synonyms(flag))]
        if flag.startswith("--") and any(is_of(name, Experiment) for name in names):
            raise SettingsError(
                f"{flag} would change what is learned, but resume continues a run exactly. A run with other settings, "
                f"even just a longer one, is a different run: lockstep train RUN {flag} ... takes the other settings "
                "from RUN, and --warm-start.run RUN begins with what RUN has learned."
            )


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


def derived_facts(experiment: Experiment, layout: Layout) -> dict[str, Any]:
    """Values derived from the settings of a resolved experiment and from a layout on this machine."""
    scheme = experiment.scheme
    updates, step = experiment.gradient_steps
    return {
        "iterations": experiment.iterations,
        "samples_per_iteration": experiment.samples_per_iteration,
        "total_samples": experiment.iterations * experiment.samples_per_iteration,
        "gradient_steps_per_iteration": updates,
        "samples_per_gradient_step": step,
        "envs_per_shard": experiment.envs_per_shard,
        "acting_batch": scheme.acting_batch or experiment.envs_per_shard,
        "most_processes": scheme.shards,
        "rollout_megabytes": round(_rollout_bytes(experiment) / 1e6, 1),
        **_replay_facts(experiment, layout),
        "identity": experiment.identity(),
    }


def _replay_facts(experiment: Experiment, layout: Layout) -> dict[str, Any]:
    """The memory that replay needs and the memory available, if the experiment replays."""
    from lockstep.buffers.data_sources import data_bytes
    from lockstep.buffers.replay_placement import replay_bytes
    from lockstep.system.memory import available_bytes
    from lockstep.training.prepare import learners_here

    needed, available = experiment.scheme.shards * replay_bytes(experiment), available_bytes()
    if not needed:
        return {}
    known = {} if available is None else {"available_megabytes": round(available / 1e6, 1)}
    filling = data_bytes(experiment).held_by(learners_here(layout))
    data = {"data_megabytes": round(filling / 1e6, 1)} if filling else {}
    return {"replay_megabytes": round(needed / 1e6, 1), **data, **known}


def _rollout_bytes(experiment: Experiment) -> int:
    """Bytes of one iteration's rollouts: observations, actions and a dozen numbers per sample."""
    observation, action = envs.spaces(experiment.env)
    return experiment.samples_per_iteration * (_space_bytes(observation) + _space_bytes(action) + 12 * 4)


def _space_bytes(space: gymnasium.Space[Any]) -> int:
    if isinstance(space, gymnasium.spaces.Dict):
        return sum(map(_space_bytes, space.spaces.values()))
    if isinstance(space, gymnasium.spaces.Tuple):
        return sum(map(_space_bytes, space.spaces))
    size = 1 if space.dtype == np.uint8 else 4
    return math.prod(space.shape or ()) * size


def _dry_run(given: TrainArguments, layout: Layout) -> int:
    from lockstep.launchers.auto import chosen
    from lockstep.training import callbacks
    from lockstep.training.prepare import check_model, prepare, prepare_options

    if given.options.run is not None:
        require_empty(given.options.run)
    with progress_to_stderr(given.json):
        layout = chosen(layout, given.experiment, say=False)
        experiment = prepare(given.experiment, layout)
        options = prepare_options(experiment, layout, given.options)
        if given.options.callback is not None:
            callbacks.check(given.options.callback, layout)
        facts = derived_facts(experiment, layout)
        warnings = (*experiment.algorithm.warnings(experiment.setup), *check_model(experiment))
    for warning in warnings:
        print_warning(warning)
    settings = to_json(experiment)
    if given.json:
        stored = dataclasses.asdict(options)
        say_json({"experiment": settings, "layout": str(layout), "options": stored, "derived": facts})
        return 0
    for name, value in flat(settings).items():
        say(f"{name:<40} {value}")
    say(f"{'layout':<40} {layout}")
    for name, value in facts.items():
        say(f"→ {name.replace('_', ' '):<38} {f'{value:,}' if isinstance(value, int) else value}")
    return 0


def report(result: Result, *, json: bool) -> int:
    lost = diverged(RunFolder(result.run).metrics)
    code = 130 if result.stopped else 1 if lost else 0
    if reader_gone():
        return code  # Ctrl-C also ends `tee`, so nobody would read the report
    if json:
        say_json({**dataclasses.asdict(result), "run": str(result.run), "diverged": lost})
    else:
        say(f"run: {result.run}")
        if result.score is not None:
            say(f"score: {result.score:.2f} (mean of the last 100 training episodes)")
        if lost:
            say(f"diverged: {', '.join(lost)} ended as NaN or infinity, and probably the policy, too")
        if result.stopped:
            command = f"lockstep resume {shlex.quote(str(result.run))}"
            say(f"stopped after {result.iterations:,} iterations; to continue: {command}")
        else:
            say(f"digest: {result.digest}")
    return code
