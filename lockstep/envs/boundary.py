"""The boundary between this library and the code of Python environments, which may change settings of the process.

Each side keeps its own. What an environment sets in torch and NumPy, and the folder it changes to, hold while its code
runs, and only then: neither this library's numbers nor the places of a run's files depend on them. Environments may
also compute gradients: they run with gradients enabled and outside inference mode.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_Access = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How settings are read, and how they are set."""
_TINY = 5e-324


def _folder() -> str:
    """The current folder; "" if it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _torchs() -> tuple[Any, ...]:
    """What torch computes by: in 0.2 µs, since this is asked at every step."""
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _TINY * 1.0 == 0,  # numbers as small are flushed to 0, by Python, too
    )


def _set_torchs(wanted: tuple[Any, ...]) -> None:
    dtype, threads, precision, strict, warns, flushes = wanted
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.set_flush_denormal(flushes)
    if _torchs() != wanted:  # changing these imports torch's compiler, which takes a second
        torch.use_deterministic_algorithms(strict, warn_only=warns)


def _device() -> torch.device:
    return torch.empty(0).device  # torch.get_default_device takes seven times as long


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # which slows torch down, as None does not


_OTHERS: tuple[_Access, ...] = (
    (np.geterr, lambda wanted: np.seterr(**wanted)),
    (_device, _set_device),
    (_folder, lambda wanted: os.chdir(wanted) if wanted else None),
)
"""Settings that it takes 4 µs to look at: looked at when environments are made, first reset and restored, in their
first steps, and always once they have changed one of them."""


class Abroad:
    """While this is entered, environments' settings of the process hold; otherwise this library's.

    There is one for each process, ABROAD, as there is one of every setting.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._mode = torch.inference_mode(False)
        self._ours: tuple[Any, ...] = ()
        self._theirs: tuple[Any, ...] | None = None
        """Torch's, once they differ from ours."""
        self._our_others: list[Any] = []
        self._their_others: dict[int, Any] = {}
        """By place in _OTHERS, those that differ from ours."""
        self._begins = True

    def beginning(self, begins: bool) -> Abroad:
        """Say what environments are about to do, to `with` it: whether they are made, reset for the first time,
        restored or closed, or take one of their first steps."""
        if not self._depth:
            self._begins = begins or bool(self._their_others)
        return self

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._ours = _torchs()
        if self._theirs is not None:
            _set_torchs(self._theirs)
        if self._begins:
            self._our_others = [read() for read, _ in _OTHERS]
            for place, wanted in self._their_others.items():
                _OTHERS[place][1](wanted)
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._mode.__exit__(*error)
        found = _torchs()
        if found != self._ours:
            self._theirs = found
            _set_torchs(self._ours)
        elif self._theirs is not None:
            self._theirs = None
        if self._begins:
            self._their_others = {}
            for place, (read, write) in enumerate(_OTHERS):
                if (other := read()) != self._our_others[place]:
                    self._their_others[place] = other
                    write(self._our_others[place])


ABROAD = Abroad()
