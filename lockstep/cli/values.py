"""Errors for values of flags that the parser rejects."""

from __future__ import annotations

import re
import shlex
from typing import Any

from lockstep.cli.help import Row, rows
from lockstep.config.settings import SettingsError

_WANTED = {"INT": "a whole number", "FLOAT": "a number", "STR": "a text", "COUNT": "a whole number, such as 10M"}
"""What help's names for kinds of values mean."""
_OF_PYTHON = ("invalid literal for", "could not convert", "Could not find valid parse", "no type matching")
"""Prefixes of reasons that only say that a value has the wrong kind."""


class Unreadable(SettingsError):
    """A flag has a value that is not valid."""


def unreadable(verb: str, groups: list[list[str]], settings: Any, box: str) -> Unreadable:
    """The error for a value that the parser rejected.

    Args:
        verb: the command, followed by the recipe if there is one.
        groups: each flag with its values.
        settings: the settings that flags change: an instance, or the class if every field has a default.
        box: the parser's output.
    """
    said = _unboxed(box)
    listed = list(rows(settings))
    known = {row.path: row for row in listed}
    kind, _, rest = said.partition(": ")
    if kind.startswith("Missing from"):
        needed = [row for row in listed if row.positional and not row.optional]  # resume has both RUN and --run
        return Unreadable(lacks(verb, [row for row in needed if " ".join(row.text.split()) in said] or needed))
    if kind == "Unrecognized options":
        words = rest.split()
        flag, *given = next((each for each in groups if set(words) & set(each)), words)
    else:
        closely = said.replace(" ", "")  # a narrow box splits names
        named = [group for group in groups if (name := group[0].partition("=")[0]).startswith("--") and name in closely]
        flag, *given = max(named, key=lambda group: len(group[0].partition("=")[0]), default=[""])
    flag, equals, value = flag.partition("=")
    given = [value, *given] if equals else given
    row = known.get(flag.removeprefix("--").replace("-", "_")) or known.get(_switched_on(flag))
    if row is None or row.positional or not flag.startswith("--"):
        said = f"{rest} is an extra argument that {verb} does not take." if kind == "Unrecognized options" else said
        return Unreadable(f"{said.rstrip('.')}. lockstep {verb} --help shows its arguments.")
    if kind.startswith("Error parsing") and not rest.startswith(_OF_PYTHON):
        told = f"{flag}: {rest.rstrip('.')}."
    elif not row.value:
        told = f"{flag} takes no value, but got {' '.join(given)}: {_switches(row)}."
    else:
        got = f"got {' '.join(given) or 'an empty text'}" if given else "got none"
        told = f"{flag} takes {_wanted(row)}, but {got}."
        if given and given[0].startswith("-") and row.value == "STR":
            told = f"The value of {flag} begins with a dash. Write {flag}={shlex.quote(given[0])}."
    default = f" Its default is {row.given}." if row.given and row.value else ""
    return Unreadable(f"{told}{default} lockstep {verb} --help {row.path.replace('_', '-')} explains it.")


def lacks(verb: str, lacking: list[Row]) -> str:
    """The error for positional arguments that are missing."""
    names, about = " and ".join(row.value for row in lacking), " ".join(lacking[0].text.split()).rstrip(".")
    return f"{verb} lacks {names} ({about}). lockstep {verb} --help explains it."


def _unboxed(box: str) -> str:
    """The first paragraph of a box, without frame and title, as one line."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    paragraphs = [""]
    for line in plain.splitlines():
        inside = line.strip("│|+ ")
        if not inside.strip("─-╭╮╰╯") or line.startswith("╭"):  # a rule or the frame
            paragraphs.append("")
        else:
            paragraphs[-1] += f" {inside}"
    return " ".join(next((each for each in paragraphs if re.search("[.:]", each)), plain).split())


def _switched_on(flag: str) -> str:
    """The setting that --part.no-name switches off."""
    return re.sub(r"(^|\.)no_(\w+)$", r"\1\2", flag.removeprefix("--").replace("-", "_"))


def _switches(row: Row) -> str:
    path = row.path.replace("_", "-")
    part, dot, name = path.rpartition(".")
    return f"--{path} switches it on, --{part}{dot}no-{name} switches it off"


def _wanted(row: Row) -> str:
    *others, last = (_WANTED.get(each, each) for each in row.value.split("|") if each)
    if "|" in row.value:
        return " or ".join(filter(None, (", ".join(others), last)))
    words = row.value.split()
    one = _WANTED.get(words[0], words[0])
    if words[1:] == ["..."]:
        return f"several values, each {one}"
    return one if len(words) == 1 else f"{len(words)} values, each {one}"
