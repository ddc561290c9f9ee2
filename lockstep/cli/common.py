"""Functions that several commands share."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import tyro
from rich.text import Text

from lockstep.cli import help
from lockstep.cli.suggest import check_flags
from lockstep.cli.values import Unreadable, unreadable
from lockstep.config.settings import SettingsError
from lockstep.system import children
from lockstep.system.output import Explained, PatientConsole, keeping_streams

T = TypeVar("T")
BY_NAME = ("--env.options", "--env.curriculum", "--search", "--slurm-options")
"""Flags with values NAME=VALUE, each of which a sweep can vary by itself."""
MERGED = (*BY_NAME, "--algorithm.anneal")
"""Flags whose values are merged if they are repeated."""


def parse(arguments_type: type[T], verb: str, arguments: list[str], default: T | None = None) -> T:
    """Parse typed flags, or print help if they ask for it.

    Raises:
        Explained: help was printed.
        SettingsError: a flag does not exist, or its value is not valid.
    """
    settings = arguments_type if default is None else default
    if help.asks(arguments):
        say(help.text(verb, arguments, settings))
        raise Explained(0)
    arguments = _options_together(arguments)
    groups, box = with_values(arguments), io.StringIO()
    check_flags(verb, groups, settings)
    try:
        with contextlib.redirect_stderr(box):
            if default is None:
                return tyro.cli(arguments_type, prog=f"lockstep {verb}", args=arguments)
            return tyro.cli(arguments_type, prog=f"lockstep {verb}", args=arguments, default=default)
    except SystemExit:
        raise unreadable(verb, groups, settings, box.getvalue()) from None


@contextlib.contextmanager
def advising(advice: str) -> Iterator[None]:
    """Append this advice to an error about a flag's value."""
    try:
        yield
    except Unreadable as error:
        raise SettingsError(f"{error} {advice}".rstrip()) from None


def _options_together(arguments: list[str]) -> list[str]:
    """The arguments with the flags of MERGED named once: --env.options a=1 --env.options b=2 sets both."""
    groups: list[list[str]] = []
    merged: dict[str, list[str]] = {}
    for first, *values in with_values(arguments):
        flag, _, value = first.partition("=")
        flag = flag.replace("_", "-")
        if flag not in MERGED:
            groups.append([first, *values])
            continue
        if flag not in merged:
            groups.append(merged.setdefault(flag, [flag]))
        merged[flag] += [value, *values] if value else values
    for flag, *given in merged.values():
        refuse_repeated(flag, given)
    return [word for group in groups for word in group]


def refuse_repeated(flag: str, given: list[str]) -> None:
    """Raise SettingsError if a list of NAME=VALUE has a name twice."""
    counts = Counter(word.partition("=")[0].replace("-", "_") for word in given if "=" in word)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise SettingsError(f"{flag} names {twice[0]} twice, but only one value can count. Leave one of them out.")


def with_values(arguments: list[str]) -> list[list[str]]:
    """Each flag with the words that follow it, in order."""
    groups: list[list[str]] = []
    for word in arguments:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def is_of(flag: str, *classes: Any) -> bool:
    """Whether a flag is a setting of one of these classes, or a part of such a setting."""
    name = flag.partition("=")[0].lstrip("-").partition(".")[0].replace("-", "_").removeprefix("no_")
    return any(name == field.name for cls in classes for field in dataclasses.fields(cls))


def is_main_process() -> bool:
    """Whether this process prints for the user: under torchrun, only rank 0 does."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str = "") -> None:
    """Print a line to standard output."""
    if is_main_process():
        print(text, flush=True)


def say_json(value: Any) -> None:
    """Print one JSON document to standard output. NaN and infinity become null, since JSON has no such numbers."""
    say(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def complain(error: Exception | str) -> None:
    """Print an error's text to standard error, in red on a terminal; under torchrun, once on every host."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        PatientConsole(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)


def unknown(kind: str, given: str, known: Iterable[str], advice: str) -> SettingsError:
    """The error for a name that does not exist: close matches, and all names if they are few."""
    names = {name.lower(): name for name in known}
    close = [names[match] for match in difflib.get_close_matches(given.lower(), names, n=3, cutoff=0.5)]
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    listed = f" Known are {', '.join(names.values())}." if len(names) <= 20 else ""
    return SettingsError(f"There is no {kind} {given!r}.{meant}{listed} {advice}")


@contextlib.contextmanager
def progress_to_stderr(when: bool = True) -> Iterator[None]:
    """Redirect all output, including that of worker processes, to standard error, so that --json prints only JSON."""
    if not when:
        with keeping_streams():
            yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr), keeping_streams():
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def clean_end() -> Iterator[None]:
    """Make SIGTERM and a closed terminal end a command like Ctrl-C, with a complete cleanup."""
    requests, ended = children.Requests(), False

    def end(number: int) -> None:
        nonlocal ended
        insists = requests.insists(number)
        if insists or not ended:  # otherwise do not interrupt the cleanup
            ended = True
            raise Explained(128 + number)

    with children.handling_stops(end, ctrl_c=False), children.ending_for_certain(lambda n: n == signal.SIGTERM):
        yield
