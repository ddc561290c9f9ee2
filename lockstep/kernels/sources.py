"""What a compiled function is made from, as a digest: its text, what it calls and reads, and the compiler."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import config

_SETTINGS = ("OPT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE", "USING_SVML")
_COMPILER = repr(
    [numba.__version__, llvmlite.__version__, np.__version__, *((name, getattr(config, name)) for name in _SETTINGS)]
)
"""What decides the code of a function on a given CPU, apart from its sources."""


class Sources:
    """What a function is made from. All that it calls must be defined before.

    Args:
        names: the function's globals.
    """

    def __init__(self, function: FunctionType, names: Mapping[str, Any]) -> None:
        self.apart: list[Any] = []
        """The functions that it jumps to, directly or not: those that were compiled apart."""
        self._lines = {_COMPILER, inspect.getsource(function), _file_of(function)}
        self._seen: set[FunctionType] = set()
        self._collect(function, names)

    def digest(self) -> str:
        """It does not depend on where the sources are, so all copies of a module have the same digest."""
        return hashlib.sha256("\n".join(sorted(self._lines)).encode()).hexdigest()[:32]

    def _collect(self, function: FunctionType, names: Mapping[str, Any]) -> None:
        """Add everything that a function refers to by name: the files of functions, and constants."""
        code, of = function.__code__, f"{function.__module__}.{function.__qualname__}"
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        names = {**names, **dict(zip(code.co_freevars, cells, strict=True))}
        used = _names(code)
        for name in (*used, *code.co_freevars):
            value = names.get(name)
            of_module = isinstance(value, ModuleType)
            for each in [getattr(value, attribute, None) for attribute in used] if of_module else [value]:
                called = getattr(each, "py_func", getattr(each, "_defn", None))  # of a Dispatcher, or an intrinsic
                if isinstance(each, FunctionType) and each.__module__.startswith("lockstep."):
                    called = each  # it writes LLVM's code
                if isinstance(called, FunctionType):
                    self._lines.add(f"{of} {name} {called.__qualname__} {_file_of(called)}")
                    if called not in self._seen:
                        self._seen.add(called)
                        if hasattr(each, "load"):
                            self.apart.append(each)
                        self._collect(called, called.__globals__)
                elif isinstance(each, type):  # perhaps a named tuple, which it makes
                    fields = getattr(each, "_fields", "")
                    self._lines.add(f"{of} {name} {each.__module__}.{each.__qualname__} {fields}")
                elif isinstance(each, np.ndarray):
                    self._lines.add(
                        f"{of} {name} {each.dtype}{each.shape} {hashlib.sha256(each.tobytes()).hexdigest()}"
                    )
                elif isinstance(each, (bool, int, float, tuple, np.generic)):
                    self._lines.add(f"{of} {name} {each!r}")


def _names(code: CodeType) -> tuple[str, ...]:
    """The names that code refers to, and the functions in it: those that write LLVM's code call each other."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return (*code.co_names, *(name for names in inner for name in names))


def _file_of(function: FunctionType) -> str:
    """The module, since loading a compiled function imports those of all that it calls, and the file's digest. The
    module of a user's file is named after its path."""
    return f"{function.__module__} {_digest(inspect.getfile(function))}"


@functools.cache
def _digest(file: str) -> str:
    """Of a source file, which many functions refer to."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
