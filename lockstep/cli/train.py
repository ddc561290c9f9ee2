"""`lockstep train RECIPE …` and `lockstep resume RUN …`."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import gymnasium
import numpy as np
import tyro

from lockstep import envs
from lockstep.cli.common import is_of, parse, progress_to_stderr, say, say_json, with_values
from lockstep.cli.help import asks
from lockstep.cli.recipe import asked
from lockstep.cli.unused import unused, unused_options
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import flat, to_json
from lockstep.config.settings import SettingsError
from lockstep.config.synonyms import synonyms
from lockstep.experiment import Experiment, WarmStart
from lockstep.run.finding import require_empty
from lockstep.run.folder import RunFolder
from lockstep.run.rows import diverged
from lockstep.system.output import print_line, print_warning, reader_gone

if TYPE_CHECKING:
    from lockstep.training.job import Result


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
    given, recipe = asked("train", arguments, lambda experiment, layout: TrainArguments(experiment, layout=layout))
    layout = Layout.parse(given.layout)
    given.options.validate()
    base = recipe.experiment
    if not given.experiment.warm_start.run:  # removing it resets its other settings, which is nothing to tell
        base = base.replace(warm_start=WarmStart())
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
    from lockstep.training.prepare import checked_agent, prepare, prepare_options

    if given.options.run is not None:
        require_empty(given.options.run)
    with progress_to_stderr(given.json):
        layout = chosen(layout, given.experiment, say=False)
        experiment = prepare(given.experiment, layout)
        options = prepare_options(experiment, layout, given.options)
        if given.options.callback is not None:
            callbacks.check(given.options.callback, layout)
        facts = derived_facts(experiment, layout)
        warnings = (*experiment.algorithm.warnings(experiment.setup), *checked_agent(experiment).warnings())
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
