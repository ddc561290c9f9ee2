"""`lockstep export RUN`, `lockstep push RUN REPO` and `lockstep pull REPO`."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Literal

import tyro

from lockstep.cli.common import clean_end, parse, progress_to_stderr, say, say_json


@dataclass(frozen=True)
class ExportArguments:
    """Write a trained policy to one file that runs without lockstep, and compare its actions with the model's."""

    run: tyro.conf.Positional[str]
    """The run's folder."""
    format: Literal["torch", "torchscript", "onnx"] = "torch"
    """torch writes a torch.export program for PyTorch; torchscript is for older PyTorch and C++; onnx is for everything
    else (needs the extra export)."""
    checkpoint: str | None = None
    """latest, best, or an iteration. Default: latest."""
    out: str | None = None
    """File to write. Default: policy.pt2, policy.ts or policy.onnx in the run's folder."""
    observations: int = 1000
    """Number of observations to compare actions on. More find rarer differences but take longer."""
    sample: bool = False
    """Draw actions from the policy, like eval without --greedy. The file then takes random numbers as an additional
    input. By default it takes the most likely action."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class PushArguments:
    """Upload a run to the Hugging Face Hub, with a model card that shows its score and how to repeat it."""

    run: tyro.conf.Positional[str]
    """The run's folder."""
    repo: tyro.conf.Positional[str]
    """NAME/REPOSITORY on the Hub; it is created if it does not exist."""
    checkpoint: str | None = None
    """The checkpoint whose score the card shows: latest, best, or an iteration. Default: latest. The latest and the
    best are always uploaded."""
    episodes: int = 10
    """Episodes to play for the card's score. More narrow its confidence interval."""
    greedy: bool = False
    """Score the most likely actions. By default actions are drawn from the policy (docs/evaluation.md)."""
    record: bool = False
    """Record a video if the run has none yet."""
    private: bool = False
    """Make a new repository private."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class PullArguments:
    """Download a run from the Hugging Face Hub into a folder that eval, record, verify and resume accept."""

    repo: tyro.conf.Positional[str]
    """NAME/REPOSITORY on the Hub."""
    to: str | None = None
    """Folder to create; it must not exist yet. Default: runs/REPOSITORY."""
    revision: str | None = None
    """Branch, tag or commit. Default: the newest."""
    trust: bool = False
    """Accept a run whose settings name code from outside lockstep. This code would run on this machine."""
    json: bool = False
    """Print one JSON document."""


def export(arguments: list[str]) -> int:
    """Run `lockstep export`."""
    given = parse(ExportArguments, "export", arguments)
    from lockstep.export.policy import export as write

    with progress_to_stderr(), clean_end():
        done = write(
            given.run,
            given.out,
            format=given.format,
            checkpoint=given.checkpoint,
            observations=given.observations,
            sample=given.sample,
        )
    if given.json:
        check = dataclasses.asdict(done.check)
        known = {"file": str(done.path), "description": str(done.description), "iteration": done.iteration}
        say_json({**known, "actions": done.acting, **check})
    else:
        say(str(done))
    return 0 if done.ok else 1


def push(arguments: list[str]) -> int:
    """Run `lockstep push`."""
    given = parse(PushArguments, "push", arguments)
    from lockstep.export.hub import push as upload

    with progress_to_stderr(), clean_end():
        done = upload(
            given.run,
            given.repo,
            checkpoint=given.checkpoint,
            episodes=given.episodes,
            greedy=given.greedy,
            record=given.record,
            private=given.private,
        )
    if given.json:
        say_json({"url": done.url, "commit": done.commit, "files": done.files, "bytes": done.size, "notes": done.notes})
    else:
        say(f"pushed {len(done.files)} files, {done.size / 1e6:.1f} MB: {done.url}")
        for note in done.notes:
            say(note)
    return 0


def pull(arguments: list[str]) -> int:
    """Run `lockstep pull`."""
    given = parse(PullArguments, "pull", arguments)
    from lockstep.export.hub import pull as download

    with progress_to_stderr(), clean_end():
        run = download(given.repo, given.to, revision=given.revision, trust=given.trust)
    if given.json:
        say_json({"run": str(run)})
    else:
        say(f"run: {run}")
        named = shlex.quote(str(run))
        say(f"try: lockstep eval {named}   lockstep record {named}   lockstep verify {named}   lockstep resume {named}")
    return 0
