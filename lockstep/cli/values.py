"""What to say of a flag's value that the parser refuses."""

from __future__ import annotations

import re
from typing import Any

from lockstep.cli.help import Row, rows
from lockstep.config.settings import SettingsError

_WANTED = {"INT": "a whole number", "FLOAT": "a number", "STR": "a text", "COUNT": "a whole number, such as 10M"}
"""What is meant by the names that help has for kinds of values."""
_OF_PYTHON = ("invalid literal for", "could not convert", "Could not find valid parse")
"""How reasons begin that only repeat that a value is of the wrong kind."""


class Unreadable(SettingsError):
    """A flag has a value that it does not take."""


def unreadable(verb: str, groups: list[list[str]], settings: Any, box: str) -> Unreadable:
    """The error for a value that the parser refused.

    Args:
        verb: with the recipe, if it has one.
        groups: each flag with its values.
        settings: what the flags change: an instance, or the class if everything has its default.
        box: what the parser printed.
    """
    said = _unboxed(box)
    known = {row.path: row for row in rows(settings)}
    kind, _, rest = said.partition(": ")
    if kind == "Unrecognized options":
        words = rest.split()
        flag, *given = next((each for each in groups if set(words) & set(each)), words)
    else:
        closely = said.replace(" ", "")  # a narrow box breaks names
        named = [group for group in groups if (name := group[0].partition("=")[0]).startswith("--") and name in closely]
        flag, *given = max(named, key=lambda group: len(group[0].partition("=")[0]), default=[""])
    flag, equals, value = flag.partition("=")
    given = [value, *given] if equals else given
    row = known.get(flag.removeprefix("--").replace("-", "_")) or known.get(_switched_on(flag))
    if row is None or row.positional or not flag.startswith("--"):
        said = f"{rest} is more than {verb} takes." if kind == "Unrecognized options" else said
        return Unreadable(f"{said.rstrip('.')}. lockstep {verb} --help says what it takes.")
    if kind.startswith("Error parsing") and not rest.startswith(_OF_PYTHON):
        told = f"{flag}: {rest.rstrip('.')}."
    elif not row.value:
        told = f"{flag} takes no value, but got {' '.join(given)}: {_switches(row)}."
    else:
        got = f"got {' '.join(given) or 'an empty text'}" if given else "got none"
        told = f"{flag} takes {_wanted(row)}, but {got}."
    default = f" Its default is {row.given}." if row.given and row.value else ""
    return Unreadable(f"{told}{default} lockstep {verb} --help {row.path.replace('_', '-')} explains it.")


def _unboxed(box: str) -> str:
    """The first paragraph of a box, without its frame and title, as one line."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    paragraphs = [""]
    for line in plain.splitlines():
        inside = line.strip("│|+ ")
        if not inside.strip("─-╭╮╰╯") or line.startswith("╭"):  # a rule, or the frame
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
    *others, last = row.value.split("|")
    if others:
        return f"{', '.join(others)} or {last}"
    words = row.value.split()
    one = _WANTED.get(words[0], words[0])
    if words[1:] == ["..."]:
        return f"values of which each is {one}"
    return one if len(words) == 1 else f"{len(words)} values of which each is {one}"
