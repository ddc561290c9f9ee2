"""The output of `--help`, `--help GROUP` and `--help-all`."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

from lockstep.config.settings import SettingsError, default_of
from lockstep.config.synonyms import meaning_of

WORDS = ("-h", "--help", "--help-all")
"""Flags that ask for help."""

_FIRST = {
    "env.id": "a game, gymnasium id or file.py:make",
    "env.num_envs": "environments, in all shards together",
    "total_steps": "samples to learn from, as in 500k",
    "seed": "the one seed of all randomness",
    "run": "the run's folder, else one in runs/",
    "layout": "processes, as in processes:4",
    "algorithm.learning_rate": "step size",
    "algorithm.actor_learning_rate": "step size of the policy",
    "algorithm.discount": "γ: weight of a reward one step later",
    "algorithm.rollout": "steps per environment and iteration",
    "algorithm.epochs": "passes over each rollout",
    "algorithm.minibatches": "gradient steps per pass",
    "algorithm.batch_size": "samples of a gradient step",
    "algorithm.updates": "gradient steps per iteration",
    "algorithm.gae_lambda": "λ of advantage estimation",
    "algorithm.clip": "bound on each step of the policy",
    "algorithm.entropy_coef": "weight of the entropy bonus",
    "algorithm.replay.capacity": "steps in the replay memory",
    "algorithm.warmup": "steps before learning begins",
    "algorithm.epsilon_end": "share of random actions at the end",
    "model.hidden_sizes": "widths of the MLP's layers",
    "model.encoder": "network for images",
    "model.core": "memory: none, lstm, gru, …",
    "scheme.lag": "age of the policy that collects",
    "normalize.observations": "standardize observations",
    "checkpoint_every": "iterations between checkpoints",
    "eval_every": "iterations between evaluations",
}
"""The most important settings of recipes, with short descriptions."""


_POSITIONAL: Any = tyro.conf.Positional
_NO_VALUE = (None, "", (), {}, tyro.MISSING, dataclasses.MISSING)
_NAMES = {int: "INT", float: "FLOAT", str: "STR"}
_WIDEST = 38
"""Width of the first column of the short help, so that the second column ends within 80 characters."""
_SHORT = 12
"""The most flags that the short help explains in full."""


class Row(NamedTuple):
    """A flag or a positional argument."""

    path: str
    """The setting's path, such as algorithm.learning_rate."""
    group: str
    """The group of settings that the flag belongs to; empty for the command's own flags."""
    value: str
    """The kind of value, such as INT; empty for a switch."""
    default: Any
    positional: bool
    owner: type[Any]
    """The class of which it is a field."""

    @property
    def text(self) -> str:
        """The docstring under the field."""
        return _docstrings(self.owner).get(self.path.rpartition(".")[2], "")

    @property
    def left(self) -> str:
        """The flag and the kind of its value."""
        if self.positional:
            return self.value
        part, dot, name = self.path.replace("_", "-").rpartition(".")
        switched = f", --{part}{dot}no-{name}" if self.default is True else ""
        return f"--{part}{dot}{name}{switched} {self.value}".rstrip()

    @property
    def optional(self) -> bool:
        return self.default not in (dataclasses.MISSING, tyro.MISSING)

    @property
    def given(self) -> str:
        """The default as a user would write it; empty for none."""
        value = self.default
        if any(value is each or (type(value) is type(each) and value == each) for each in _NO_VALUE):
            return ""
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, int) and value >= 10_000:
            scale, unit = (1_000_000, "M") if value % 1_000_000 == 0 else (1_000, "k")
            return f"{value // scale}{unit}" if value % scale == 0 else str(value)
        if isinstance(value, dict):
            return " ".join(f"{name}={each}" for name, each in value.items())
        return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def asks(arguments: list[str]) -> bool:
    """Whether these arguments ask for help."""
    return any(word.partition("=")[0] in WORDS for word in arguments)


