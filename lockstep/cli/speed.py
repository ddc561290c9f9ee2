"""`lockstep bench RECIPE …` and `lockstep tune RECIPE …`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.cli.common import clean_end, progress_to_stderr, say, say_json
from lockstep.cli.recipe import asked
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment

if TYPE_CHECKING:
    from lockstep.speed.tune import Tuned


@dataclass(frozen=True)
class BenchArguments:
    """Measure how close training comes to this machine's limit, and where the rest of the time goes."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    layout: str = "auto"
    """The layout to measure, as for train."""
    preset: str | None = None
    """As for train."""
    rounds: int = 3
    """How often to measure every part, in turn. Medians and ranges are over rounds. More make them more reliable."""
    seconds: float = 3.0
    """Seconds to measure each part in each round. Training takes twice as long, and at least three iterations."""
    tasks: bool = False
    """Measure what a step of each of several tasks costs (--env.id mixed/ID+ID). The command then prints the numbers of
    environments that give all tasks the same computing time."""
    random_actions: bool = False
    """The same as --env.random-actions: environments receive random actions instead of the policy's."""
    json: bool = False
    """Print one JSON document. Progress goes to standard error."""


def bench(arguments: list[str]) -> int:
    """Run `lockstep bench`."""
    given, _ = asked("bench", arguments, lambda experiment, layout: BenchArguments(experiment, layout=layout))
    if given.rounds < 1 or not 0 < given.seconds < math.inf:
        raise SettingsError(
            f"--rounds {given.rounds} and --seconds {given.seconds} must be positive and finite, for example 3."
        )
    experiment, layout = given.experiment, Layout.parse(given.layout)
    if given.tasks:
        return _tasks(given)
    if given.random_actions:
        experiment = experiment.replace(env=dataclasses.replace(experiment.env, random_actions=True))
    from lockstep.speed.bench import bench as run

    with progress_to_stderr(), clean_end():
        report = run(experiment, layout, rounds=given.rounds, seconds=given.seconds, say=say)
    if given.json:
        say_json({**report.to_json(), "experiment": experiment.identity(), "machine": _machine()})
    else:
        machine = _machine()
        say(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, load of others {report.load:.1f}")
        say(report.table())
    return 0


def _tasks(given: BenchArguments) -> int:
    """Run `lockstep bench --tasks`."""
    from lockstep.speed.tasks import task_costs

    with progress_to_stderr(), clean_end():
        found = task_costs(given.experiment, rounds=given.rounds, seconds=given.seconds, say=say)
    if given.json:
        say_json({**found.to_json(), "machine": _machine()})
    else:
        say(found.table())
    return 0


@dataclass(frozen=True)
class TuneArguments:
    """Find the fastest layout for an experiment on this machine, by short trials of real training."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    preset: str | None = None
    """As for train, but without its layout."""
    budget: float = 120.0
    """Maximum number of seconds for the whole command. More time tries more layouts and compares them better."""
    json: bool = False
    """Print one JSON document. Progress goes to standard error."""


def tune(arguments: list[str]) -> int:
    """Run `lockstep tune`."""
    from lockstep.cli.main import BEGAN

    given, _ = asked("tune", arguments, lambda experiment, layout: TuneArguments(experiment))
    if not 0 < given.budget < math.inf:
        raise SettingsError(f"--budget {given.budget} must be a positive number of seconds, for example 120.")
    from lockstep.speed.tune import tune as run

    with progress_to_stderr(), clean_end():
        tuned = run(given.experiment, budget=given.budget, begin=BEGAN, say=say)
    timing = given.experiment.scheme.timing_decides
    kept = None if timing else _remember(given.experiment, tuned)
    if given.json:
        say_json({**tuned.to_json(), "may_change_results": timing, "machine": _machine()})
        return 0
    width = max(len(str(each.layout)) for each in tuned.candidates)
    for each in tuned.candidates:
        rate = f"{each.rate:>12,.0f} samples/s in {len(each.rates)} turn{'s' * (len(each.rates) != 1)}"
        say(f"{each.layout!s:<{width}}  {rate if each.rates else each.note.splitlines()[0]}")
    say(
        "Timing affects the result here (an async lag, or --scheme.preempt): another layout may change it."
        if timing
        else "The layout cannot change the result, only the speed."
    )
    if kept:
        say(f"From now on, --layout auto chooses {kept} for this experiment on this machine.")
    say(f"layout: {tuned.best}")
    return 0


def _remember(experiment: Experiment, tuned: Tuned) -> Layout | None:
    """Store the fastest layout that computes on the CPU, so that auto chooses it. Layouts on GPUs have other bits."""
    from lockstep.launchers.auto import remember

    layouts = [tuned.best, *(each.layout for each in tuned.candidates if each.rates)]
    kept = next((layout for layout in layouts if layout == layout.anywhere()), None)
    return kept if kept and remember(experiment, kept) else None


def _machine() -> dict[str, Any]:
    from lockstep.cli.doctor import examine

    facts = examine()
    return {**facts["machine"], "torch": facts["packages"]["torch"]}
