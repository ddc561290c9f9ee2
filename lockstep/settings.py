"""Frozen dataclasses to JSON and back, and the error that users' mistakes raise."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from decimal import Decimal
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro


class SettingsError(ValueError):
    """A user's mistake: says in one paragraph what was given, what is allowed and what to do."""


def parse_count(text: str) -> int:
    """Read an integer that may use k, M, B or scientific notation: `10M`, `2.5M`, `100_000`, `1e6`."""
    scale = {"k": 10**3, "K": 10**3, "m": 10**6, "M": 10**6, "b": 10**9, "B": 10**9}
    body, factor = (text[:-1], scale[text[-1]]) if text and text[-1] in scale else (text, 1)
    try:
        value = Decimal(body.replace("_", "")) * factor
        if abs(value) > 10**18 or value != int(value):
            raise ValueError
    except (ArithmeticError, ValueError):
        raise ValueError(f"{text!r} is not a whole number; write 10M, 2.5M, 500k, 1e6 or 100_000") from None
    return int(value)


Steps = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="COUNT",
        instance_from_str=lambda args: parse_count(args[0]),
        is_instance=lambda instance: isinstance(instance, int),
        str_from_instance=lambda instance: [str(instance)],
    ),
]
"""A count of steps; the command line accepts 10M-style numbers."""


def parse_options(texts: list[str]) -> dict[str, str | int | float | bool]:
    """Read `name=value` texts; a value is a number or true or false if it reads as one, else a string."""
    options: dict[str, str | int | float | bool] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise ValueError(f"{text!r} is not of the form name=value, as in repeat_action_probability=0.1")
        if value.lower() in ("true", "false"):
            options[name] = value.lower() == "true"
            continue
        options[name] = value
        if value.lower().lstrip("+-") == "nan":  # which no option can be
            continue
        for kind in (float, int):
            with contextlib.suppress(ValueError):
                options[name] = kind(value)
    return options


Options = Annotated[
    dict[str, str | int | float | bool],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE",
        instance_from_str=parse_options,
        is_instance=lambda instance: isinstance(instance, dict),
        str_from_instance=lambda instance: [f"{name}={value}" for name, value in instance.items()],
    ),
]
"""Free keyword arguments; the command line accepts `name=value` pairs, which replace all that were set before."""


_FOLDERS = "LOCKSTEP_USER_FILES"
"""Environment variable, which worker processes inherit: folders where users' files are looked for after the current."""
_NAMED = "__lockstep_file__"
"""Attribute of a user's module: its file's path, as it was named."""


def require(package: str, extra: str, what: str, otherwise: str) -> None:
    """Raise SettingsError if an optional package is not installed.

    Args:
        package: as it is imported.
        extra: of lockstep, which installs it.
        what: needs it.
        otherwise: what can be done without it, in a sentence.
    """
    if importlib.util.find_spec(package) is None:
        raise SettingsError(
            f"{what} needs the package {package}, which is not installed. Install it with: "
            f'pip install "lockstep[{extra}]". {otherwise}'
        )


def look_for_files_in(folder: str) -> None:
    """Look for users' files that the current folder has not in this one, here and in worker processes, before those
    that were named earlier."""
    earlier = [each for each in os.environ.get(_FOLDERS, "").split(os.pathsep) if each != folder]
    os.environ[_FOLDERS] = os.pathsep.join(filter(None, [folder, *earlier]))


def import_module(name: str) -> ModuleType:
    """Import a module, of the current folder too, or of one that look_for_files_in was told of."""
    for folder in (os.getcwd(), *filter(None, os.environ.get(_FOLDERS, "").split(os.pathsep))):
        _import_from(folder)
    return importlib.import_module(name)


