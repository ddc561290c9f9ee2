"""Checks of what Python environments return: ends are bools, rewards are numbers, and instances are distinct."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError

BOOLS = (bool, np.bool_)
"""Types of `terminated` and `truncated` that need no further check."""
NUMBERS = (float, int, np.floating, np.integer)
"""Types of rewards that need no further check."""
_registered: dict[int, Callable[[], Any]] = {}
"""The open environments of this process, without their wrappers, by id()."""


def form_of(answer: Any) -> str:
    """A description of a method's result for errors, such as "a tuple of 3" or "a dict"."""
    return f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"a {type(answer).__name__}"


def flag(name: str, value: Any) -> bool:
    """Convert a value that is not a bool to one. It may be 0 or 1, or an array that holds one of these.

    Raises:
        SettingsError: the value is something else, such as None, NaN or a text.
    """
    found = single(value)
    if found is None or found not in (0, 1):
        raise SettingsError(
            f"The environment returned {name}={value!r}, which is neither True nor False. Fix the environment, or "
            "wrap it."
        )
    return bool(found)


def number(reward: Any) -> float:
    """Convert a reward that is not a plain number, such as an array that holds one number.

    Raises:
        SettingsError: the value is something else, such as a text or a complex number.
    """
    found = single(reward)
    if found is None:
        raise SettingsError(
            f"The environment returned the reward {reward!r}, which is not a number. Fix the environment, or wrap it."
        )
    return float(found)


def single(value: Any) -> Any:
    """The only number or bool in a value; None if it holds something else."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # a ragged list, or a tensor that requires gradients
        return None
    return array.item() if array.size == 1 and array.dtype.kind in "biuf" else None


def register(envs: Sequence[Any], env_id: str) -> None:
    """Record that these environments are open.

    Raises:
        SettingsError: two of them are the same object, or one is already open.
    """
    for i, env in enumerate(envs):
        base = _base(env)
        known = _registered.get(id(base))
        if known is not None and known() is base:
            unregister(envs[:i])
            raise SettingsError(
                f"env.id={env_id} returned the same {type(base).__name__} object twice, but each environment must be a "
                "separate object, or a step of one would be a step of all. Make a new environment at each call, as in "
                f"def make(): return {type(base).__name__}(), and keep it in no variable, cache or default argument."
            )
        try:
            _registered[id(base)] = weakref.ref(base)
        except TypeError:  # a class with __slots__
            _registered[id(base)] = lambda base=base: base


def unregister(envs: Sequence[Any]) -> None:
    """Record that these environments are closed."""
    for env in envs:
        _registered.pop(id(_base(env)), None)


def _base(env: Any) -> Any:
    """The environment below all wrappers."""
    base = getattr(env, "unwrapped", None)
    return env if base is None else base
