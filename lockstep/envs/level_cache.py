"""A cache of levels that take long to make: environments as they are after reset(seed=level), in files that processes
and runs share, as Sample Factory keeps the maps of DMLab (Petrenko et al. 2020, arXiv:2006.11751, appendix A.2).

It changes only the speed, so no experiment mentions it: LOCKSTEP_LEVEL_CACHE names its folder.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import inspect
import os
import pickle
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.envs.settings import EnvConfig

FOLDER, SIZE = "LOCKSTEP_LEVEL_CACHE", "LOCKSTEP_LEVEL_CACHE_GB"
"""Environment variables: where levels are kept, and how many gigabytes of them."""
_GIGABYTES = 4.0
"""The default of SIZE."""
_FORM = 1
"""Changes with the form of the files."""
_TRIED = 16
"""Steps that compare a restored environment with one that was reset."""
_DIGEST = 32
"""Bytes of the digest at the start of each file."""


def folder() -> Path | None:
    """The folder of the cache; None if there is none."""
    given = os.environ.get(FOLDER)
    return Path(given) if given else None


def limit() -> int:
    """The most bytes of all levels together.

    Raises:
        SettingsError: SIZE is no positive number.
    """
    text = os.environ.get(SIZE, str(_GIGABYTES))
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise SettingsError(f"{SIZE}={text} must be a positive number of gigabytes, for example 4.")
    return int(1e9 * found)


def kept(root: Path) -> list[tuple[float, int, Path]]:
    """The levels in a cache: when each was last used, its size in bytes, and its file; the oldest first."""
    found = []
    for path in root.glob("*/*.level"):
        with contextlib.suppress(OSError):  # another process removed it
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    return sorted(found)


class LevelCache:
    """Resets the environments of one shard.

    Args:
        config: how they are made.
        env: one of them.

    Raises:
        SettingsError: the folder cannot be made.
    """

    def __init__(self, root: Path, config: EnvConfig, env: Any) -> None:
        self._root, self._id, self._limit = root, config.id, limit()
        self._key = repr((_FORM, config.id, config.protocol, sorted(config.options.items()), _origin(env)))
        self._written, self._tried = self._limit, False  # so that the first new level looks for old ones
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"{FOLDER}={root} cannot be made: {error}. Name another folder.") from error

    @staticmethod
    def of(config: EnvConfig, env: Any) -> LevelCache | None:
        """The cache that the process's environment variables ask for; None if they ask for none."""
        root = folder()
        return None if root is None else LevelCache(root, config, env)

    def reset(self, env: Any, level: int, options: dict[str, Any]) -> Any:
        """What env.reset(seed=level) would return and do. The answer's info is empty if the level was known.

        Args:
            options: that a curriculum gave to env, in addition to those of the settings.

        Raises:
            SettingsError: the environment can neither be pickled nor give and take its state.
        """
        name = hashlib.sha256(f"{self._key} {sorted(options.items())} {level}".encode()).hexdigest()
        path = self._root / name[:2] / f"{name[2:]}.level"
        with contextlib.suppress(Exception):  # a damaged file is made anew
            data = path.read_bytes()
            if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]:
                answer = _restore(env, data[_DIGEST:])
                os.utime(path)
                return answer
        answer = env.reset(seed=level)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            return answer  # whoever called complains about it
        data = self._snapshot(env, answer[0])
        if not self._tried:
            self._try(env, data)
            self._tried, answer = True, _restore(env, data)
        self._write(path, hashlib.sha256(data).digest() + data)
        return answer

    def _snapshot(self, env: Any, obs: Any) -> bytes:
        """The observation and the environment, or its state."""
        try:
            return pickle.dumps((obs, env.get_state() if _gives_state(env) else env), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise SettingsError(
                f"{FOLDER} keeps environments as they are after reset, but env.id={self._id} cannot be pickled "
                f"({type(error).__name__}: {error}), and its class has no get_state() and set_state(state). Write "
                f"these, or unset {FOLDER}."
            ) from error

    def _try(self, env: Any, data: bytes) -> None:
        """Raise SettingsError if the environment's steps differ after it was restored."""
        actions = copy.deepcopy(env.action_space)
        actions.seed(0)
        drawn = [actions.sample() for _ in range(_TRIED)]
        played = list(_play(env, drawn))
        try:
            _restore(env, data)
            again = list(_play(env, drawn))
        except Exception as error:
            raise SettingsError(
                f"{FOLDER}: an environment of env.id={self._id} that was restored fails ({type(error).__name__}: "
                f"{error}). Write get_state() and set_state(state), or unset {FOLDER}."
            ) from error
        if not _same(played, again):
            raise SettingsError(
                f"{FOLDER}: the steps of an environment of env.id={self._id} differ after it was restored, since "
                f"pickling loses some of its state. Write get_state() and set_state(state), or unset {FOLDER}."
            )

    def _write(self, path: Path, data: bytes) -> None:
        """Keep a level, and remove those that were not used for longest if there are too many. A full disk, or one that
        cannot be written, keeps nothing."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            partial.write_bytes(data)
            os.replace(partial, path)
        self._written += len(data)
        if self._written < self._limit / 20:
            return
        self._written, levels = 0, kept(self._root)
        excess = sum(size for _, size, _ in levels) - self._limit
        for _, size, old in levels:
            if excess <= 0:
                break
            old.unlink(missing_ok=True)
            excess -= size


def _gives_state(env: Any) -> bool:
    return all(callable(getattr(env, name, None)) for name in ("get_state", "set_state"))


def _restore(env: Any, data: bytes) -> Any:
    """Make an environment what it was, and return the answer of its reset."""
    obs, state = pickle.loads(data)
    if _gives_state(env):
        env.set_state(state)
    else:
        if type(state) is not type(env):
            raise TypeError(f"{type(state).__name__} is not {type(env).__name__}")
        vars(env).clear()
        vars(env).update(vars(state))
    return obs, {}


def _play(env: Any, actions: list[Any]) -> Iterator[Any]:
    """What an environment returns, until its episode ends."""
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        yield copy.deepcopy((obs, reward, terminated, truncated))
        if terminated or truncated:
            return


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b))
    return np.array_equal(a, b, equal_nan=isinstance(a, np.ndarray) and a.dtype.kind == "f")


def _origin(env: Any) -> tuple[str, ...]:
    """What made an environment: versions of Python and of libraries, and digests of source files. A file outside of
    installed libraries stands for all Python files of its folder, since it may import them."""
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    found = {f"python {platform.python_version()}", f"numpy {np.__version__}", platform.machine()}
    for cls in {cls for layer in layers for cls in type(layer).__mro__ if cls is not object}:
        top = cls.__module__.partition(".")[0]
        found |= {f"{name} {importlib.metadata.version(name)}" for name in _distributions().get(top, ())}
        with contextlib.suppress(TypeError, OSError):  # a class without a source file
            found.add(_digest(Path(inspect.getsourcefile(cls) or "")))
    return tuple(sorted(found))


@functools.cache
def _distributions() -> Any:
    return importlib.metadata.packages_distributions()


@functools.cache
def _digest(path: Path) -> str:
    installed = any(path.is_relative_to(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
    files = [path] if installed else sorted({path, *path.parent.glob("*.py")})
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()
