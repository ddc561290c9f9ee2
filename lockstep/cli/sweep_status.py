"""The state of a sweep's runs, as text and as data for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.cli.common import say
from lockstep.sweep.queue import SEARCH, Entry, Queue
from lockstep.sweep.runner import needs_of
from lockstep.sweep.stopping import Curve

if TYPE_CHECKING:
    from lockstep.sweep.proposals import Proposals


def show(queue: Queue, entries: list[Entry], trials: Proposals[Any] | None) -> None:
    """Print the state of each run, and that of a search or population."""
    gone = gone_jobs(queue)
    for run in (document(queue, entry, gone) for entry in entries):
        score = "" if run["score"] is None else f"{run['score']:.2f}"
        digest = (run["digest"] or "")[:12]
        say(f"{run['state']:<8} {run['done']:>4.0%} {score:>9}  {digest:<12}  {run['name']}")
        if run["reason"]:
            say("    " + _gist(run["reason"]))
    if trials is not None:
        for name, space in trials.search.space.items():
            say(f"{name}: {space}")
        for trial in trials.all():
            say(f"{trial.state:<8} {trial}")
        say(trials.summary())
        if SEARCH in gone and not trials.complete:
            say(f"the search: {gone[SEARCH]}")


def _gist(reason: str) -> str:
    """The most informative line of a reason: the last of a traceback, otherwise the first."""
    lines = reason.splitlines()
    return lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0]


def gone_jobs(queue: Queue) -> dict[str, str]:
    """Messages about runs whose Slurm jobs are gone."""
    if not (queue.folder / "jobs").exists():
        return {}
    from lockstep.sweep.slurm import abandoned

    return abandoned(queue)


def document(queue: Queue, entry: Entry, gone: dict[str, str]) -> dict[str, Any]:
    """The state of a run. gone: messages about runs whose Slurm jobs are gone."""
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
