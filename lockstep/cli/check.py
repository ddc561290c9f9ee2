"""`lockstep verify RUN` and `lockstep diff RUN_A RUN_B`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import tyro

from lockstep.cli.common import parse, progress_to_stderr, say, say_json
from lockstep.layout import Layout


@dataclass(frozen=True)
class VerifyArguments:
    """Rerun the first iterations of a run under any layout, and compare every digest in its ledger."""

    run: tyro.conf.Positional[str]
    """The run's folder."""
    layout: str = "inline"
    """Layout of the repetition: inline or processes:N."""
    iterations: int | Literal["all"] | None = None
    """Iterations to run again, or all. Default: 3. More prove more and take longer."""
    seed: int | None = None
    """Repeat with another seed, to see where that makes a difference."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class DiffArguments:
    """Name the first iteration, and the first tensor in it, in which two runs part."""

    run_a: tyro.conf.Positional[str]
    """The folder of one run."""
    run_b: tyro.conf.Positional[str]
    """The folder of the other."""
    json: bool = False
    """Print JSON."""


def verify(arguments: list[str]) -> int:
    """Run `lockstep verify`; 0 if every compared bit is equal, else 1."""
    given = parse(VerifyArguments, "verify", arguments)
    layout = Layout.parse(given.layout)
    from lockstep.verify import verify as check

    with progress_to_stderr():
        verdict = check(given.run, layout, given.iterations, seed=given.seed)
    if given.json:
        say_json(dataclasses.asdict(verdict))
    else:
        if verdict.warning:
            say(f"warning: {verdict.warning}")
        say(verdict.message)
    return 0 if verdict.ok else 1


def diff(arguments: list[str]) -> int:
    """Run `lockstep diff`; 0 if the runs are equal, else 1."""
    given = parse(DiffArguments, "diff", arguments)
    from lockstep.verify import diff as compare

    difference = compare(given.run_a, given.run_b)
    if given.json:
        say_json({"equal": difference is None, "difference": difference and dataclasses.asdict(difference)})
    else:
        say("The runs are equal, bit for bit." if difference is None else str(difference))
    return 0 if difference is None else 1
