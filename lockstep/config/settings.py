"""Values of settings: parsing, checks, and the error for users' mistakes."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from lockstep.config.extras import install_command
from lockstep.config.synonyms import synonyms

T = TypeVar("T", bound=Any)


class SettingsError(ValueError):
    """A user's mistake. The message says in one paragraph what was given, what is allowed and what to do."""

    exit_code = 2
    """The exit code of a command that ends with this error."""

    def bare(self) -> SettingsError:
        """The same error for another process, without a user's subclass, which may be unknown there."""
        return next(kind for kind in (Diverged, NotFinite, SettingsError) if isinstance(self, kind))(str(self))


class NotFinite(SettingsError):
    """An environment returned NaN or an infinity, or learning has diverged."""

    exit_code = 1


class Diverged(NotFinite):
    """Learning diverged, although everything that environments returned was finite."""


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


def parse_options(texts: list[str]) -> dict[str, Any]:
    """Parse `name=value` texts: see parse_option."""
    options: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise ValueError(f"{text!r} is not of the form name=value, as in repeat_action_probability=0.1")
        try:
            options[name] = parse_option(value)
            check_free(options[name], name)
        except ValueError as error:
            raise ValueError(f"{text!r} cannot be read: {error}") from None
    return options


def parse_option(text: str) -> Any:
    """Parse a value: a number, true or false, None, or a list, tuple, dict or quoted text in Python's syntax. Anything
    else is a plain text.

    Raises:
        ValueError: it begins with a bracket or a quote, but is not a complete value.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text == "None":
        return None
    if text.startswith(("[", "(", "{", "'", '"')):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(
                "it begins like a list, tuple, dict or quoted text in Python, but is not a complete one. Quote texts "
                'inside brackets, and the whole for the shell, as in \'names=["a", "b"]\'. A plain text that begins '
                "with a bracket or a quote needs its own quotes, as in 'name=\"(a\"'"
            ) from None
    if text.lower().lstrip("+-") == "nan":  # no option can have this value
        return text
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def check_free(value: Any, name: str) -> None:
    """Raise SettingsError for a value that JSON could not restore exactly. name: what errors call it."""
    if isinstance(value, (list, tuple)):
        for each in value:
            check_free(each, name)
    elif isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise SettingsError(f"{name} has the key {key!r}, but the keys of a dict must be texts, as in JSON.")
            check_free(each, name)
    elif isinstance(value, float) and math.isnan(value):
        raise SettingsError(f"{name}={value} must be a number.")
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise SettingsError(
            f"{name} holds {value!r} of the type {type(value).__name__}. Values may be texts, numbers, True, False, "
            "None, and lists, tuples and dicts of these: convert it, for example with int() or str()."
        )


def write_option(value: Any) -> str:
    """The inverse of parse_option."""
    if not isinstance(value, str):
        return repr(value)
    with contextlib.suppress(ValueError):
        if parse_option(value) == value:
            return value
    return repr(value)


def _named(
    metavar: str, parse: Callable[[list[str]], dict[str, Any]], write: Callable[[Any], str]
) -> tyro.constructors.PrimitiveConstructorSpec[dict[str, Any]]:
    """How the command line reads and writes a dict, as `name=value` pairs."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda instance: isinstance(instance, dict),
        str_from_instance=lambda instance: [f"{name}={write(value)}" for name, value in instance.items()],
    )


Options = Annotated[dict[str, Any], _named("NAME=VALUE", parse_options, write_option)]
"""Free keyword arguments. On the command line, `name=value` pairs replace all previous ones."""


