"""Prepares a run: resolves settings that depend on this machine, and checks everything that can be checked."""

from __future__ import annotations

import dataclasses
import os
import shlex

from torch import Tensor

from lockstep import envs
from lockstep.agent import Agent
from lockstep.buffers import data, replay_placement
from lockstep.config.layout import Layout
from lockstep.config.layout_fit import check_fit
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError, check_values
from lockstep.core.schedule import Recorded
from lockstep.envs.checking.check import quick_check
from lockstep.envs.curriculum import check_curriculum
from lockstep.envs.goals import check_goals
from lockstep.evaluation import opponents
from lockstep.experiment import Experiment
from lockstep.system.forked import call_in_fork
from lockstep.system.machine import emulates_bf16
from lockstep.system.numerics import torch_configured
from lockstep.system.output import print_warning
from lockstep.training import warm_start
from lockstep.training.curriculum import Curriculum
from lockstep.training.layout_checks import check_layout, check_torchrun

_QUICK_SECONDS, _QUICK_LIMIT = 2.0, 10.0
"""Seconds that the quick check of an environment plays, and seconds after which it is ended."""
_LOST = {
    "again": "equal seeds and actions do not give equal episodes, so this run can be neither verified nor resumed "
    "exactly, and another layout gives another result.",
    "alone": "the environments of one process influence each other, so another layout gives another result, and "
    "verify and resume are only exact on this one.",
    "rebuilt": "an episode cannot be rebuilt from its seed and actions, so a run that is stopped and resumed gives "
    "another result than a run without interruption.",
}
"""The consequences for a run if its environment fails one of check_env.WAYS."""


def prepare(experiment: Experiment, layout: Layout, recorded: Recorded | None = None) -> Experiment:
    """Resolve settings that depend on installed libraries, and check everything that can be checked before the start.

    Raises:
        SettingsError: settings contradict each other, or something that they need is missing.
    """
    if not isinstance(experiment, Experiment):
        raise SettingsError(
            f"{experiment!r} is not an Experiment. Recipes return one, for example lockstep.recipes.ppo_cartpole()."
        )
    check_values(experiment)  # before they are used to resolve others
    if experiment.torch_threads > 1 and os.environ.get("OMP_DYNAMIC", "").strip().lower() in ("true", "1"):
        raise SettingsError(
            f"--torch-threads {experiment.torch_threads} cannot be used while OMP_DYNAMIC={os.environ['OMP_DYNAMIC']} "
            "is set: OpenMP uses fewer threads while the machine is busy, and results would depend on this. Unset "
            "OMP_DYNAMIC, or use --torch-threads 1."
        )
    env = envs.resolve(experiment.env)
    env = dataclasses.replace(env, opponents=opponents.resolved(env, env.opponents))
    experiment = dataclasses.replace(experiment, env=env)
    experiment.validate()
    envs.check_matches(env, experiment.envs_per_shard)
    if experiment.curriculum:
        check_curriculum(env, experiment.curriculum)
        Curriculum(experiment)
    check_fit(layout, experiment.scheme.shards)
    if experiment.precision == "portable" and layout.uses_gpus:
        raise SettingsError(
            f"--precision portable computes on CPUs, but the layout {layout} uses GPUs. Use --precision bf16 or fp32 "
            "(another result), or a layout without GPUs."
        )
    check_layout(experiment, layout, recorded)
    experiment.schedule()  # refuses a schedule that cannot be followed
    return data.resolved(warm_start.resolved(experiment)) if layout.launcher.leads else experiment


def prepare_run(
    experiment: Experiment, layout: Layout, options: RunOptions, recorded: Recorded | None = None
) -> tuple[Experiment, RunOptions]:
    """Prepare the run that this process starts, and its options. Raises SettingsError as prepare does."""
    experiment = prepare(experiment, layout, recorded)
    check_torchrun(experiment, layout)
    check_memory(experiment, layout)
    return experiment, prepare_options(experiment, layout, options)


