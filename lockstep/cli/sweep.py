"""`lockstep sweep FOLDER RECIPES …`, `lockstep sweep FOLDER FILE.py:NAME` and `lockstep sweep FOLDER`."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro

from lockstep.cli.common import is_of, parse, progress_to_stderr, say, say_json, with_values
from lockstep.cli.help import asks
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.run.files import writing
from lockstep.sweep.core_locks import CoreLocks
from lockstep.sweep.options import LASTING, SweepOptions
from lockstep.sweep.queue import SEARCH, Entry, Queue, State, read_json, write_json
from lockstep.sweep.runner import Runner, needs_of
from lockstep.sweep.slots import Machine, Needs, Place
from lockstep.sweep.stopping import Curve

if TYPE_CHECKING:
    from lockstep.sweep.generations import Generations
    from lockstep.sweep.population import Population
    from lockstep.sweep.proposals import Proposals
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


def sweep(arguments: list[str]) -> int:
    """Run `lockstep sweep`."""
    folder, runs, search, options = _read(arguments)
    options.validate()
    if options.status and not options.dry_run:
        runs, search = [], None  # it shows the folder and adds nothing
    searched = search is not None or _is_searched(folder)
    population = _is_population(folder, search)
    if (runs or (search and not population)) and (folder / "population.json").exists():
        raise SettingsError(f"{folder} holds a population, to which nothing can be added. Choose another folder.")
    _check(folder, searched, population, options)
    with progress_to_stderr(options.json):
        if search is not None:
            search.validate()
        for run in search.runs if search else runs:
            run.validate(here=not (options.slurm or options.ray))
        new = bool(runs or search)
        if options.dry_run or options.status:
            queue, code = Queue(folder.resolve()) if new else Queue.open(folder), 0
            entries, trials = queue.with_runs(runs), _trials(queue, search, options)
            _show(queue, entries, trials, options)
        else:
            queue = Queue.make(folder) if new else Queue.open(folder)
            if options.slurm and searched:
                _refuse_second_job(queue)
            with queue.locked():
                trials = _trials(queue, search, options)
                code = _run(queue, runs, trials, options)
            entries = queue.entries()
    if options.json:
        found = {} if trials is None else {trials.key: trials.document()}
        gone = _gone(queue)
        documents = [_document(queue, entry, gone) for entry in entries]
        say_json({"sweep": str(queue.folder), **found, "runs": documents})
    return code


def _is_searched(folder: Path) -> bool:
    return (folder / "search.json").exists() or (folder / "population.json").exists()


def _is_population(folder: Path, search: Search | Population | None) -> bool:
    if search is None:  # before slow imports: --status is used often
        return (folder / "population.json").exists()
    from lockstep.sweep.population import Population

    return isinstance(search, Population)


def _read(arguments: list[str]) -> tuple[Path, list[Run], Search | Population | None, SweepOptions]:
    """The folder, the runs to add or a search or a population, and the options."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    defaults = _defaults(Path(words[0])) if words else SweepOptions()
    found: Any = []
    if len(words) == 1 and not Path(words[0]).exists() and _is_recipe(words[0]):
        raise SettingsError(
            f"lockstep sweep begins with the sweep's folder: lockstep sweep runs/set {' '.join(arguments)}"
        )
    if len(words) > 2:
        raise SettingsError(
            f"{words[2]} is a second thing to run, after {words[1]}. Separate recipes by commas, as in lockstep sweep "
            f"{shlex.quote(words[0])} ppo-cartpole,dqn-cartpole, and add a list of runs with a separate command."
        )
    if len(words) > 1:
        from lockstep.cli.sweep_flags import runs_of, search_of
        from lockstep.cli.train import load_recipe
        from lockstep.experiment import Experiment
        from lockstep.sweep.user_file import from_file

        what = words[1]
        path, _, name = what.rpartition(":")
        names = [what] if "," in path and Path(path).is_file() and "," not in name else what.split(",")
        if "" in names:
            raise SettingsError(
                f"{what!r} lacks a recipe next to a comma: write ppo-cartpole,my.py:recipe, for example."
            )
        named = {name: from_file(name) if ":" in name else load_recipe(name) for name in names}
        recipes = {name: each for name, each in named.items() if isinstance(each, Experiment)}
        if len(recipes) < len(named) > 1:
            other = next(name for name in names if name not in recipes)
            raise SettingsError(
                f"{other} is not a recipe, but a list of runs, a search or a population: give it to the sweep alone."
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
            "lockstep.sweep.Search or Population. To continue what a folder holds, leave out the flag."
        )
    if isinstance(found, list):
        return Path(given.folder), found, None, given.options
    return Path(given.folder), [], found, given.options


