"""The arguments of `lockstep sweep`: the folder, what to run, and the options."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.cli.common import is_of, parse, with_values
from lockstep.cli.help import asks
from lockstep.config.settings import SettingsError
from lockstep.sweep.options import LASTING, SweepOptions
from lockstep.sweep.queue import read_json

if TYPE_CHECKING:
    from lockstep.sweep.population import Population
    from lockstep.sweep.search import Search
    from lockstep.sweep.spec import Run


@dataclass(frozen=True)
class SweepArguments:
    """Run many experiments as one durable queue: lockstep sweep runs/cartpole ppo-cartpole --seed 1..5

    Repeat the same command, or lockstep sweep FOLDER alone, to continue a sweep that ended for any reason.
    """

    folder: tyro.conf.Positional[str]
    """The sweep's folder. Its runs are below FOLDER/runs."""
    what: tyro.conf.Positional[str] = ""
    """What to add: recipes separated by commas, whose settings become flags that accept several values; or
    FILE.py:NAME, which gives a list of runs, a search or a population. Default: nothing."""
    options: Annotated[SweepOptions, tyro.conf.arg(name="")] = field(default_factory=SweepOptions)


def is_searched(folder: Path) -> bool:
    return (folder / "search.json").exists() or (folder / "population.json").exists()


def is_population(folder: Path, search: Search | Population | None) -> bool:
    if search is None:  # before slow imports: --status is used often
        return (folder / "population.json").exists()
    from lockstep.sweep.population import Population

    return isinstance(search, Population)


