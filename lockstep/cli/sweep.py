"""`lockstep sweep FOLDER RECIPES …`, `lockstep sweep FOLDER FILE.py:NAME` and `lockstep sweep FOLDER`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.cli.common import parse, progress_to_stderr, say, say_json
from lockstep.settings import SettingsError
from lockstep.sweep.options import LASTING, SweepOptions
from lockstep.sweep.queue import Entry, Queue, read_json, write_json
from lockstep.sweep.runner import Runner, needs_of
from lockstep.sweep.slots import Machine
from lockstep.sweep.stopping import Curve

if TYPE_CHECKING:
    from lockstep.sweep.spec import Run


@dataclass(frozen=True)
class SweepArguments:
    """Run many experiments as one durable queue: lockstep sweep runs/cartpole ppo-cartpole --seed 1..5

    Whatever ends it, the same command, or lockstep sweep FOLDER alone, goes on where it was.
    """

    folder: tyro.conf.Positional[str]
    """The sweep's folder. Its runs are below FOLDER/runs."""
    what: tyro.conf.Positional[str] = ""
    """What to add to it: recipes with commas between, whose settings are then flags that may have several values, or
    FILE.py:NAME, a list of runs. Default: nothing."""
    options: Annotated[SweepOptions, tyro.conf.arg(name="")] = field(default_factory=SweepOptions)


def sweep(arguments: list[str]) -> int:
    """Run `lockstep sweep`."""
    folder, runs, options = _read(arguments)
    options.validate()
    with progress_to_stderr() if options.json else contextlib.nullcontext():
        for run in runs:
            run.validate(here=not options.slurm)
        if options.dry_run or options.status:
            queue = Queue(folder.resolve()) if runs else Queue.open(folder)
            entries, code = queue.with_runs(runs), 0
            _show(queue, entries, options)
        else:
            queue = Queue.make(folder) if runs else Queue.open(folder)
            with queue.locked():
                code = _run(queue, runs, options)
            entries = queue.entries()
    if options.json:
        say_json({"sweep": str(queue.folder), "runs": [_document(queue, entry) for entry in entries]})
    return code


def _read(arguments: list[str]) -> tuple[Path, list[Run], SweepOptions]:
    """The folder, the runs that are added to it, and how."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    defaults = _defaults(Path(words[0])) if words else SweepOptions()
    runs: list[Run] = []
    if len(words) > 1:
        from lockstep.cli.train import load_recipe
        from lockstep.sweep.flags import runs_of
        from lockstep.sweep.spec import from_file

        what = words[1]
        found = from_file(what) if ":" in what else {name: load_recipe(name) for name in what.split(",")}
        if not isinstance(found, list):
            recipes = found if isinstance(found, dict) else {what: found}
            return Path(words[0]), *runs_of(recipes, arguments[2:], words[0], defaults)
        runs = found
    given = parse(SweepArguments, "sweep", arguments, SweepArguments(tyro.MISSING, options=defaults))
    if given.what and not runs:
        raise SettingsError(f"What to run stands before all flags: lockstep sweep {given.folder} {given.what} [FLAGS].")
    return Path(given.folder), runs, given.options


def _defaults(folder: Path) -> SweepOptions:
    """The options that a sweep was started with, as far as they are for its continuation too."""
    path = folder / "sweep.json"
    kept = read_json(path) if path.exists() else {}
    return SweepOptions(**{name: value for name, value in kept.items() if name in LASTING})


def _run(queue: Queue, runs: list[Run], options: SweepOptions) -> int:
    """Add runs, and run what waits, here or on Slurm."""
    write_json(queue.folder / "sweep.json", {name: getattr(options, name) for name in LASTING})
    queue.add(runs)
    entries = queue.entries()
    if options.retry_failed:
        say(f"{queue.retry_failed()} failed runs wait again")
    if options.slurm:
        from lockstep.sweep.slurm import submit

        count = submit(queue, entries, options.slurm_options, say)
        say(f"{count} jobs submitted; lockstep sweep {queue.folder} --status shows what becomes of them")
        return 0
    machine = Machine.here(options.runs_per_gpu, gpus=any(needs_of(entry).gpus for entry in entries))
    runner = Runner(queue, machine, options)
    complete = runner.run()
    say(runner.summary())
    failed = sum(queue.state(entry.name) == "failed" for entry in entries)
    if failed:
        say(f"go on from the checkpoints of the failed runs with: lockstep sweep {queue.folder} --retry-failed")
    elif not complete:
        say(f"go on with: lockstep sweep {queue.folder}")
    return 130 if runner.interrupted else 0 if complete else 1


def _show(queue: Queue, entries: list[Entry], options: SweepOptions) -> None:
    """What has become of each run, or would be done with it."""
    for document in (_document(queue, entry) for entry in entries):
        score = "" if document["score"] is None else f"{document['score']:.2f}"
        digest = (document["digest"] or "")[:12]
        say(f"{document['state']:<8} {document['done']:>4.0%} {score:>9}  {digest:<12}  {document['name']}")
        if document["reason"]:
            say("    " + document["reason"].splitlines()[-1])
    if options.slurm and options.dry_run:
        from lockstep.sweep.slurm import submit

        submit(queue, entries, options.slurm_options, say, dry_run=True)


def _document(queue: Queue, entry: Entry) -> dict[str, Any]:
    """A run for people and programs."""
    outcome, state = queue.outcome(entry.name), queue.state(entry.name)
    curve = Curve(queue.run(entry.name) / "metrics.jsonl")
    curve.read(end=True)
    return {
        "name": entry.name,
        "state": state,
        "done": 1.0 if state == "done" else min(1.0, curve.samples / entry.samples),
        "score": curve.score if outcome is None else outcome.score,
        "digest": outcome.digest if outcome else None,
        "reason": outcome.reason if outcome else "",
        "run": str(queue.run(entry.name)),
        "log": str(queue.log(entry.name)),
        "cores": needs_of(entry).cores,
        "gpus": needs_of(entry).gpus,
        "settings": {"seed": entry.experiment["seed"], "env": entry.env, "layout": entry.layout},
    }
