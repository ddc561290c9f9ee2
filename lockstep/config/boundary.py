"""Isolates lockstep from process-wide settings that users' environments change.

An environment's settings of torch and NumPy and its working directory apply only while its code runs. So neither
results nor the paths of a run's files depend on them. Environments run outside inference mode with gradients enabled,
so that they can compute gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_Access = tuple[Callable[[], Any], Callable[[Any], Any]]
"""A function that reads settings, and a function that writes them."""
_TINY = 5e-324


def _folder() -> str:
    """The working directory, or "" if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _torchs() -> tuple[Any, ...]:
    """Torch's settings. Reading them takes 0.3 µs, so it happens at every step."""
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _TINY * 1.0 == 0,  # whether denormals are flushed to 0; this also affects Python's floats
    )


def _set_torchs(wanted: tuple[Any, ...]) -> None:
    dtype, threads, precision, strict, warns, flushes = wanted
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.set_flush_denormal(flushes)
    if _torchs() != wanted:  # setting these imports torch's compiler, which takes a second
        torch.use_deterministic_algorithms(strict, warn_only=warns)


def _device() -> torch.device:
    return torch.empty(0).device  # torch.get_default_device takes seven times as long


def _set_device(device: torch.device) -> None:
    # Any default device slows torch down, even the CPU; None does not.
    torch.set_default_device(None if device.type == "cpu" else device)


_SLOW: tuple[_Access, ...] = (
    (np.geterr, lambda wanted: np.seterr(**wanted)),
    (_device, _set_device),
    (_folder, lambda wanted: os.chdir(wanted) if wanted else None),
)
"""Settings that take 4 µs to read, so they are not read at every step."""


class EnvironmentSettings:
    """The process-wide settings that environments have made. They apply inside the `with` block; lockstep's settings
    apply outside it.

    A process has one such object, ENVIRONMENT_SETTINGS, because each setting has one value per process.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._mode = torch.inference_mode(False)
        self._ours: tuple[Any, ...] = ()
        self._theirs: tuple[Any, ...] | None = None
        """Torch's settings as environments made them; None if they equal ours."""
        self._our_slow: list[Any] = []
        self._their_slow: dict[int, Any] = {}
        """The settings of _SLOW that differ from ours, by index."""
        self._thorough = True

    def applied(self, *, thorough: bool = False) -> EnvironmentSettings:
        """Return this object, for `with`.

        Args:
            thorough: also compare the settings of _SLOW. Callers set this when environments are made, reset, restored
                or closed, and in their first steps. Once an environment has changed one, they are always compared.
        """
        if not self._depth:
            self._thorough = thorough or bool(self._their_slow)
        return self

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._ours = _torchs()
        if self._theirs is not None:
            _set_torchs(self._theirs)
        if self._thorough:
            self._our_slow = [read() for read, _ in _SLOW]
            for place, wanted in self._their_slow.items():
                _SLOW[place][1](wanted)
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._mode.__exit__(*error)
        found = _torchs()
        if found == self._ours:
            self._theirs = None
        else:
            self._theirs = found
            _set_torchs(self._ours)
        if self._thorough:
            self._their_slow = {}
            for place, (read, write) in enumerate(_SLOW):
                if (theirs := read()) != self._our_slow[place]:
                    self._their_slow[place] = theirs
                    write(self._our_slow[place])


ENVIRONMENT_SETTINGS = EnvironmentSettings()
