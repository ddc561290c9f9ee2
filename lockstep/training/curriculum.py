"""A curriculum that chooses environments' options by metrics. Learner 0 calls the user's function every iteration."""

from __future__ import annotations

import inspect
import math
import numbers
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs.curriculum import pack, unpack
from lockstep.experiment import Experiment

_OF_THIS_MACHINE = ("seconds", "speed/", "wait/", "time/", "lag/")
"""Prefixes of the names of metrics that depend on the layout."""


class Curriculum:
    """Chooses the options of training environments.

    Raises:
        SettingsError: the setting does not name a function of metrics and options.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._config, self._name = experiment.env, experiment.curriculum
        self._decide: Any = load_object(self._name)
        taken = list(inspect.signature(self._decide).parameters) if callable(self._decide) else []
        if len(taken) != 2:
            raise SettingsError(
                f"curriculum={self._name} must be a function of two arguments, metrics and options. It returns options."
            )

    def next(self, line: dict[str, float], packed: Tensor) -> Tensor:
        """The next options.

        Args:
            line: the iteration's line in metrics.jsonl.
            packed: the current options, float64 [K].

        Raises:
            SettingsError: the function did not return valid options.
        """
        metrics = {name: x for name, x in line.items() if not name.startswith(_OF_THIS_MACHINE)}
        options = unpack(self._config, packed)
        found = self._decide(metrics, dict(options))
        if not isinstance(found, dict):
            raise SettingsError(f"{self._name} returned {found!r}. It must return a dict of options.")
        for name, value in found.items():
            if name not in options:
                raise SettingsError(
                    f"{self._name} returned the option {name!r}, but --env.curriculum begins only with "
                    f"{', '.join(options)}. Add it there, or leave it out."
                )
            if not isinstance(value, (np.bool_, numbers.Real)) or not math.isfinite(value):
                raise SettingsError(f"{self._name} returned {name}={value!r}. Options must be finite numbers.")
            kind = type(options[name])
            if kind(value) != value:
                raise SettingsError(
                    f"{self._name} returned {name}={value!r}, but --env.curriculum begins with {options[name]!r}, and "
                    f"options keep their type, here {kind.__name__}. For fractions, begin with {float(options[name])}."
                )
        return pack({**options, **found})
