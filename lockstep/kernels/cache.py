"""A cache of compiled functions on disk. An entry is valid until one of the sources that it was made from changes."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import hashlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from llvmlite import binding
from numba import njit, types
from numba.core import event
from numba.core.compiler_lock import global_compiler_lock

from lockstep.system.output import print_line

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
            print_line("Compiling kernels, which takes up to a minute. Later runs load them from a cache.", sys.stderr)

    def on_end(self, event: event.Event) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._seconds += time.perf_counter() - self._begin


notice = _Notice()
"""All processes of a run except one set its attribute `silent`."""
event.register("numba:compile", notice)


def part(function: Any) -> Any:
    """Compile a function that compiled ones call. The code of these contains it, so it is not cached by itself."""
    return njit(error_model="numpy")(function)


def compiled(function: Any, **names: Any) -> Any:
    """Compile a function with Numba, or load what an earlier process compiled of it.

    Numba notices a change of the function's own file only. So the name in its cache contains a digest of every function
    that this one calls, directly or not. All of them must be defined before.

    Division by zero gives an infinity, as IEEE 754 has it: a check for it would keep loops from being vectorized.

    Args:
        names: globals of the function to replace, such as functions that it calls.
    """
    names = {**function.__globals__, **names}
    found: dict[str, str] = {}
    needed: list[Any] = []
    _collect(function, names, found, needed)
    text = "\n".join(f"{name} {found[name]}" for name in sorted(found))
    digest = hashlib.sha256(f"{inspect.getsource(function)}\n{text}".encode()).hexdigest()[:16]
    named = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    named.__module__, named.__qualname__ = function.__module__, f"{function.__qualname__}_{digest}"
    made = njit(error_model="numpy", nogil=True, cache=True)(named)
    return _compiled_once(_without_literals(made), [each.load for each in needed])


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
    compile_it, lock = function.compile, Path(function._cache.cache_path, f"{function.py_func.__qualname__}.lock")

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
def _locked(path: Path) -> Iterator[None]:
    """A context that one process at a time can enter, if the file system has locks. A lock ends with its process."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield


@functools.cache
def _digest(file: str) -> str:
    """Of a source file, which many functions refer to."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _names(code: CodeType) -> tuple[str, ...]:
    """The names that code refers to, and the functions in it: those that write LLVM's code call each other."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return (*code.co_names, *(name for names in inner for name in names))


def _collect(function: FunctionType, names: Mapping[str, Any], found: dict[str, str], needed: list[Any]) -> None:
    """Add the digest of everything that a function refers to by name: of the files of functions, and of constants.
    Those that were compiled apart are also needed."""
    code = function.__code__
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
                key = f"{inspect.getfile(called)}:{called.__qualname__}"
                if key not in found:
                    found[key] = _digest(inspect.getfile(called))
                    if hasattr(each, "load"):
                        needed.append(each)
                    _collect(called, called.__globals__, found, needed)
            elif isinstance(each, np.ndarray):
                found[f"{code.co_filename}:{name}"] = hashlib.sha256(each.tobytes()).hexdigest()
            elif isinstance(each, (bool, int, float, tuple, np.generic)):
                found[f"{code.co_filename}:{name}"] = repr(each)
