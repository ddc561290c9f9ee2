"""`lockstep sweep FOLDER RECIPES …`, `lockstep sweep FOLDER FILE.py:NAME` and `lockstep sweep FOLDER`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from lockstep.cli.common import progress_to_stderr, say, say_json
from lockstep.cli.sweep_arguments import check, is_population, is_searched, read
from lockstep.cli.sweep_status import document, gone_jobs, show
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.run.files import writing
from lockstep.sweep.core_locks import CoreLocks
from lockstep.sweep.options import LASTING, SweepOptions
from lockstep.sweep.queue import Entry, Queue, State, write_json
from lockstep.sweep.runner import Runner, layout_of, needs_of
from lockstep.sweep.slots import Machine, Needs, Place
from lockstep.sweep.template import Template

if TYPE_CHECKING:
    from lockstep.sweep.generations import Generations
    from lockstep.sweep.population import Population
    from lockstep.sweep.proposals import Proposals
    from lockstep.sweep.search import Search
    from lockstep.sweep.spec import Run


def sweep(arguments: list[str]) -> int:
    """Run `lockstep sweep`."""
    folder, runs, search, options = read(arguments)
    options.validate()
    if options.status and not options.dry_run:
        runs, search = [], None  # --status shows the folder and adds nothing
    searched = search is not None or is_searched(folder)
    population = is_population(folder, search)
    if (runs or (search and not population)) and (folder / "population.json").exists():
        raise SettingsError(f"{folder} holds a population, to which nothing can be added. Choose another folder.")
    check(folder, searched, population, options)
    with progress_to_stderr(options.json):
        if search is not None:
            search.validate()
        for run in search.runs if search else runs:
            run.validate(local=not (options.slurm or options.ray))
        new = bool(runs or search)
        if options.dry_run or options.status:
            queue, code = Queue.planned(folder) if new else Queue.open(folder), 0
            entries, trials = queue.with_runs(runs), _trials(queue, search, options)
            show(queue, entries, trials)
            if options.slurm and options.dry_run:
                _submit(queue, entries, trials, options)
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
        gone = gone_jobs(queue)
        documents = [document(queue, entry, gone) for entry in entries]
        say_json({"sweep": str(queue.folder), **found, "runs": documents})
    return code


def _trials(queue: Queue, search: Search | Population | None, options: SweepOptions) -> Proposals[Any] | None:
    """The search or population that begins or continues in the folder; None if there is neither."""
    if search is None and not is_searched(queue.folder):
        return None
    kind: type[Proposals[Any]]
    if is_population(queue.folder, search):
        from lockstep.sweep.generations import Generations as kind
    else:
        from lockstep.sweep.trials import Trials as kind
    before = kind.open(queue)
    search = search or (before and before.search)
    assert search is not None
    evolution = None
    if options.evolution:
        from lockstep.sweep.evolution import SampleFactory

        evolution = SampleFactory(gap=options.gap or 0.0)
    wanted = {
        kind.parts: getattr(options, kind.parts),
        "members": options.population,  # only a population accepts this option
        "rivals": options.rivals or None,
        "evolution": evolution,
        "objective": options.objective,
    }
    changes = {name: value for name, value in wanted.items() if value is not None}
    if before and options.search:  # without --search, these options keep their earlier values
        changes = {name: getattr(before.search, name) for name in (kind.parts, "objective")} | changes
    return kind.make(queue, dataclasses.replace(search, **changes))


def _refuse_second_job(queue: Queue) -> None:
    from lockstep.sweep.slurm import searching

    if job := searching(queue):
        raise SettingsError(
            f"Job {job} is already running or waiting for {queue.folder}. {queue.command} --status shows its state. To "
            f"change anything, such as --trials or --generations, end it first: scancel {job}"
        )


def _refuse_nested(queue: Queue, runs: list[Run], trials: Proposals[Any] | None, options: SweepOptions) -> None:
    """Raise SettingsError if a waiting run would use Ray within a sweep on Ray."""
    asked: dict[State, bool] = {"failed": options.retry_failed, "stopped": options.retry_stopped}
    again: list[State] = [state for state, wanted in asked.items() if wanted]
    outcomes = ((entry, queue.outcome(entry.name)) for entry in queue.with_runs(runs, again=again))
    layouts = [layout_of(entry) for entry, outcome in outcomes if outcome is None or outcome.state in again]
    layouts += [Layout.parse(run.layout) for run in (trials.search.runs if trials else ())]
    if nested := next((layout for layout in layouts if not layout.launcher.one_machine), None):
        raise SettingsError(
            f"A run of this sweep has --layout {nested}, which would wait for resources of the cluster that the sweep "
            "itself has taken. With --ray, give the runs --layout inline or processes:N: each uses one node, and the "
            "sweep spreads them."
        )


def _run(queue: Queue, runs: list[Run], trials: Proposals[Any] | None, options: SweepOptions) -> int:
    """Add runs, and execute all waiting runs on this machine, on Ray or on Slurm."""
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
    if options.slurm:
        _submit(queue, entries, trials, options)
        return 0
    needed = [*map(needs_of, entries), *([trials.needs] if trials else [])]
    with _place(needed, options) as place:
        runner = Runner(queue, place, options, trials)
        complete = runner.run()
    say(runner.summary())
    if trials is not None:
        say(trials.summary())
        if is_population(queue.folder, None) and trials.best():
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
    """The machine or cluster that executes the runs."""
    if not options.ray:
        with CoreLocks() as core_locks, Template() as template:
            yield Machine.here(
                options.runs_per_gpu,
                gpus=any(wanted.gpus for wanted in needed),
                replay=any(wanted.memory for wanted in needed),
                core_locks=core_locks,
                start=template.start,
            )
        return
    from lockstep.sweep.ray import cluster

    with cluster(options.runs_per_gpu) as place:
        yield place


def _submit(queue: Queue, entries: list[Entry], trials: Proposals[Any] | None, options: SweepOptions) -> None:
    """Submit runs to Slurm, or show what would be submitted. A search or population is one job, which also executes the
    folder's other waiting runs."""
    from lockstep.sweep.slurm import submit, submit_search

    if trials is None:
        count = submit(queue, entries, options, say, dry_run=options.dry_run)
        if not options.dry_run:
            say(f"{count} jobs submitted; {queue.command} --status shows their state")
        return
    waiting = [needs_of(entry) for entry in queue.entries() if queue.state(entry.name) == "waiting"]
    if waiting or not trials.complete:
        submit_search(queue, [*waiting, trials.needs], options, say, dry_run=options.dry_run)
    else:
        say("nothing is left to run")
