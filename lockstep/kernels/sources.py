"""What a compiled function is made from, as a digest: its code, what it calls and reads, and the compiler."""

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
_LIBRARIES = ("llvmlite", "numba", "numpy")
"""Those whose versions _COMPILER contains."""
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype)
"""Types whose text tells everything about a value."""


class Sources:
    """What a function is made from. All that it calls must be defined before.

    Args:
        names: the function's globals.
    """

    def __init__(self, function: FunctionType, names: Mapping[str, Any]) -> None:
        self.apart: list[Any] = []
        """The functions that it jumps to, directly or not: those that were compiled apart."""
        self._lines = {_COMPILER, _file_of(function)}
        self._seen: set[FunctionType] = set()
        self._collect(function, names)

    def digest(self) -> str:
        """It does not depend on where the sources are, so all copies of a module have the same digest."""
        return hashlib.sha256("\n".join(sorted(self._lines)).encode()).hexdigest()[:32]

    def _collect(self, function: FunctionType, names: Mapping[str, Any]) -> None:
        """Add a function's code, and everything that it refers to by name: the files of functions, and constants."""
        code, of = function.__code__, f"{function.__module__}.{function.__qualname__}"
        self._lines.add(f"{of} {_text(code)}")
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        names = {**names, **dict(zip(code.co_freevars, cells, strict=True))}
        used = _names(code)
        for name in (*used, *code.co_freevars):
            if name in names:
                self._add(f"{of} {name}", names[name], used, ())

    def _add(self, name: str, value: Any, used: tuple[str, ...], within: tuple[ModuleType, ...]) -> None:
        """Add a value that a function refers to.

        Args:
            used: all names that the function refers to. Of a module, it may take what has one of them.
            within: the modules that the value was found in.
        """
        if isinstance(value, ModuleType):
            known = value in within or value.__name__.partition(".")[0] in _LIBRARIES
            for attribute in () if known else used:
                if hasattr(value, attribute):
                    self._add(f"{name}.{attribute}", getattr(value, attribute), used, (*within, value))
            return
        called = getattr(value, "py_func", getattr(value, "_defn", None))  # of a Dispatcher, or an intrinsic
        if isinstance(value, FunctionType) and value.__module__.startswith("lockstep."):
            called = value  # it writes LLVM's code
        if isinstance(called, FunctionType):
            self._lines.add(f"{name} {called.__qualname__} {_file_of(called)}")
            if called not in self._seen:
                self._seen.add(called)
                if hasattr(value, "load"):
                    self.apart.append(value)
                self._collect(called, called.__globals__)
        elif isinstance(value, type):  # perhaps a named tuple, which it makes
            self._lines.add(f"{name} {value.__module__}.{value.__qualname__} {getattr(value, '_fields', '')}")
        elif isinstance(value, tuple):
            self._add(name, type(value), used, within)
            for place, each in enumerate(value):
                self._add(f"{name} {place}", each, used, within)
        elif isinstance(value, np.ndarray):
            self._lines.add(f"{name} {value.dtype}{value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}")
        elif isinstance(value, _CONSTANTS):
            self._lines.add(f"{name} {value!r}")


def _names(code: CodeType) -> tuple[str, ...]:
    """The names that code refers to, and the functions in it: those that write LLVM's code call each other."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return (*code.co_names, *(name for names in inner for name in names))


@functools.cache
def _text(code: CodeType) -> str:
    """Code as text. The file may have changed since the code was loaded."""
    constants = [_text(each) if isinstance(each, CodeType) else _plain(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _plain(constant: Any) -> str:
    """A constant of code as text. The order of a set is random."""
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _file_of(function: FunctionType) -> str:
    """The module, since loading a compiled function imports those of all that it calls, and the file's digest. The
    module of a user's file is named after its path."""
    return f"{function.__module__} {_digest(inspect.getfile(function))}"


@functools.cache
def _digest(file: str) -> str:
    """Of a source file, which many functions refer to."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