def text(verb: str, arguments: list[str], settings: Any) -> str:
    """The help text that the arguments ask for.

    Args:
        verb: the command, followed by the recipe if there is one.
        arguments: the arguments as the user wrote them.
        settings: the settings that flags change: an instance, or the class if every field has a default.

    Raises:
        SettingsError: the arguments ask about something that does not exist.
    """
    command, width = f"lockstep {verb}", width_of_terminal()
    shown = list(rows(settings))
    flags, arguments_of = [r for r in shown if not r.positional], [r for r in shown if r.positional]
    groups = {group: [row for row in flags if row.group == group] for group in dict.fromkeys(r.group for r in flags)}
    if topic := _topic(arguments):
        return _table(_about(topic, flags, command), width)
    usage = " ".join([command, *(f"[{r.value}]" if r.optional else r.value for r in arguments_of), "[FLAGS]"])
    kind = settings if isinstance(settings, type) else type(settings)
    about = [_filled(paragraph, width) for paragraph in (inspect.getdoc(kind) or "").split("\n\n")]
    parts = [f"usage: {usage}", *about, *([_table(arguments_of, width)] if arguments_of else [])]
    if "--help-all" in arguments or len(flags) <= _SHORT:
        parts += [(f"{group}\n" if group else "") + _table(each, width) for group, each in groups.items()]
        return "\n\n".join(parts)
    own = [row for row in groups.get("", ()) if row.path not in _FIRST or "env" not in groups]
    if "algorithm" in groups:
        known = {row.path: row for row in flags}
        first = [(_example(known[path]), short) for path, short in _FIRST.items() if path in known]
        parts.append("The most important flags, with this recipe's values:\n" + columns(first, width))
    parts.append(columns([(_flag(row), _short(row)) for row in own], width))
    listed = ", ".join(f"{group} ({len(each)})" for group, each in groups.items() if group)
    by_group = f"{command} --help GROUP explains one group of settings: {listed}. " if listed else ""
    parts.append(_filled(f"{by_group}{command} --help-all explains all {len(flags)} flags.", width))
    return "\n\n".join(parts)


def width_of_terminal() -> int:
    """Characters in a line of help."""
    return max(60, min(shutil.get_terminal_size().columns, 120))


def rows(settings: Any, prefix: str = "", group: str = "") -> Iterator[Row]:
    """Every flag and positional argument of a dataclass, given as an instance, or as the class if every field has a
    default."""
    kind = settings if isinstance(settings, type) else type(settings)
    for field in dataclasses.fields(kind):
        value = default_of(field) if isinstance(settings, type) else getattr(settings, field.name)
        hint = _hints(kind).get(field.name, Any)
        extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            if any(getattr(each, "name", None) == "" for each in extras):  # its settings are flags without a prefix
                yield from rows(value, prefix, "run" if type(value).__name__ == "RunOptions" else group)
            else:
                yield from rows(value, f"{prefix}{field.name}.", group or field.name.replace("_", "-"))
            continue
        positional = _POSITIONAL in extras
        named = next((each.metavar for each in extras if getattr(each, "metavar", None)), "")
        named = named or (field.name.upper() if positional else _value(hint))
        yield Row(prefix + field.name, group, named, value, positional, kind)


def _flag(row: Row) -> str:
    return f"--{row.path.replace('_', '-')}"


def _example(row: Row) -> str:
    """The flag with its default value."""
    value = "" if isinstance(row.default, bool) else row.given or {"run": "FOLDER"}.get(row.path, row.value)
    room = _WIDEST - len(_flag(row)) - 1
    return f"{_flag(row)} {value if len(value) <= room else '…' + value[1 - room :]}".rstrip()


def _topic(arguments: list[str]) -> str:
    """The topic that the user asks about; empty for all flags."""
    for word, following in zip(arguments, [*arguments[1:], ""]):
        flag, _, topic = word.partition("=")
        if flag in WORDS and (topic or not following.startswith("-")):
            return topic or following
    return ""


