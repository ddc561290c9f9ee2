"""What classes of settings declare about their settings. Declarations of base classes are added to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

OfWeights = tuple[tuple[str, Callable[[Any], Any]], ...]
"""Settings of a class that decide which weights or optimizer moments exist, each with a function that maps its value to
what these depend on."""


class Need(NamedTuple):
    """Values of other settings that some settings need to have an effect. A class lists its needs as `needs`."""

    of: tuple[str, ...]
    """Settings of the class."""
    others: tuple[str, ...]
    """Dotted names of the other settings. The need is met if one of them meets it or does not exist in the
    experiment."""
    values: tuple[Any, ...] | Callable[[Any], bool] = bool
    """The values that meet the need, or a function that tests a value."""
    words: str = ""
    """A description of these values, if they are not listed."""

    def met(self, given: Mapping[str, Any]) -> bool:
        """Whether these settings, by their dotted names, meet the need."""
        meets = self.values if callable(self.values) else self.values.__contains__
        return any(name not in given or meets(given[name]) for name in self.others)

    def __str__(self) -> str:
        """The flags that meet the need."""
        listed = () if callable(self.values) else self.values
        words = self.words or " or ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:])))
        return " or ".join(f"--{name.replace('_', '-')} {words}".strip() for name in self.others)


def parts(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All nested dataclasses, each with the prefix of its settings' dotted names."""
    yield prefix, settings
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from parts(value, f"{prefix}{field.name}.")


def declared(settings: Any, name: str) -> list[Any]:
    """The entries of a class variable, such as `needs`, in the class of some settings and all its bases."""
    return [each for base in type(settings).__mro__ for each in vars(base).get(name, ())]