def _refuse_settings(arguments: list[str], words: list[str]) -> None:
    """Raise SettingsError for flags of recipes without a recipe."""
    flags = [flag.partition("=")[0] for flag, *_ in with_values(arguments) if flag.startswith("--")]
    others = [flag for flag in flags if not is_of(flag, SweepOptions)]
    if not others or asks(arguments):  # otherwise the slow imports are not worth it
        return
    from lockstep.config.options import RunOptions
    from lockstep.experiment import Experiment

    for flag in (flag for flag in others if is_of(flag, Experiment, RunOptions) or flag in ("--layout", "--preset")):
        here = "what the folder holds. Name what to run before all flags"
        held = f"what {words[1]} gives: set it in that file" if len(words) > 1 else here
        raise SettingsError(
            f"{flag} is for recipes, as in lockstep sweep FOLDER ppo-cartpole {flag} ..., and cannot change {held}."
        )


def _is_recipe(word: str) -> bool:
    from lockstep.recipes import RECIPES

    return word in RECIPES or ".py:" in word


def _defaults(folder: Path) -> SweepOptions:
    """The options that the sweep was started with, as far as they also apply to its continuation."""
    path = folder / "sweep.json"
    kept = read_json(path) if path.exists() else {}
    kept = kept if isinstance(kept, dict) else {}
    fresh = {name: getattr(SweepOptions(), name) for name in LASTING}
    return SweepOptions(**{name: kept[name] if type(kept.get(name)) is type(x) else x for name, x in fresh.items()})


def _trials(queue: Queue, search: Search | Population | None, options: SweepOptions) -> Proposals[Any] | None:
    """The search or the population that begins or continues in the folder, if there is one."""
    if search is None and not _is_searched(queue.folder):
        return None
    kind: type[Proposals[Any]]
    if _is_population(queue.folder, search):
        from lockstep.sweep.generations import Generations as kind
    else:
        from lockstep.sweep.trials import Trials as kind
    before = kind.open(queue)
    search = search or (before and before.search)
    assert search is not None
    wanted = {
        kind.parts: getattr(options, kind.parts),
        "members": options.population,  # only a population accepts this option
        "rivals": options.rivals or None,
        "objective": options.objective,
    }
    changes = {name: value for name, value in wanted.items() if value is not None}
    if before and options.search:  # continuing without --search leaves these options out
        changes = {name: getattr(before.search, name) for name in (kind.parts, "objective")} | changes
    return kind.make(queue, dataclasses.replace(search, **changes))