def _about(topic: str, flags: list[Row], command: str) -> list[Row]:
    """The flags of a group, of a part of a group, or those whose names contain the topic."""
    path = topic.removeprefix("--").replace("-", "_")
    found = [row for row in flags if row.group.replace("-", "_") == path or f"{row.path}.".startswith(f"{path}.")]
    found = found or [row for row in flags if path in row.path]
    meant = [each.setting for each in meaning_of(path, [row.path for row in flags])]
    found = found or [row for row in flags if row.path in meant]
    if not found:
        groups = ", ".join(dict.fromkeys(row.group for row in flags if row.group))
        known = f" Groups are {groups}." if groups else ""
        raise SettingsError(f"No flag of {command} has {topic!r} in its name.{known} {command} --help-all shows all.")
    return found


# --------------------------------------------------------------------------------------------------- the text


def _table(shown: list[Row], width: int) -> str:
    """A table of flags with their full texts."""
    return columns([(row.left, " ".join(_sentences(row))) for row in shown], width)


def _sentences(row: Row) -> list[str]:
    """The sentences of a flag's text, and last its default. A sentence "Default: …" says one that depends on others."""
    sentences = re.split(r"(?<=[^.]\.) ", " ".join(row.text.split()))
    told = [each for each in sentences if each.startswith("Default: ")]
    known = [f"Default: {row.given}."] if row.given not in ("", "off") and not row.positional else []
    default = [f"({each[0].lower()}{each[1:-1]})" for each in told or known]
    return [*(each for each in sentences if each not in told), *default]


def columns(pairs: list[tuple[str, str]], width: int) -> str:
    """Two columns, the second one wrapped. Its text begins below the first column's where that is too wide."""
    longest = max(len(left) for left, _ in pairs) + 4
    indent = longest if longest <= width - 36 else 8
    lines = []
    for left, right in pairs:
        *before, last = _within(f"  {left}", width)
        lines += before
        begin = last.ljust(indent)
        wrapped = textwrap.wrap(right, width - indent, break_long_words=False, break_on_hyphens=False) or [""]
        if len(begin) > indent:
            lines += [begin, *(" " * indent + line for line in wrapped)]
        else:
            lines += [(begin + wrapped[0]).rstrip(), *(" " * indent + line for line in wrapped[1:])]
    return "\n".join(lines)


def _within(flag: str, width: int) -> list[str]:
    """A flag in lines of at most this width, broken between its choices."""
    lines = [flag]
    while len(lines[-1]) > width and (place := lines[-1].rfind("|", 0, width) + 1):
        lines[-1:] = [lines[-1][:place], " " * 10 + lines[-1][place:]]
    return lines


def _filled(paragraph: str, width: int) -> str:
    return textwrap.fill(" ".join(paragraph.split()), width, break_long_words=False, break_on_hyphens=False)


def _short(row: Row) -> str:
    """The first sentence of a flag's text, and its default."""
    first, *others = _sentences(row)
    return " ".join([first, *(each for each in others if each.startswith("(default: "))])


# -------------------------------------------------------------------------------------------------- the fields


def _value(hint: Any) -> str:
    """The kind of value that a flag of this type takes."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((each.metavar for each in args[1:] if getattr(each, "metavar", None)), _value(args[0]))
    if origin is Literal:
        return "|".join(str(each) for each in args if each != "")
    if origin in (Union, UnionType):
        return "|".join(_value(each) for each in args if each is not type(None))
    if origin is tuple:
        return f"{_value(args[0])} ..." if args[1:] == (...,) else " ".join(map(_value, args))
    return "" if hint is bool else _NAMES.get(hint, "VALUE")


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    try:
        return get_type_hints(kind, include_extras=True)
    except Exception:  # names that only a type checker sees, or a string that is not an annotation
        return {}


@functools.cache
def _docstrings(kind: type[Any]) -> dict[str, str]:
    """The text under each field; a subclass takes precedence over its bases."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        except (OSError, TypeError, SyntaxError):  # built-in classes, or classes without a source file
            continue
        body = getattr(tree, "body", [])
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = below.value if isinstance(below, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[field.target.id] = inspect.cleandoc(text.value)
    return found
