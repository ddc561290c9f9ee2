"""Reads the runs of a sweep from a user's Python file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_value
from lockstep.experiment import Experiment
from lockstep.sweep.population import Population
from lockstep.sweep.search import Search
from lockstep.sweep.spec import Run


def from_file(reference: str) -> list[Run] | Search | Population | Experiment:
    """The object named by `file.py:name`: runs, a search, a population, or one experiment that flags can vary.

    Raises:
        SettingsError: the object is something else.
    """
    value = load_value(reference)
    if isinstance(value, (Experiment, Search, Population)):
        return value
    listed = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    runs = [Run(each) if isinstance(each, Experiment) else each for each in listed]
    wrong = next((each for each in runs if not isinstance(each, Run)), None)
    if wrong is not None or not runs:
        what = f"a {type(wrong).__name__}" if runs else "nothing"
        raise SettingsError(
            f"{reference} gives {what}. A sweep takes a list of lockstep.sweep.Run (or of Experiment), a Search "
            "or a Population of lockstep.sweep, or a function without arguments that returns one; lockstep.sweep.grid "
            "makes lists."
        )
    return cast("list[Run]", runs)
