"""What Python environments answer, examined: ends are true or false, rewards are numbers, instances are distinct."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.settings import SettingsError

BOOLS = (bool, np.bool_)
"""What ends are without a closer look."""
NUMBERS = (float, int, np.floating, np.integer)
"""What rewards are without a closer look."""
_open: dict[int, weakref.ref[Any]] = {}
"""The environments of this process that are being stepped, by id, below all wrappers."""


def flag(name: str, value: Any) -> bool:
    """Whether an episode has ended, from a value that is no bool itself: 0 and 1 are taken, also in an array of one.

    Raises:
        SettingsError: it is something else, such as None, NaN or a text.
    """
    found = _single(value)
    if found is None or found not in (0, 1):
        raise SettingsError(
            f"The environment returned {name}={value!r}, which is neither True nor False. Mend the environment, or "
            "wrap it."
        )
    return bool(found)


def number(reward: Any) -> float:
    """A reward from a value that is no plain number, such as an array of one.

    Raises:
        SettingsError: it is something else, such as a text or a complex number.
    """
    found = _single(reward)
    if found is None:
        raise SettingsError(
            f"The environment returned the reward {reward!r}, which is no number. Mend the environment, or wrap it."
        )
    return float(found)


def _single(value: Any) -> Any:
    """The real number, or bool, that a value is; None if it is none."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # a ragged list, or a tensor that requires gradients
        return None
    return array.item() if array.size == 1 and array.dtype.kind in "biuf" else None


def claim(envs: Sequence[Any], env_id: str) -> None:
    """Note that these environments are stepped from now on.

    Raises:
        SettingsError: two are the same object, or one is stepped already.
    """
    for i, env in enumerate(envs):
        base = _base(env)
        known = _open.get(id(base))
        if known is not None and known() is base:
            release(envs[:i])
            raise SettingsError(
                f"env.id={env_id} returned the same {type(base).__name__} object twice, but each environment must be a "
                "separate object: a step of one would be a step of all. Make a new environment at each call, as in "
                f"def make(): return {type(base).__name__}(), and keep none in a variable, a cache or a default "
                "argument."
            )
        _open[id(base)] = weakref.ref(base)


def release(envs: Sequence[Any]) -> None:
    """Note that these environments are stepped no more."""
    for env in envs:
        _open.pop(id(_base(env)), None)


def _base(env: Any) -> Any:
    """The environment below all wrappers."""
    base = getattr(env, "unwrapped", None)
    return env if base is None else base