def read(arguments: list[str]) -> tuple[Path, list[Run], Search | Population | None, SweepOptions]:
    """The folder; the runs to add; a search or population, if one is given; and the options."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    arguments = _with_suite(arguments, words)
    defaults = _defaults(Path(words[0])) if words else SweepOptions()
    found: Any = []
    if len(words) == 1 and not Path(words[0]).exists() and _is_recipe(words[0]):
        raise SettingsError(
            f"lockstep sweep begins with the sweep's folder: lockstep sweep runs/set {' '.join(arguments)}"
        )
    if len(words) > 2:
        raise SettingsError(
            f"{words[2]} follows {words[1]}, but only one argument can name what to run. Separate recipes by commas, "
            f"as in lockstep sweep {shlex.quote(words[0])} ppo-cartpole,dqn-cartpole, and add a list of runs with a "
            "separate command."
        )
    if len(words) > 1:
        from lockstep.cli.recipe import load_recipe
        from lockstep.cli.sweep_flags import runs_of, search_of
        from lockstep.experiment import Experiment
        from lockstep.sweep.user_file import from_file

        what = words[1]
        path, _, name = what.rpartition(":")
        names = [what] if "," in path and Path(path).is_file() and "," not in name else what.split(",")
        if "" in names:
            raise SettingsError(
                f"{what!r} lacks a recipe next to a comma. Write, for example, ppo-cartpole,my.py:recipe."
            )
        named = {name: from_file(name) if ":" in name else load_recipe(name) for name in names}
        recipes = {name: each for name, each in named.items() if isinstance(each, Experiment)}
        if len(recipes) < len(named) > 1:
            other = next(name for name in names if name not in recipes)
            raise SettingsError(
                f"{other} is a list of runs, a search or a population, not a recipe, so nothing else can be "
                "named beside it."
            )
        found = recipes or named[names[0]]
        if recipes:
            given = recipes, arguments[2:], words[0], defaults
            if any(word.partition("=")[0] == "--search" for word in arguments):
                return Path(words[0]), [], *search_of(*given)
            runs, options = runs_of(*given)
            return Path(words[0]), runs, None, options
    _refuse_settings(arguments, words)
    given = parse(SweepArguments, "sweep", arguments, SweepArguments(tyro.MISSING, options=defaults))
    if not words:  # flags came first
        kept = _defaults(Path(given.folder))
        given = parse(SweepArguments, "sweep", arguments, SweepArguments(tyro.MISSING, options=kept))
    if given.what and not found:
        folder = shlex.quote(given.folder)
        raise SettingsError(f"Name what to run before all flags: lockstep sweep {folder} {given.what} [FLAGS].")
    if given.options.search:
        raise SettingsError(
            "--search needs a recipe: lockstep sweep FOLDER RECIPE --search SETTING=VALUES. In a Python file, write a "
            "lockstep.sweep.Search or Population. To continue a folder's search, leave out the flag."
        )
    if isinstance(found, list):
        return Path(given.folder), found, None, given.options
    return Path(given.folder), [], found, given.options


def _with_suite(arguments: list[str], words: list[str]) -> list[str]:
    """The arguments with the tasks of --suite as --env.id."""
    found: list[str] = []
    groups = with_values(arguments)
    for flag, *values in groups:
        name, _, given = flag.partition("=")
        if name != "--suite" or not (given or values):
            found += [flag, *values]
            continue
        from lockstep.reports.suites import suite_of

        tasks = suite_of(given or values[0]).tasks
        if len(words) < 2:
            raise SettingsError(
                f"--suite {given or values[0]} is for recipes. Name what to run before all flags, as in lockstep sweep "
                f"FOLDER der-atari100k --suite {given or values[0]}."
            )
        if any(other.partition("=")[0] == "--env.id" for other, *_ in groups):
            raise SettingsError("--suite and --env.id both name the tasks. Leave one of them out.")
        found += ["--env.id", ",".join(tasks)]
    return found


def _refuse_settings(arguments: list[str], words: list[str]) -> None:
    """Raise SettingsError for flags of recipes without a recipe."""
    flags = [flag.partition("=")[0] for flag, *_ in with_values(arguments) if flag.startswith("--")]
    others = [flag for flag in flags if not is_of(flag, SweepOptions)]
    if not others or asks(arguments):  # avoid the slow imports
        return
    from lockstep.config.options import RunOptions
    from lockstep.experiment import Experiment

    for flag in (flag for flag in others if is_of(flag, Experiment, RunOptions) or flag in ("--layout", "--preset")):
        contents = "what the folder holds. Name what to run before all flags"
        held = f"what {words[1]} gives: set it in that file" if len(words) > 1 else contents
        raise SettingsError(
            f"{flag} is for recipes, as in lockstep sweep FOLDER ppo-cartpole {flag} ..., and cannot change {held}."
        )


def _is_recipe(word: str) -> bool:
    from lockstep.recipes import RECIPES

    return word in RECIPES or ".py:" in word


def _defaults(folder: Path) -> SweepOptions:
    """The options that the sweep was started with and that also apply when it continues."""
    path = folder / "sweep.json"
    kept = read_json(path) if path.exists() else {}
    kept = kept if isinstance(kept, dict) else {}
    fresh = {name: getattr(SweepOptions(), name) for name in LASTING}
    return SweepOptions(**{name: kept[name] if type(kept.get(name)) is type(x) else x for name, x in fresh.items()})


def check(folder: Path, searched: bool, population: bool, options: SweepOptions) -> None:
    """Raise SettingsError for options that a search or a population does not accept, or that only they accept."""
    alone = {"--trials": options.trials, "--objective": options.objective}
    if useless := [name for name, value in alone.items() if value is not None and not searched]:
        raise SettingsError(f"{useless[0]} is for searches, and {folder} has none. Add --search, or leave it out.")
    alone = {
        "--population": options.population,
        "--generations": options.generations,
        "--rivals": options.rivals or None,
        "--evolution": options.evolution or None,
    }
    if useless := [name for name, value in alone.items() if value is not None and not population]:
        add = "--search SETTING=VALUES" if options.population else "--search SETTING=VALUES --population N"
        raise SettingsError(f"{useless[0]} is for populations, and {folder} has none. Add {add}, or leave it out.")
    if options.gap is not None and not options.evolution:
        raise SettingsError("--gap is for Sample Factory's rule. Add --evolution sample-factory, or leave it out.")
    if population and options.trials is not None:
        raise SettingsError(f"--trials {options.trials} is for searches. For a population, use --generations.")
    if population and options.stop_early:
        raise SettingsError(
            f"--stop-early {options.stop_early} would end members, but a population replaces its worst members itself. "
            "Leave it out."
        )
    if population and options.retry_stopped:
        raise SettingsError(
            f"--retry-stopped is not for populations: the members that {folder} has given up are part of its result, "
            "and others have replaced them. Leave it out."
        )
    if options.slurm_options and not options.slurm:
        raise SettingsError("--slurm-options is for Slurm jobs. Add --slurm, or leave it out.")
    if (options.retry_failed or options.retry_stopped) and (options.status or options.dry_run):
        raise SettingsError(
            "--retry-failed and --retry-stopped change the queue, but --status and --dry-run only "
            "show it. Leave one out."
        )
    if options.drop and searched and not population:
        raise SettingsError(f"{folder} holds a search, whose trials must keep their runs. Leave out --drop.")
    if options.slurm and options.stop_early and not searched:
        raise SettingsError(
            f"--stop-early {options.stop_early} needs a sweep that watches its runs, but with --slurm no sweep does. "
            'Leave one of them out. If the sweep was started with --stop-early, add --stop-early "".'
        )