def _import_from(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


class _AsItIsNow(SourceFileLoader):
    """Compiles a file each time. Python's own loader keeps what it has compiled beside the file, and takes that for the
    file as long as it has the same length and was changed in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load_file(path: str | Path) -> ModuleType:
    """Import a user's Python file under a name derived from its path, once per process. It may import its neighbors."""
    named = Path(path)
    folders = [Path(), *map(Path, filter(None, os.environ.get(_FOLDERS, "").split(os.pathsep)))]
    path = next((folder / named for folder in folders if (folder / named).is_file()), named).resolve()
    readable = re.sub(r"\W", "_", "_".join(path.with_suffix("").parts[1:]))
    name = f"lockstep_user_{readable}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # a/b.py is not a_b.py
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file() or path.suffix != ".py":
        raise SettingsError(f"There is no Python file {path}. Give the path of a .py file, as in my_file.py:name.")
    loader = _AsItIsNow(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    setattr(module, _NAMED, str(named))
    sys.modules[name] = module
    _import_from(str(path.parent))
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_object(reference: str) -> Any:
    """Return what `package.module:name` or `path/to/file.py:name` refers to.

    Raises:
        SettingsError: the file, module or name does not exist.
    """
    source, _, name = reference.rpartition(":")
    if source.startswith((".", "/", "~")) and not source.endswith(".py"):
        raise SettingsError(f"Cannot load {reference!r}: a file's path ends in .py, as in {source}.py:{name}.")
    try:
        value: Any = load_file(source) if source.endswith(".py") else import_module(source)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        where = _raised_at(error)
        if isinstance(error, AttributeError) and where is None:
            known = f" It has {', '.join(names)}." if (names := _defined(source)) else ""
            raise SettingsError(f"Cannot load {reference!r}: {source} has no {name}.{known}") from error
        remedy = "Write package.module:name or path/to/file.py:name." if where is None else f"It was raised by {where}."
        if "no known parent package" in str(error):
            remedy += " A file that is named by its path is in no package: import its neighbor without the dot."
        raise SettingsError(f"Cannot load {reference!r}: {error}. {remedy}") from error
    return value


def _defined(source: str) -> list[str]:
    """Functions and classes of a module, or a file, that was imported."""
    module = load_file(source) if source.endswith(".py") else import_module(source)
    return [
        name
        for name, x in vars(module).items()
        if (inspect.isfunction(x) or inspect.isclass(x)) and x.__module__ == module.__name__ and name[0] != "_"
    ]


def load_value(reference: str) -> Any:
    """What `package.module:name` or `path/to/file.py:name` refers to; of a function, what it returns.

    Raises:
        SettingsError: it does not exist, or the function wants arguments.
    """
    value = load_object(reference)
    if not callable(value):
        return value
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise SettingsError(
            f"{reference} cannot be called without arguments: {error}. Give each of them a default value."
        ) from error
    except ValueError:  # of what has no signature
        pass
    return value()


def _raised_at(error: Exception) -> str | None:
    """The line of the code being loaded that raised an error; None if it was raised by the loading itself."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return f"{own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else None


def reference_to(cls: type) -> str:
    """The inverse of load_object for a class: `module:name`, or `file.py:name` for a class of a user's file.

    The file is called as it was when it was loaded, and a script by its path from the current folder if it lies
    below it: so a run's identity does not depend on where its files lie.
    """
    module = sys.modules[cls.__module__]
    if hasattr(module, _NAMED):
        return f"{getattr(module, _NAMED)}:{cls.__qualname__}"
    if cls.__module__ in ("__main__", "__mp_main__"):
        path, here = Path(str(module.__file__)).resolve(), Path.cwd()
        return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{cls.__qualname__}"
    return f"{cls.__module__}:{cls.__qualname__}"


def check_values(settings: Any, path: str = "") -> None:
    """Check every value of nested dataclasses against its annotation, as the command line does by itself.

    Raises:
        SettingsError: one is of another kind, none of those that there are, no number (NaN), which comparisons with
            bounds let pass, or infinite, unless it bounds something else.
    """
    hints = _hints(type(settings))
    for each in dataclasses.fields(settings):
        value, name = getattr(settings, each.name), f"{path}{each.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_values(value, f"{name}.")
        elif isinstance(value, float) and math.isnan(value):
            raise SettingsError(f"{name}={value} must be a number.")
        elif isinstance(value, float) and math.isinf(value) and not _is_bound(each):
            raise SettingsError(f"{name}={value} must be finite. Where a large number makes sense, 1e9 is one.")
        elif each.name in hints and not _fits(value, hints[each.name]):
            raise SettingsError(f"{name}={value!r} must be {_kinds(hints[each.name])}.")


def _is_bound(field: dataclasses.Field[Any]) -> bool:
    """Whether a setting keeps something else in bounds, so that infinity means none."""
    return field.name.startswith("max_") or field.name.endswith("clip") or _default(field) == math.inf


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except Exception:  # names that only a type checker sees, and whatever a text raises that is no annotation
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotation's kind; of kinds that are not settings' own, any is."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in args)
    if origin is tuple:  # which JSON gives back as lists
        if not isinstance(value, (tuple, list)):
            return False
        kinds = [args[0]] * len(value) if args[1:] == (...,) else args
        return not args or (len(kinds) == len(value) and all(map(_fits, value, kinds)))
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    if hint in (bool, str, type(None)) or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return isinstance(value, hint)
    return True


def _kinds(hint: Any) -> str:
    """An annotation in words."""
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_kinds, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a tuple, each of it {_kinds(get_args(hint)[0])}" if get_args(hint)[1:] == (...,) else "a tuple"
    return words.get(hint, f"of the kind {getattr(hint, '__name__', hint)}")


_TYPE = "$type"
"""Key of a dataclass's type in JSON; no setting, and no argument of an environment, can have this name."""


def to_json(value: Any, *, whole: bool = False) -> Any:
    """Turn nested dataclasses into JSON values; each dataclass states its type, so that from_json can rebuild it.

    Settings that a class lists as `later` are left out while they have their default value: they came when there were
    runs already, whose experiments stay what they were.

    Args:
        whole: leave out none.

    Raises:
        SettingsError: a value is of a type that JSON does not have.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        later = getattr(type(value), "later", frozenset())
        present = {f.name: (getattr(value, f.name), _default(f)) for f in dataclasses.fields(value)}
        given = {name: x for name, (x, default) in present.items() if whole or name not in later or x != default}
        fields = {name: to_json(x, whole=whole) for name, x in given.items()}
        return {_TYPE: reference_to(type(value)), **fields}
    if isinstance(value, dict):
        return {str(key): to_json(item, whole=whole) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item, whole=whole) for item in value]
    if not (value is None or isinstance(value, (str, int, float, bool))):
        raise SettingsError(
            f"{value!r} of the type {type(value).__name__} is among the settings, which are texts, numbers, True, "
            "False, None, and tuples, dicts and dataclasses of these: convert it, as by int() or str()."
        )
    return value


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """What to_json wrote, by dotted names: {"env.id": "Breakout", …}. An empty dict stays one."""
    lines: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            lines |= flat(value, f"{prefix}{name}.") or {prefix + name: {}}
        elif prefix or name != _TYPE:
            lines[prefix + name] = value
    return lines


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def from_json(value: Any) -> Any:
    """Rebuild what to_json wrote. Sequences come back as tuples.

    Raises:
        SettingsError: a type no longer exists, or has no such setting.
    """
    if isinstance(value, dict) and _TYPE in value:
        named = value[_TYPE]
        cls = load_object(named) if isinstance(named, str) else None
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise SettingsError(
                f"{_TYPE} {named!r} is not the name of settings: this file is damaged. Restore it from a copy."
            )
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = set(value) - known - {_TYPE}
        if unknown:
            raise SettingsError(
                f"{value[_TYPE]} has no setting {', '.join(sorted(unknown))}: this run was written by another "
                "version of lockstep. Install that version, or start a new run."
            )
        settings = {key: from_json(item) for key, item in value.items() if key != _TYPE}
        lacking = [each.name for each in dataclasses.fields(cls) if each.name not in settings and _required(each)]
        if lacking:
            raise SettingsError(
                f"{value[_TYPE]} needs the setting {', '.join(lacking)}, which this run does not have: its file is "
                "damaged, or another version of lockstep, or of your own file, wrote it."
            )
        return cls(**settings)
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    return value
