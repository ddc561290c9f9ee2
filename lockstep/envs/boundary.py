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
"""How a setting is read, and how it is set."""
_TINY = 5e-324


def _folder() -> str:
    """The current folder; "" if it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _device() -> torch.device:
    return torch.empty(0).device  # torch.get_default_device takes seven times as long


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # which slows torch down, as None does not


_QUICK: tuple[_Access, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_determinism, _set_determinism),
    (lambda: _TINY * 1.0 == 0, torch.set_flush_denormal),
)
"""Looked at whenever environments have run: 0.2 µs."""
_ALL: tuple[_Access, ...] = (*_QUICK, (np.geterr, lambda value: np.seterr(**value)), (_device, _set_device))
"""Looked at whenever they have begun something, as they do at every episode: 3 µs."""


class Abroad:
    """While this is entered, environments' settings of the process hold; otherwise this library's.

    There is one for each process, ABROAD, as there is one of every setting.
    """

    def __init__(self) -> None:
        self._theirs: dict[_Access, Any] = {}
        """Where they differ from ours."""
        self._folder = self._here = ""
        """Theirs, if it is another one, and ours."""
        self._depth = 0
        self._mode = torch.inference_mode(False)
        self._ours: list[Any] = []
        self._begins = True

    def beginning(self, begins: bool) -> Abroad:
        """Say what environments are about to do, to `with` it: whether they make, reset or restore anything."""
        if not self._depth:
            self._begins = begins
        return self

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._here = _folder() if self._begins or self._folder else ""
        self._ours = [read() for read, _ in self._looked_at]
        for (_, write), value in self._theirs.items():
            write(value)
        if self._folder:
            os.chdir(self._folder)
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._mode.__exit__(*error)
        for access, ours in zip(self._looked_at, self._ours, strict=True):
            read, write = access
            if (found := read()) != ours:
                self._theirs[access] = found
                write(ours)
            elif self._theirs:
                self._theirs.pop(access, None)
        if self._here:
            folder = _folder()
            self._folder = folder if folder != self._here else ""
            if self._folder:
                os.chdir(self._here)

    @property
    def _looked_at(self) -> tuple[_Access, ...]:
        return _ALL if self._begins or self._theirs else _QUICK


ABROAD = Abroad()