def _check(folder: Path, searched: bool, population: bool, options: SweepOptions) -> None:
    """Raise SettingsError for options that a search or a population does not accept, or that only they accept."""
    alone = {"--trials": options.trials, "--objective": options.objective}
    if useless := [name for name, value in alone.items() if value is not None and not searched]:
        raise SettingsError(f"{useless[0]} is for searches, and {folder} has none. Add --search, or leave it out.")
    alone = {
        "--population": options.population,
        "--generations": options.generations,
        "--rivals": options.rivals or None,
    }
    if useless := [name for name, value in alone.items() if value is not None and not population]:
        add = "--search SETTING=VALUES" if options.population else "--search SETTING=VALUES --population N"
        raise SettingsError(f"{useless[0]} is for populations, and {folder} has none. Add {add}, or leave it out.")
    if population and options.trials is not None:
        raise SettingsError(f"--trials {options.trials} is for searches. For a population, use --generations.")
    if population and options.stop_early:
        raise SettingsError(
            f"--stop-early {options.stop_early} would end members of a population, which replaces the worst itself. "
            "Leave it out."
        )
    if population and options.retry_stopped:
        raise SettingsError(
            f"--retry-stopped: the members that {folder}, a population, has given up are part of its result, and "
            "others have replaced them. Leave it out."
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
            f"--stop-early {options.stop_early} needs a sweep that watches its runs, but with --slurm only Slurm does. "
            'Leave one of them out; if the sweep was started with it, add --stop-early "".'
        )


def _refuse_second_job(queue: Queue) -> None:
    from lockstep.sweep.slurm import searching

    if job := searching(queue):
        raise SettingsError(
            f"Job {job} already works in {queue.folder}, or waits to. Watch it with: {queue.command} "
            f"--status. To change anything, such as --trials or --generations, end it first: scancel {job}"
        )


def _refuse_nested(queue: Queue, runs: list[Run], trials: Proposals[Any] | None, options: SweepOptions) -> None:
    """Raise SettingsError if a waiting run would use Ray within a sweep on Ray."""
    asked: dict[State, bool] = {"failed": options.retry_failed, "stopped": options.retry_stopped}
    again: list[State] = [state for state, wanted in asked.items() if wanted]
    outcomes = ((entry.layout, queue.outcome(entry.name)) for entry in queue.with_runs(runs, again=again))
    layouts = [layout for layout, outcome in outcomes if outcome is None or outcome.state in again]
    layouts += [run.layout for run in (trials.search.runs if trials else ())]
    if nested := next((layout for layout in layouts if not Layout.parse(layout).launcher.one_machine), None):
        raise SettingsError(
            f"A run of this sweep has --layout {nested}, which would wait for resources of the cluster that the sweep "
            "itself has taken. With --ray, give the runs --layout inline or processes:N: each uses one node, and the "
            "sweep spreads them."
        )


def _run(queue: Queue, runs: list[Run], trials: Proposals[Any] | None, options: SweepOptions) -> int:
    """Add runs, and run the waiting ones: here, on Ray or on Slurm."""
    if options.drop:
        drop = queue.drop if trials is None else cast("Generations", trials).give_up
        say(f"dropped {', '.join(drop(options.drop))}")
    if options.ray:
        _refuse_nested(queue, runs, trials, options)
    if options.retry_failed:  # before queue.add, which gives waiting runs the current layout and options
        say(f"{queue.retry('failed')} failed runs wait again")
    if options.retry_stopped:
        say(f"{queue.retry('stopped')} stopped runs wait again")
    with writing(queue.folder):
        write_json(queue.folder / "sweep.json", {name: getattr(options, name) for name in LASTING})
        queue.add(runs)
    entries = queue.entries()
    if not entries and trials is None:
        say("nothing is left in the queue")
    if trials is not None:
        trials.begin()
        entries = queue.entries()
    if options.slurm and trials is not None:
        _submit_search(queue, trials, options)
        return 0
    if options.slurm:
        from lockstep.sweep.slurm import submit

        count = submit(queue, entries, options, say)
        say(f"{count} jobs submitted; {queue.command} --status shows their state")
        return 0
    needed = [*map(needs_of, entries), *([trials.needs] if trials else [])]
    with _place(needed, options) as place:
        runner = Runner(queue, place, options, trials)
        complete = runner.run()
    say(runner.summary())
    if trials is not None:
        say(trials.summary())
        if _is_population(queue.folder, None) and trials.best():
            from lockstep.sweep.lineage import draw

            say(f"picture: {draw(cast('Generations', trials), queue.folder / 'population.png')}")
    again = f"{queue.command}{' --ray' if options.ray else ''}"
    failed = sum(queue.state(entry.name) == "failed" for entry in queue.entries())
    if failed:
        say(f"to continue the failed runs from their checkpoints: {again} --retry-failed")
    elif not complete:
        say(f"to continue: {again}")
    return 130 if runner.interrupted else 0 if complete else 1


