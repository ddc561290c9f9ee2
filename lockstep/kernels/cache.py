"""A cache of compiled functions on disk, which all installations of lockstep on a machine share. The name of an entry
contains a digest of what it was made from (sources.py)."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from llvmlite import binding
from numba import njit, types
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.compiler_lock import global_compiler_lock

from lockstep.kernels.sources import Sources
from lockstep.system.machine import user_cache
from lockstep.system.output import print_line

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "no_cfunc_wrapper": True}
_PATIENCE = 3.0
"""Seconds of compiling after which the user is told."""


class _Notice(event.Listener):
    """Tells the user once that compiling takes long. Functions that come from the cache are not compiled."""

    def __init__(self) -> None:
        self.silent = False
        self._seconds, self._begin, self._depth = 0.0, 0.0, 0

    def on_start(self, event: event.Event) -> None:
        now = time.perf_counter()
        if self._depth == 0:
            self._begin = now
        self._depth += 1
        if not self.silent and self._seconds + now - self._begin > _PATIENCE:
            self.silent = True
            later = "Later runs load them from a cache."
            if folder() is None:
                later = "Later runs repeat it, unless you set NUMBA_CACHE_DIR to a folder that can be written."
            print_line(f"Compiling kernels, which takes up to a minute. {later}", sys.stderr)

    def on_end(self, event: event.Event) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._seconds += time.perf_counter() - self._begin


notice = _Notice()
"""All processes of a run except one set its attribute `silent`."""
event.register("numba:compile", notice)


def part(function: Any) -> Any:
    """Compile a function that compiled ones call. The code of these contains it, so it is not cached by itself."""
    return njit(**_OPTIONS)(function)


def compiled(function: Any, **names: Any) -> Any:
    """Compile a function with Numba, or load what an earlier process compiled of it. All that it calls must be defined
    before.

    Division by zero gives an infinity, as IEEE 754 has it: a check for it would keep loops from being vectorized.

    Args:
        names: globals of the function to replace, such as functions that it calls.
    """
    names = {**function.__globals__, **names}
    sources = Sources(function, names)
    named = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    named.__module__, named.__qualname__ = function.__module__, f"{function.__qualname__}_{sources.digest()}"
    made: Any = njit(nogil=True, **_OPTIONS)(named)
    if folder() is not None:
        made._cache = _Cache(named)
    return _compiled_once(_without_literals(made), [each.load for each in sources.apart])


def apart(*arguments: types.Type) -> Callable[[Any], Any]:
    """Compile a function as `compiled` does, once, for these types of arguments, and let compiled functions jump to it.
    Otherwise each of them contains its code, and everything that calls them compiles it again.

    The jump goes to a name that each process gives to the function's address, since caches outlive addresses.
    """

    def decorate(function: Any) -> Any:
        made = compiled(function)
        template_of = made.get_call_template

        @functools.cache
        def load() -> None:
            made.compile(arguments)
            result = made.overloads[arguments]
            descriptor = copy.copy(result.fndesc)
            descriptor.mangled_name = f"lockstep.{made.py_func.__module__}.{made.py_func.__qualname__}"
            code = result.library.get_pointer_to_function(result.fndesc.mangled_name)
            binding.add_symbol(descriptor.mangled_name, code)
            made.targetctx.remove_user_function(result.entry_point)
            # Without the library that holds the code.
            made.targetctx.insert_user_function(result.entry_point, descriptor)

        def get_call_template(args: Any, kws: Any) -> Any:
            load()
            return template_of(arguments, {})

        made.load, made.get_call_template = load, get_call_template
        return made

    return decorate


def _without_literals(function: Any) -> Any:
    """Let a call with constants, such as a stride of 1, use the code for any number. Numba would compile the function
    for each set of constants, and with it everything that calls it."""
    template_of = function.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        return template_of(tuple(map(types.unliteral, args)), {name: types.unliteral(x) for name, x in kws.items()})

    function.get_call_template = get_call_template
    return function


def _compiled_once(function: Any, before: list[Callable[[], None]]) -> Any:
    """Let one process compile a function while the others wait, and then load it. If they all compiled it, each would
    take longer than the one does.

    Args:
        before: load what the function jumps to.
    """
    compile_it, lock = function.compile, f"{function.py_func.__qualname__}.lock"

    def compile_once(signature: Any) -> Any:
        # Numba's lock comes first: a thread that has it, and compiles what this function calls, would wait forever.
        with global_compiler_lock:
            for load in before:
                load()
            with _locked(lock):
                return compile_it(signature)

    function.compile = compile_once
    return function


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """A context that one process at a time can enter, if the file system has locks. A lock ends with its process."""
    with contextlib.ExitStack() as stack:
        if (root := folder()) is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(stack.enter_context((root / name).open("a")), fcntl.LOCK_EX)
        yield


@functools.cache
def folder() -> Path | None:
    """Where compiled functions are kept: in NUMBA_CACHE_DIR if it is set, else in the user's cache, else beside the
    sources. None if that cannot be written."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    for root in [Path(given)] if given else [user_cache() / "kernels", Path(__file__).parent / "__pycache__"]:
        with contextlib.suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=root).close()
            return root
    return None


class _Locator:
    """Tells Numba where a function's code is. Numba itself would look for it by the path of its source."""

    def __init__(self, source: str) -> None:
        self._py_file = source

    @classmethod
    def from_function(cls, function: FunctionType, source: str) -> _Locator:
        return cls(source)

    def get_cache_path(self) -> str:
        return str(folder())

    def ensure_cache_path(self) -> None:
        Path(self.get_cache_path()).mkdir(parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        return ""  # the function's name contains the digest of its sources

    def get_disambiguator(self) -> str:
        return "lockstep"


class _Storage(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):
    """Finds the code of a function for the types of its arguments."""

    _impl_class = _Storage

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a file that a crash of the machine left empty or cut, or that another user owns
            try:
                for path in Path(self.cache_path).glob(f"{self._impl.filename_base}.*"):
                    path.unlink(missing_ok=True)
            except OSError:
                self.disable()
            return None  # so that it is compiled

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk: the next process compiles it again
            super().save_overload(sig, data)

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (", ".join(map(_described, sig)), *super()._index_key(sig, codegen)[1:])


def _described(given: Any) -> str:
    """A type as text, which every process can read, also one whose named tuples have changed. Numba's text of a named
    tuple lacks the names of its fields."""
    if not isinstance(given, types.BaseTuple):
        return str(given)
    parts: tuple[Any, ...] = getattr(given, "types", ())
    cls = getattr(given, "instance_class", tuple)
    return f"{cls.__module__}.{cls.__qualname__} {getattr(cls, '_fields', '')}({', '.join(map(_described, parts))})"