def _parse_texts(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for (name, _, value), text in zip(pairs, texts, strict=True):
        if not name or not value:
            raise ValueError(f"{text!r} is not of the form name=value")
    return {name: value for name, _, value in pairs}


Texts = Annotated[dict[str, str], _named("NAME=TEXT", _parse_texts, str)]
"""Texts by name. On the command line, `name=text` pairs replace all previous ones."""


Names = Annotated[
    tuple[str, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME[,NAME...]",
        instance_from_str=lambda args: tuple(name for text in args for name in text.split(",") if name),
        is_instance=lambda instance: isinstance(instance, tuple),
        str_from_instance=lambda instance: list(instance),
    ),
]
"""Names that the command line separates by commas or spaces."""


def require(package: str, extra: str, what: str, otherwise: str) -> None:
    """Raise SettingsError if an optional package is not installed.

    Args:
        package: the package's import name.
        extra: lockstep's extra that installs it.
        what: the feature that needs it.
        otherwise: what works without it, in a sentence.
    """
    if importlib.util.find_spec(package) is None:
        raise SettingsError(
            f"{what} needs the package {package}, which is not installed. Install it with: "
            f"{install_command(extra)}. {otherwise}"
        )


def check_values(settings: Any, path: str = "") -> None:
    """Check every value of nested dataclasses against its annotation, as the command line does.

    Raises:
        SettingsError: a value has the wrong type, is not one of the allowed values, is NaN (which passes comparisons
        with bounds), or is infinite without being a bound; or a class has attributes that only look like settings.
    """
    _check_class(type(settings))
    hints = hints_of(type(settings))
    for each in dataclasses.fields(settings):
        value, name = getattr(settings, each.name), f"{path}{each.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_values(value, f"{name}.")
        elif any(map(math.isnan, _floats(value))):
            raise SettingsError(f"{name}={value} must be a number.")
        elif any(map(math.isinf, _floats(value))) and not _is_bound(each):
            raise SettingsError(f"{name}={value} must be finite. For no limit, use a large number such as 1e9.")
        elif each.name in hints and not _fits(value, hints[each.name]):
            raise SettingsError(f"{name}={value!r} must be {_kinds(hints[each.name])}.")


def _check_class(cls: type) -> None:
    """Raise SettingsError for attributes of a user's class that look like settings, but that dataclasses ignore."""
    own = inspect.get_annotations(cls)
    fields = [name for name, hint in own.items() if "ClassVar" not in str(hint)]
    if fields and "__dataclass_fields__" not in vars(cls):
        raise SettingsError(
            f"{cls.__name__} declares {', '.join(fields)}, which would be ignored, since the class is no dataclass. "
            "Write @dataclass(frozen=True) above it."
        )
    if bare := next((each.name for each in dataclasses.fields(cls) if each.name in vars(cls).keys() - own.keys()), ""):
        raise SettingsError(
            f"{cls.__name__}.{bare} would be ignored, since it has no annotation. Write it as a field of the "
            f"dataclass, as in {bare}: {type(vars(cls)[bare]).__name__} = {vars(cls)[bare]!r}."
        )


def _floats(value: Any) -> Iterator[float]:
    """The float that a value is, or those in a tuple or list."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _floats(each)


def changed(settings: T, changes: Mapping[str, Any]) -> T:
    """Settings with some values replaced, as by dataclasses.replace, after a check of their types. A dotted name
    changes a part: {"algorithm.learning_rate": 1e-3}.

    Raises:
        SettingsError: a setting does not exist, or its value has the wrong type.
    """
    kind, hints = type(settings).__name__, hints_of(type(settings))
    known = [each.name for each in dataclasses.fields(settings) if each.init]
    of_parts: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        part, dot, rest = name.partition(".")
        if dot:
            of_parts.setdefault(part, {})[rest] = value
    changes = {name: value for name, value in changes.items() if "." not in name}
    for part, inner in of_parts.items():
        whole = changes.get(part, getattr(settings, part, None))
        if part in known and dataclasses.is_dataclass(whole) and not isinstance(whole, type):
            changes[part] = changed(whole, inner)
        else:
            name = f"{part}.{next(iter(inner))}"
            raise SettingsError(f"{kind} has no setting {name!r}. {_instead(settings, name, known)}")
    for name, value in changes.items():
        if name not in known:
            raise SettingsError(f"{kind} has no setting {name!r}. {_instead(settings, name, known)}")
        if name in hints and not _fits(value, hints[name]):
            part = getattr(settings, name)
            advice = ""
            if dataclasses.is_dataclass(part) and isinstance(value, dict):
                given = ", ".join(f'"{name}.{key}": {each!r}' for key, each in value.items())
                advice = f" To change a part of it: replace(**{{{given}}})."
            raise SettingsError(f"{name}={value!r} must be {_kinds(hints[name])}.{advice}")
    return dataclasses.replace(settings, **{name: _as_float(value, hints.get(name)) for name, value in changes.items()})


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The name that a misspelt one resembles most, as a question and a space; empty if it resembles none."""
    close = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {close[0]}? " if close else ""


def _instead(settings: Any, name: str, known: list[str]) -> str:
    """Advice for a setting that does not exist."""
    paths = list(_paths(settings))
    if elsewhere := _of_other_libraries(name, paths):
        return elsewhere
    spelled = difflib.get_close_matches(name, {path.rpartition(".")[2] for path in paths}, n=3)
    meant = [
        path
        for path in paths
        for last in [path.rpartition(".")[2]]
        if last in (name, *spelled) or name == "".join(word[:1] for word in last.split("_"))
    ]
    if not meant:
        return f"It has {', '.join(known)}."
    how = f' Write replace(**{{"{meant[0]}": ...}}).' if "." in meant[0] else ""
    return f"Did you mean {' or '.join(meant)}?{how}"


def _of_other_libraries(name: str, paths: list[str]) -> str:
    """The setting that Stable-Baselines3, CleanRL and others call so; empty if these settings have none. The paths may
    begin below the experiment, as in discount for algorithm.discount."""
    word = name.rpartition(".")[2]
    if any(path.rpartition(".")[2] == word for path in paths):
        return ""
    for setting, note in synonyms(name):
        if path := next((path for path in paths if f".{setting}".endswith(f".{path}")), None):
            differs = f" Its value may differ: see lockstep train RECIPE --help {word}." if note else ""
            return f"It is called {path} here.{differs}"
    return ""


def _paths(settings: Any, prefix: str = "") -> Iterator[str]:
    """The dotted name of every setting."""
    for each in dataclasses.fields(settings):
        value = getattr(settings, each.name)
        if dataclasses.is_dataclass(value):
            yield from _paths(value, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name


def _is_bound(field: dataclasses.Field[Any]) -> bool:
    """Whether a setting bounds something else, so that infinity means no bound."""
    return field.name.startswith("max_") or field.name.endswith("clip") or default_of(field) == math.inf


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """The annotations of a class and its bases, by name; empty if one of them cannot be read."""
    try:
        return get_type_hints(cls)
    except Exception:  # names that only a type checker sees, or a string that is not an annotation
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value matches an annotation; annotations that settings do not use match any value."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in args)
    if origin is tuple:  # JSON restores tuples as lists
        if not isinstance(value, (tuple, list)):
            return False
        kinds = [args[0]] * len(value) if args[1:] == (...,) else args
        return not args or (len(kinds) == len(value) and all(map(_fits, value, kinds)))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(key, args[0]) for key in value)  # to_json checks the values
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    if hint in (bool, str, type(None)) or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return isinstance(value, hint)
    return True


def _as_float(value: Any, hint: Any) -> Any:
    """The value, as a float if the annotation says so: 1 and 1.0 would give an experiment two identities."""
    kinds = (hint, *get_args(hint))
    return float(value) if type(value) is int and float in kinds and int not in kinds else value


def _kinds(hint: Any) -> str:
    """An annotation as text."""
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_kinds, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a tuple, each of it {_kinds(get_args(hint)[0])}" if get_args(hint)[1:] == (...,) else "a tuple"
    if get_origin(hint) is dict and get_args(hint):
        return f"a dict, each key of it {_kinds(get_args(hint)[0])}"
    name = getattr(hint, "__name__", hint)
    return words.get(hint, f"of the kind {name}" + (f", as {name}.of(…) makes it" if hasattr(hint, "of") else ""))


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