@contextlib.contextmanager
def _place(needed: list[Needs], options: SweepOptions) -> Iterator[Place]:
    """The place that the runs go to."""
    if not options.ray:
        with CoreLocks() as core_locks:
            yield Machine.here(
                options.runs_per_gpu,
                gpus=any(wanted.gpus for wanted in needed),
                replay=any(wanted.memory for wanted in needed),
                core_locks=core_locks,
            )
        return
    from lockstep.sweep.ray import cluster

    with cluster(options.runs_per_gpu) as place:
        yield place


def _show(queue: Queue, entries: list[Entry], trials: Proposals[Any] | None, options: SweepOptions) -> None:
    """Show the state of each run, or what would happen to it."""
    gone = _gone(queue)
    for document in (_document(queue, entry, gone) for entry in entries):
        score = "" if document["score"] is None else f"{document['score']:.2f}"
        digest = (document["digest"] or "")[:12]
        say(f"{document['state']:<8} {document['done']:>4.0%} {score:>9}  {digest:<12}  {document['name']}")
        if document["reason"]:
            say("    " + _gist(document["reason"]))
    if trials is not None:
        for name, space in trials.search.space.items():
            say(f"{name}: {space}")
        for trial in trials.all():
            say(f"{trial.state:<8} {trial}")
        say(trials.summary())
        if SEARCH in gone and not trials.complete:
            say(f"the search: {gone[SEARCH]}")
    if options.slurm and options.dry_run and trials is not None:
        _submit_search(queue, trials, options)
    elif options.slurm and options.dry_run:
        from lockstep.sweep.slurm import submit

        submit(queue, entries, options, say, dry_run=True)


def _gist(reason: str) -> str:
    """The most informative line of a reason: the last of a traceback, otherwise the first."""
    lines = reason.splitlines()
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0]


def _submit_search(queue: Queue, trials: Proposals[Any], options: SweepOptions) -> None:
    """Submit the rest of a search, and other waiting runs of its folder."""
    from lockstep.sweep.slurm import submit_search

    waiting = [needs_of(entry) for entry in queue.entries() if queue.state(entry.name) == "waiting"]
    if waiting or not trials.complete:
        submit_search(queue, [*waiting, trials.needs], options, say, dry_run=options.dry_run)
    else:
        say("nothing is left to run")


def _gone(queue: Queue) -> dict[str, str]:
    """Messages about runs whose Slurm jobs are gone."""
    if not (queue.folder / "jobs").exists():
        return {}
    from lockstep.sweep.slurm import abandoned

    return abandoned(queue)


def _document(queue: Queue, entry: Entry, gone: dict[str, str]) -> dict[str, Any]:
    """A run for people and programs; gone: messages about runs whose Slurm jobs are gone."""
    outcome, state = queue.outcome(entry.name), queue.state(entry.name)
    curve = Curve(queue.metrics(entry.name))
    curve.read(end=True)
    return {
        "name": entry.name,
        "state": state,
        "done": 1.0 if state == "done" else min(1.0, curve.samples / entry.samples),
        "score": curve.score if outcome is None else outcome.score,
        "digest": outcome.digest if outcome else None,
        "reason": outcome.reason if outcome else gone.get(entry.name, ""),
        "run": str(queue.run(entry.name)),
        "log": str(queue.log(entry.name)),
        "cores": needs_of(entry).cores,
        "gpus": needs_of(entry).gpus,
        "settings": {"seed": entry.experiment["seed"], "env": entry.env, "layout": entry.layout},
    }
