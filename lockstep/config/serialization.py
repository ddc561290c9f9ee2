"""Converts settings (frozen dataclasses) to JSON and back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin

from lockstep.config.names import FORMER, current_name, name_of, reference_of
from lockstep.config.settings import SettingsError, default_of, hints_of
from lockstep.config.user_code import load_object

_TYPE = "$type"
"""Key of a dataclass's type in JSON; no setting or argument of an environment can have this name."""
_TUPLE = "$tuple"
"""Key of a tuple's elements in JSON, for values in which lists and tuples must be distinguished."""


def to_json(value: Any, *, whole: bool = False) -> Any:
    """Convert nested dataclasses to JSON values; each dataclass states its type, so that from_json can rebuild it.

    Settings that a class lists as `later` are left out if they have their default value: they were added when runs
    already existed, whose identities must stay. Settings listed as `free` hold values for users' and other libraries'
    code, so their lists and tuples are distinguished.

    Args:
        value: settings, or a part of them.
        whole: include all settings of `later`.

    Raises:
        SettingsError: JSON cannot represent the type of a value.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        later = getattr(type(value), "later", frozenset())
        present = {f.name: (getattr(value, f.name), default_of(f)) for f in dataclasses.fields(value)}
        given = {name: x for name, (x, default) in present.items() if whole or name not in later or x != default}
        free = getattr(type(value), "free", frozenset())
        fields = {name: _marked(x) if name in free else to_json(x, whole=whole) for name, x in given.items()}
        return {_TYPE: name_of(type(value)), **fields}
    if isinstance(value, dict):
        if other := next((key for key in value if not isinstance(key, str)), None):
            raise SettingsError(f"A setting is a dict with the key {other!r}, but keys must be texts, as in JSON.")
        return {key: to_json(item, whole=whole) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item, whole=whole) for item in value]
    if not (value is None or isinstance(value, (str, int, float, bool))):
        raise SettingsError(
            f"{value!r} of the type {type(value).__name__} is among the settings, which must be texts, numbers, True, "
            "False, None, and tuples, dicts and dataclasses of these: convert it, for example with int() or str()."
        )
    return value


def _marked(value: Any) -> Any:
    """A free value in JSON, with its tuples marked."""
    if isinstance(value, dict):
        return {str(key): _marked(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_marked(item) for item in value]
        return items if isinstance(value, list) else {_TUPLE: items}
    return to_json(value)


def _unmarked(value: Any) -> Any:
    """The inverse of _marked."""
    if isinstance(value, dict) and value.keys() == {_TUPLE}:
        return tuple(_unmarked(item) for item in value[_TUPLE])
    if isinstance(value, dict):
        return {key: _unmarked(item) for key, item in value.items()}
    return [_unmarked(item) for item in value] if isinstance(value, list) else value


def without_marks(value: Any) -> Any:
    """The output of to_json, with tuples as lists. Identities are computed from this form, since marks were introduced
    after them."""
    if isinstance(value, dict):
        return (
            without_marks(value[_TUPLE])
            if value.keys() == {_TUPLE}
            else {k: without_marks(x) for k, x in value.items()}
        )
    return [without_marks(item) for item in value] if isinstance(value, list) else value


def with_current_names(value: Any) -> Any:
    """The output of to_json of any version, with the current names of classes."""
    return _renamed(value, current_name)


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {
            key: rename(item) if key == _TYPE and isinstance(item, str) else _renamed(item, rename)
            for key, item in value.items()
        }
    return [_renamed(item, rename) for item in value] if isinstance(value, list) else value


def identities_of(settings: dict[str, Any]) -> tuple[str, str]:
    """Two SHA-256 hashes of the canonical JSON of an experiment, as written by to_json of any version: its identity,
    and the identity that earlier versions recorded, which named classes by their modules."""
    plain = with_current_names(without_marks(settings))
    return _hash(plain), _hash(_renamed(plain, lambda name: FORMER.get(name, name)))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The output of to_json by dotted names: {"env.id": "Breakout", …}. An empty dict remains a value."""
    lines: dict[str, Any] = {}
    for name, value in without_marks(with_current_names(settings)).items():
        if isinstance(value, dict):
            lines |= flat(value, f"{prefix}{name}.") or {prefix + name: {}}
        elif prefix or name != _TYPE:
            lines[prefix + name] = value
    return lines


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def from_json(value: Any) -> Any:
    """Rebuild settings from the output of to_json. Sequences become tuples, or lists where a class says so.

    Raises:
        SettingsError: a type no longer exists, or lacks a setting.
    """
    if isinstance(value, dict) and _TYPE in value:
        named = value[_TYPE]
        cls = load_object(reference_of(named)) if isinstance(named, str) else None
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise SettingsError(
                f"{_TYPE} {named!r} is not the name of a settings class: this file is damaged. Restore it from a copy."
            )
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = set(value) - known - {_TYPE}
        if unknown:
            raise SettingsError(
                f"{value[_TYPE]} has no setting {', '.join(sorted(unknown))}: this run was written by another "
                "version of lockstep. Install that version, or start a new run."
            )
        free, hints = getattr(cls, "free", frozenset()), hints_of(cls)
        given = {key: item for key, item in value.items() if key != _TYPE}
        settings = {
            key: _unmarked(item) if key in free else _with_lists(from_json(item), hints.get(key))
            for key, item in given.items()
        }
        lacking = [each.name for each in dataclasses.fields(cls) if each.name not in settings and _required(each)]
        if lacking:
            raise SettingsError(
                f"{value[_TYPE]} needs the setting {', '.join(lacking)}, which this run does not have: its file is "
                "damaged, or was written by another version of lockstep or of your own file."
            )
        return cls(**settings)
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    return value


def _with_lists(value: Any, hint: Any) -> Any:
    """A restored value with lists in place of tuples where its annotation says so."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        for each in args:
            value = _with_lists(value, each)
    elif isinstance(value, dict) and origin is dict and args:
        return {key: _with_lists(item, args[1]) for key, item in value.items()}
    elif isinstance(value, tuple) and origin is list:
        return [_with_lists(item, *args or (None,)) for item in value]
    elif isinstance(value, tuple) and origin is tuple and args:
        hints = [args[0]] * len(value) if args[1:] == (...,) else args
        return tuple(map(_with_lists, value, hints)) if len(hints) == len(value) else value
    return value
