"""How hyperparameters change over a run: the forms of algorithm.anneal."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError, parse_count
from lockstep.config.user_code import load_object

Annealing = Callable[[int], float]
"""The value of a hyperparameter after this many samples."""

FORMS = (
    "constant, linear or cosine, the last two also with an end, as in cosine:1e-5, and all of them after a warm-up, as "
    "in warmup:10k,linear; points, as in 0:3e-4,1M:1e-4; or a function, file.py:NAME"
)
_SHAPES = ("constant", "linear", "cosine")
_FIXED = ("discount",)
"""Hyperparameters that cannot change, since replay and normalizers read them from the settings."""
_SHARES = ("epsilon", "beta", "recency")
"""Hyperparameters that are at most 1."""


@dataclass(frozen=True)
class Shape:
    """A rise from 0 during the warm-up, then a change from start to end over the rest of the run."""

    form: str
    start: float
    end: float
    warmup: int
    total: int
    per_iteration: int

    def __call__(self, samples: int) -> float:
        # The current iteration's samples have been collected when its learning begins.
        risen = min(1.0, (samples + self.per_iteration) / self.warmup) if self.warmup else 1.0
        progress = min(1.0, max(0, samples - self.warmup) / max(1, self.total - self.warmup))
        # In fp32, since the last bits of a cosine in double precision differ between processors.
        wave = float(np.float32(1 - math.cos(math.pi * progress))) / 2
        share = {"constant": 0.0, "linear": progress, "cosine": wave}[self.form]
        return risen * (self.start + share * (self.end - self.start))


@dataclass(frozen=True)
class Points:
    """Linear interpolation between values at given numbers of samples, constant before the first and after the last. Of
    two values at one number, the second holds from there on."""

    samples: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, samples: int) -> float:
        after = bisect_right(self.samples, samples)
        if after in (0, len(self.samples)):
            return self.values[max(0, after - 1)]
        (x0, x1), (y0, y1) = self.samples[after - 1 : after + 1], self.values[after - 1 : after + 1]
        return y0 + (y1 - y0) * (samples - x0) / (x1 - x0)


@dataclass(frozen=True)
class Computed:
    """A user's function of `progress`, the share of the run from 0 to 1, of `samples`, or of both."""

    name: str
    reference: str
    total: int
    function: Callable[..., Any]
    taken: list[str]
    """The parameters that the function takes."""

    def __call__(self, samples: int) -> float:
        given = {"progress": min(1.0, samples / self.total), "samples": samples}
        found = self.function(**{name: given[name] for name in self.taken})
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not _allows(self.name, found):
            raise SettingsError(
                f"{self.reference}, which algorithm.anneal names for {self.name}, returned {found!r} after {samples:,} "
                f"samples. It must return {_allowed(self.name)}."
            )
        return float(found)


def annealings(
    anneal: Mapping[str, str], first: Mapping[str, float], total: int, per_iteration: int
) -> dict[str, Annealing]:
    """How a run anneals each hyperparameter that algorithm.anneal names.

    Args:
        anneal: forms by the hyperparameters' names.
        first: the hyperparameters at the beginning.
        total: samples of the whole run.
        per_iteration: samples of an iteration.

    Raises:
        SettingsError: there is no such hyperparameter, or a form is wrong.
    """
    known = [name for name in first if name not in _FIXED]
    for name in anneal:
        if name not in known:
            raise SettingsError(
                f"algorithm.anneal cannot change {name!r}. Hyperparameters that it can change here are "
                f"{', '.join(known)}."
            )
    return {name: _annealing(name, form, first[name], total, per_iteration) for name, form in anneal.items()}


def _annealing(name: str, form: str, start: float, total: int, per_iteration: int) -> Annealing:
    wrong = SettingsError(f"algorithm.anneal cannot read {name}={form}. It takes {FORMS}.")
    if is_function(form):
        function = load_object(form)
        computed = Computed(name, form, total, function, _parameters(name, form, function))
        computed(0)  # raises an error now if the function returns no valid number
        return computed
    try:
        parts = [part.split(":") for part in form.split(",")]
        if form[:1].isdigit():
            points = Points(
                tuple(parse_count(samples) for samples, _ in parts),
                tuple(_number(name, form, value) for _, value in parts),
            )
            if list(points.samples) != sorted(points.samples):
                raise SettingsError(f"algorithm.anneal: the numbers of samples in {name}={form} must not fall.")
            return points
        warmup = 0
        if parts[0][0] == "warmup":
            _, samples = parts.pop(0)
            warmup = parse_count(samples)
        ((shape, *ends),) = parts or [["constant"]]
        if shape not in _SHAPES or len(ends) > (shape != "constant"):
            raise wrong
        end = _number(name, form, ends[0]) if ends else 0.0
    except ValueError as error:
        raise error if isinstance(error, SettingsError) else wrong from error
    if warmup >= total:
        raise SettingsError(
            f"algorithm.anneal: the warm-up of {name}={form} takes {warmup:,} samples, but the run has only {total:,}. "
            "Shorten it, or raise --total-steps."
        )
    return Shape(shape, start, end, warmup, total, per_iteration)


def is_function(form: str) -> bool:
    """Whether a form names a function, as in file.py:NAME."""
    words = ("warmup", *_SHAPES)
    return ":" in form and "," not in form and not form[0].isdigit() and form.split(":")[0] not in words


def _number(name: str, form: str, text: str) -> float:
    value = float(text)
    if not _allows(name, value):
        raise SettingsError(f"algorithm.anneal: {name} must be {_allowed(name)}, but {name}={form} has {text}.")
    return value


def _allows(name: str, value: float) -> bool:
    """Whether a hyperparameter may have a value."""
    return 0 <= value <= 1 if name in _SHARES else 0 <= value < math.inf


def _allowed(name: str) -> str:
    return "a number from 0 to 1" if name in _SHARES else "a finite number of at least 0"


def _parameters(name: str, reference: str, function: Any) -> list[str]:
    """The parameters of a user's function: progress, samples, or both."""
    taken = list(inspect.signature(function).parameters) if callable(function) else []
    if not taken or not {*taken} <= {"progress", "samples"}:
        raise SettingsError(
            f"{reference}, which algorithm.anneal names for {name}, must be a function with the parameter progress "
            "(the share of the run, from 0 to 1), samples, or both."
        )
    return taken
