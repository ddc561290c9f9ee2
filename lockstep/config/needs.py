"""What classes of settings declare about their settings, in addition to what their bases declare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

OfWeights = tuple[tuple[str, Callable[[Any], Any]], ...]
"""Settings of a class, each with a function of its value."""


class Need(NamedTuple):
    """What some settings need to have an effect: certain values of others. A class lists its own as `needs`."""

    of: tuple[str, ...]
    """Settings of the class."""
    others: tuple[str, ...]
    """Dotted names of the other settings. One that meets the need is enough, or one that the experiment does not
    have."""
    values: tuple[Any, ...] | Callable[[Any], bool] = bool
    """Which of their values meet the need, or a test."""
    words: str = ""
    """The values in words, if they are not listed."""

    def met(self, given: Mapping[str, Any]) -> bool:
        """Whether settings by their dotted names meet it."""
        meets = self.values if callable(self.values) else self.values.__contains__
        return any(name not in given or meets(given[name]) for name in self.others)

    def __str__(self) -> str:
        """The flags that meet it."""
        listed = () if callable(self.values) else self.values
        words = self.words or " or ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:])))
        return " or ".join(f"--{name.replace('_', '-')} {words}".strip() for name in self.others)


def parts(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All nested dataclasses, each with what the dotted names of its settings begin with."""
    yield prefix, settings
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from parts(value, f"{prefix}{field.name}.")


def declared(settings: Any, name: str) -> list[Any]:
    """What the class of some settings and all its bases list under a class variable, such as `needs`."""
    return [each for base in type(settings).__mro__ for each in vars(base).get(name, ())]
