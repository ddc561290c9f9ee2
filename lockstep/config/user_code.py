"""References to users' objects, `package.module:name` and `path/to/file.py:name`: converts them to objects and back."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from lockstep.config.extras import EXTRAS, install_command
from lockstep.config.settings import SettingsError

_FOLDERS = "LOCKSTEP_USER_FILES"
"""Environment variable with folders to search for users' files after the current one. Worker processes inherit it."""
_NAMED = "__lockstep_file__"
"""Attribute of a user's module: its file's path, as the user wrote it."""


def look_for_files_in(folder: str) -> None:
    """Also search this folder for users' files that the current folder lacks, in this process and its workers. Folders
    that were added later are searched first."""
    earlier = [each for each in os.environ.get(_FOLDERS, "").split(os.pathsep) if each != folder]
    os.environ[_FOLDERS] = os.pathsep.join(filter(None, [folder, *earlier]))


def import_module(name: str) -> ModuleType:
    """Import a module, also from the current folder or a folder that was given to look_for_files_in."""
    for folder in (os.getcwd(), *filter(None, os.environ.get(_FOLDERS, "").split(os.pathsep))):
        _import_from(folder)
    with _environment_settings():
        return importlib.import_module(name)


def _environment_settings() -> AbstractContextManager[None]:
    """Make the process-wide settings that a user's module changes apply to environments alone."""
    from lockstep.config.boundary import ENVIRONMENT_SETTINGS  # imports torch, which the command line's help avoids

    return ENVIRONMENT_SETTINGS.applied(thorough=True)


