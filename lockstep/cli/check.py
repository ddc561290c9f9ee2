"""`lockstep verify RUN`, `lockstep replay RUN`, `lockstep diff RUN_A RUN_B` and `lockstep check-env ID`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from lockstep.cli.common import clean_end, parse, progress_to_stderr, say, say_json
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError, Steps
from lockstep.envs.settings import EnvConfig


@dataclass(frozen=True)
class VerifyArguments:
    """Repeat the first iterations of a run on any layout, and compare every digest with its ledger."""

    run: tyro.conf.Positional[str]
    """The run's folder."""
    layout: str = "auto"
    """Layout of the repetition, as for train: any except torchrun. auto computes on GPUs where the run did, since a CPU
    gives different bits."""
    iterations: int | Literal["all"] | None = None
    """Iterations to repeat, or all. Default: 3. More prove more but take longer."""
    seed: int | None = None
    """Repeat with another seed, to see where the results differ."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class ReplayArguments:
    """Repeat a run with every recorded timing decision, and compare every digest with its ledger."""

    recorded: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    layout: str = "auto"
    """Layout of the repetition, as for train. It may differ from the run's. A run with free-running collectors allows
    inline, or a split layout such as cpu:a2-l1. auto computes on GPUs where the run did."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class DiffArguments:
    """Find the first iteration and tensor in which two runs differ."""

    run_a: tyro.conf.Positional[str]
    """The folder of one run."""
    run_b: tyro.conf.Positional[str]
    """The folder of the other."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class CheckEnvArguments:
    """Play an environment several times with equal seeds and actions, and check that all results have the same bits."""

    id: tyro.conf.Positional[str] = ""
    """The environment, as in --env.id of train: my_file.py:MyEnv, CartPole-v1, Breakout."""
    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="", num_envs=4))
    steps: Steps = 1_000
    """Steps of each environment. More find differences that occur late, but take longer."""
    seed: int = 1
    """Seed of environments and actions."""
    json: bool = False
    """Print one JSON document."""


def verify(arguments: list[str]) -> int:
    """Run `lockstep verify`; 0 if every compared bit is equal, else 1."""
    given = parse(VerifyArguments, "verify", arguments)
    layout = Layout.parse(given.layout)
    from lockstep.reproducibility.verify import verify as check

    with progress_to_stderr(), clean_end():
        verdict = check(given.run, layout, given.iterations, seed=given.seed)
    if given.json:
        say_json(dataclasses.asdict(verdict))
    else:
        if verdict.warning:
            say(f"warning: {verdict.warning}")
        say(verdict.message)
    return 0 if verdict.ok else 1


def replay(arguments: list[str]) -> int:
    """Run `lockstep replay`; 0 if every bit was reproduced, 1 if not, 130 if interrupted."""
    given = parse(ReplayArguments, "replay", arguments)
    layout = Layout.parse(given.layout)
    from lockstep.reproducibility.replay import replay as repeat

    with progress_to_stderr(given.json):
        found = repeat(given.recorded, layout, given.options)
    code = 1 if found.difference else 130 if found.stopped else 0
    if given.json:
        say_json({**dataclasses.asdict(found), "run": str(found.run)})
        return code
    say(f"run: {found.run}")
    if found.warning:
        say(f"warning: {found.warning}")
    if found.difference is not None:
        say(f"The replay differs from {given.recorded}. {found.difference}")
    elif found.stopped:
        say(f"stopped after {found.iterations:,} iterations, which gave the same bits as {given.recorded}")
        return code  # a stopped replay's digest is not the run's
    else:
        say(f"Replayed: all {found.iterations:,} recorded iterations of {given.recorded} gave the same bits.")
    say(f"digest: {found.digest}")
    return code


def diff(arguments: list[str]) -> int:
    """Run `lockstep diff`; 0 if the runs are equal, else 1."""
    given = parse(DiffArguments, "diff", arguments)
    from lockstep.reproducibility.verify import diff as compare

    difference = compare(given.run_a, given.run_b)
    if given.json:
        say_json({"equal": difference is None, "difference": difference and dataclasses.asdict(difference)})
    else:
        say("The runs are equal, bit for bit." if difference is None else str(difference))
    return 0 if difference is None else 1


def check_env(arguments: list[str]) -> int:
    """Run `lockstep check-env`; 0 if the environment passes, else 1."""
    given = parse(CheckEnvArguments, "check-env", arguments)
    if bool(given.id) == bool(given.env.id):
        raise SettingsError("Name one environment, as in: lockstep check-env my_file.py:MyEnv")
    from lockstep.envs.checking.check import check_env as check

    env = dataclasses.replace(given.env, id=given.id or given.env.id)
    with progress_to_stderr(given.json), clean_end():
        found = check(env, steps=given.steps, seed=given.seed, tell=say)
    if given.json:
        say_json({"ok": found.ok, **dataclasses.asdict(found)})
    else:
        say(f"\n{found.message}")
    return 0 if found.ok else 1