def prepare_options(experiment: Experiment, layout: Layout, options: RunOptions) -> RunOptions:
    """Check the options of a run and goals that hindsight changes, and resolve the names of opponents. Raises
    SettingsError as prepare does."""
    options.validate()
    if layout.launcher.leads and experiment.algorithm.relabels_goals:
        check_goals(experiment.env)
    named = opponents.resolved(experiment.env, options.eval_opponents)
    return dataclasses.replace(options, eval_opponents=named)


def warn_before_run(experiment: Experiment, layout: Layout, options: RunOptions) -> None:
    """Warn about settings that probably do not fit together or are slow on this machine, and about a user's environment
    that resume and verify could not repeat."""
    told = list(experiment.algorithm.warnings(experiment.setup))
    if experiment.precision == "bf16" and not layout.uses_gpus and emulates_bf16():
        told.append(
            "this CPU has no instructions for bf16, so --precision bf16 is at least ten times slower than --precision "
            "fp32, and learns no better. The two give different results: to match another run, keep its precision."
        )
    if experiment.allow_nondeterministic and layout.uses_gpus:
        told.append(
            "--allow-nondeterministic: an operation without a deterministic kernel gives different bits each time, so "
            "verify, replay and resume may differ from the run. torch names each such operation."
        )
    env = experiment.env
    if options.check_env and ":" in env.id:
        in_time, failed = call_in_fork(lambda: _quick_check(experiment), _QUICK_LIMIT)
        if in_time and failed:
            way, why = failed
            told.append(
                f"{env.id}: {_LOST[way]} {why} Training continues. lockstep check-env {shlex.quote(env.id)} (with the "
                "run's --env flags) explains more, and --no-check-env skips this check."
            )
    for sentence in told:
        print_warning(sentence)


def _quick_check(experiment: Experiment) -> tuple[str, str] | None:
    with torch_configured(1):
        return quick_check(experiment.env, experiment.seed, _QUICK_SECONDS)


def check(experiment: Experiment, layout: Layout) -> None:
    """Raise SettingsError for mistakes that would end a prepared experiment's run right after its start: too little
    memory, or settings that the model refuses."""
    check_memory(experiment, layout)
    checked_agent(experiment)


def checked_agent(experiment: Experiment, weights: dict[str, Tensor] | None = None, *, new: bool = True) -> Agent:
    """The agent with which a run of a prepared experiment begins. Raises SettingsError for settings that its model
    refuses or cannot begin with.

    Args:
        weights: initial weights; by default, those that the experiment's warm start names.
        new: whether this is a new run and not a repetition. Then the model must also suit the algorithm.
    """
    with torch_configured(experiment.torch_threads):
        agent = Agent(experiment)
        warm_start.load(agent, warm_start.weights(experiment) if weights is None else weights)
        if new:
            agent.check()
    return agent


def check_memory(experiment: Experiment, layout: Layout) -> None:
    """Raise SettingsError if a run's rollouts and replay memory do not fit into this machine's memory."""
    shards, shares_memory = shards_here(experiment, layout), layout.launcher.shares_memory
    free = experiment.scheme.free_running and not shares_memory
    ahead = free or (layout.split and (shares_memory or layout.spread))  # then each shard has several buffers
    if free and not experiment.algorithm.replays:
        shards = experiment.scheme.shards  # every learner receives all rollouts
    replay_placement.require_rollouts(experiment, shards, experiment.scheme.buffers if ahead else 1)
    if layout.kinds[1] == "CPU" or layout.replay == "cpu":  # on GPUs, learners choose the device, and check its memory
        replay_placement.require(experiment, shards, learners_here(layout))


def shards_here(experiment: Experiment, layout: Layout) -> int:
    """The least number of shards on this machine. torchrun spreads shards evenly over machines, and Ray freely."""
    return -(-experiment.scheme.shards // _machines(layout))


def learners_here(layout: Layout) -> int:
    """The least number of processes that learn on this machine."""
    externally = layout.launcher.started_externally and not layout.split
    learners = int(os.environ.get("WORLD_SIZE", "1")) if externally else layout.learning
    return -(-learners // _machines(layout))


def _machines(layout: Layout) -> int:
    """The greatest number of machines that learn."""
    if layout.launcher.started_externally:
        return max(1, int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return 1 if layout.launcher.one_machine else max(1, layout.learning)