def _import_from(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _found(named: str | Path, after: str = "") -> Path:
    """The path of a user's file, or the path that it would have. after: a folder to search last."""
    folders = [Path(), *map(Path, filter(None, [*os.environ.get(_FOLDERS, "").split(os.pathsep), after]))]
    return next((folder / named for folder in folders if (folder / named).is_file()), Path(named)).resolve()


_SEVERAL = "mixed/"
"""The prefix of ids of several tasks: mixed/a.py:Env@b.py:Adapter*2+c.py:Env."""
_NAMES_FILE = re.compile(r"(?:pettingzoo/|[\w-]+=)?(.+\.py):[\w.]+")
"""NAME=file.py:play is an opponent of several policies."""


def files_named(settings: Any) -> list[str]:
    """The users' files that settings name, sorted.

    Args:
        settings: the output of to_json.
    """
    if isinstance(settings, dict):
        settings = list(settings.values())
    if isinstance(settings, (list, tuple)):
        return sorted({file for each in settings for file in files_named(each)})
    if not isinstance(settings, str):
        return []
    if settings.startswith(_SEVERAL):
        tasks = (task.strip() for task in settings.removeprefix(_SEVERAL).split("+"))
        parts = [part for task in tasks for part in re.sub(r"\*\d+$", "", task).rsplit("@", 1)]
    else:
        parts = [settings]
    return sorted({named[1] for part in parts if (named := _NAMES_FILE.fullmatch(part))})


def digests_of(settings: Any, after: str = "") -> dict[str, str]:
    """The first 16 characters of the SHA-256 of each user's file that settings name, by the file's name.

    Modules, and the imports of those files, have no digest.

    Args:
        settings: the output of to_json.
        after: a folder to search for the files last.
    """
    found = {named: _found(named, after) for named in files_named(settings)}
    return {
        named: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for named, path in found.items() if path.is_file()
    }


class _FreshLoader(SourceFileLoader):
    """Compiles a file each time. Python's loader caches the compiled code, and wrongly reuses it if the file has the
    same length and was changed in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def is_users(part: Any) -> bool:
    """Whether an object is of a user's class, and not of one of lockstep's."""
    return not type(part).__module__.startswith("lockstep.")


def load_file(path: str | Path) -> ModuleType:
    """Import a user's Python file under a name derived from its path, once per process. It may import files in its
    folder."""
    named, path = Path(path), _found(path)
    readable = re.sub(r"\W", "_", "_".join(path.with_suffix("").parts[1:]))
    name = f"lockstep_user_{readable}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # a/b.py is not a_b.py
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file() or path.suffix != ".py":
        raise SettingsError(f"There is no Python file {path}. Give the path of a .py file, as in my_file.py:name.")
    loader = _FreshLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    setattr(module, _NAMED, str(named))
    sys.modules[name] = module
    _import_from(str(path.parent))
    try:
        with _environment_settings():
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_object(reference: str) -> Any:
    """Return what `package.module:name` or `path/to/file.py:name` refers to.

    Raises:
        SettingsError: the file, module or name does not exist.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise SettingsError(
            f"Cannot load {reference!r}: it names no function or class. Write package.module:name or "
            "path/to/file.py:name."
        )
    if source.startswith((".", "/", "~")) and not source.endswith(".py"):
        raise SettingsError(f"Cannot load {reference!r}: a file's path must end in .py, as in {source}.py:{name}.")
    try:
        value: Any = load_file(source) if source.endswith(".py") else import_module(source)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        where = _raised_at(error)
        if isinstance(error, AttributeError) and where is None:
            known = f" It has {', '.join(names)}." if (names := _defined(source)) else ""
            raise SettingsError(f"Cannot load {reference!r}: {source} has no {name}.{known}") from error
        remedy = "Write package.module:name or path/to/file.py:name." if where is None else f"It was raised by {where}."
        absent = (getattr(error, "name", None) or "").partition(".")[0]
        if extra := next((extra for extra, found in EXTRAS.items() if found.module == absent), None):
            remedy = f"Install it with: {install_command(extra)}."
        if "no known parent package" in str(error):
            remedy += " A file given by its path is not in a package: import other files without the dot."
        raise SettingsError(f"Cannot load {reference!r}: {error}. {remedy}") from error
    return value


def _defined(source: str) -> list[str]:
    """Functions and classes of an imported module or file."""
    module = load_file(source) if source.endswith(".py") else import_module(source)
    return [
        name
        for name, x in vars(module).items()
        if (inspect.isfunction(x) or inspect.isclass(x)) and x.__module__ == module.__name__ and name[0] != "_"
    ]


def load_value(reference: str) -> Any:
    """The object that `package.module:name` or `path/to/file.py:name` refers to; for a function, its result.

    Raises:
        SettingsError: the object does not exist, or the function needs arguments.
    """
    value = load_object(reference)
    if not callable(value):
        return value
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise SettingsError(
            f"{reference} cannot be called without arguments: {error}. Give each of them a default value."
        ) from error
    except ValueError:  # an object without a signature
        pass
    return value()


def _raised_at(error: Exception) -> str | None:
    """The line of the user's code that raised an error; None if importing raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return f"{own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else None


def reference_to(cls: type | Callable[..., Any]) -> str:
    """The inverse of load_object for a class or a function: `module:name`, or `file.py:name` for one in a user's file.

    A file has the path by which it was loaded. A script has its path relative to the current folder if it is inside
    this folder, so that a run's identity does not depend on where its files are.
    """
    module = sys.modules[cls.__module__]
    if hasattr(module, _NAMED):
        return f"{getattr(module, _NAMED)}:{cls.__qualname__}"
    if cls.__module__ in ("__main__", "__mp_main__"):
        path, folder = Path(str(module.__file__)).resolve(), Path.cwd()
        return f"{path.relative_to(folder) if path.is_relative_to(folder) else path}:{cls.__qualname__}"
    return f"{cls.__module__}:{cls.__qualname__}"


def program_is_file() -> bool:
    """Whether other processes can import the program: it is no prompt or notebook, nor a script on standard input."""
    return Path(getattr(sys.modules["__main__"], "__file__", "")).is_file()  # "<stdin>" on standard input


def checked_reference_to(make: type | Callable[..., Any]) -> str:
    """reference_to for a class or function that a user passes in a program.

    Raises:
        SettingsError: other processes cannot import it.
    """
    name = getattr(make, "__qualname__", "")
    if not isinstance(getattr(make, "__self__", sys), (type, ModuleType)):  # an object's method has no name
        name = ""
    inside, typed = "<" in name, make.__module__ == "__main__" and not program_is_file()
    if name and not inside and not typed:
        return reference_to(make)
    typed_where = "at a prompt, in a notebook or on standard input"
    where = "inside a function" if inside else typed_where if typed else "without a name"
    raise SettingsError(
        f"{name or make!r} is made {where}, so other processes cannot import it. Define it at the outermost level of a "
        "file and import it from there; in a notebook, begin its cell with %%writefile my_env.py."
    )
