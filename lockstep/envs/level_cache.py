"""A cache of levels that take long to make. It stores environments after reset(seed=level) in files that processes and
runs share, as Sample Factory does with DMLab's maps (Petrenko et al. 2020, arXiv:2006.11751, appendix A.2).

It only affects the speed, so it is not a setting of experiments: LOCKSTEP_LEVEL_CACHE names its folder.
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
from gymnasium.envs.registration import EnvSpec

from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs.construct import PREFIX, is_callable
from lockstep.envs.multiagent.opponents import RandomPlayer
from lockstep.envs.settings import EnvConfig

FOLDER, SIZE = "LOCKSTEP_LEVEL_CACHE", "LOCKSTEP_LEVEL_CACHE_GB"
"""Environment variables: the folder of the cache, and its maximum size in gigabytes."""
_GIGABYTES = 4.0
"""The default of SIZE."""
_FORM = 1
"""The version of the files' format."""
_TRIED = 16
"""The number of steps in which a restored environment is compared with one that was reset."""
_DIGEST = 32
"""Bytes of the digest at the start of each file."""


def folder() -> Path | None:
    """The folder of the cache; None if there is none."""
    given = os.environ.get(FOLDER)
    return Path(given) if given else None


def limit() -> int:
    """The most bytes of all levels together.

    Raises:
        SettingsError: SIZE is not a positive number.
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
    """The levels in a cache, least recently used first: time of the last use, size in bytes, and file."""
    found = []
    for path in root.glob("*/*.level"):
        with contextlib.suppress(OSError):  # another process removed it
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    return sorted(found)


class LevelCache:
    """Resets the environments of one shard.

    Args:
        root: the folder of the cache.
        config: the settings of the environments.
        env: one of the environments.

    Raises:
        SettingsError: the folder cannot be made.
    """

    def __init__(self, root: Path, config: EnvConfig, env: Any) -> None:
        self._root, self._id, self._limit = root, config.id, limit()
        self._key = repr((_FORM, config.id, config.protocol, sorted(config.options.items()), _origin(config.id, env)))
        self._written, self._tried = self._limit, False  # so that the first new level triggers a cleanup
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"{FOLDER}={root} cannot be made: {error}. Name another folder.") from error

    @staticmethod
    def of(config: EnvConfig, env: Any) -> LevelCache | None:
        """The cache that environment variables of the process name; None if they name none."""
        root = folder()
        return None if root is None else LevelCache(root, config, env)

    def reset(self, env: Any, level: int, options: dict[str, Any]) -> tuple[Any, Any]:
        """Do what env.reset(seed=level) does. Returns the environment to play, which may be another object, and the
        result of reset. The info is empty if the level was in the cache.

        Args:
            env: the environment to reset.
            level: the seed.
            options: options that a curriculum gave to env, in addition to those of the settings.

        Raises:
            SettingsError: the environment can neither be pickled nor save and restore its state.
        """
        name = hashlib.sha256(f"{self._key} {sorted(options.items())} {level}".encode()).hexdigest()
        path = self._root / name[:2] / f"{name[2:]}.level"
        with contextlib.suppress(Exception):  # a damaged file is replaced
            data = path.read_bytes()
            if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]:
                restored = _restore(env, data[_DIGEST:])
                with contextlib.suppress(OSError):  # a folder that cannot be written
                    os.utime(path)
                return restored
        answer = env.reset(seed=level)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            return env, answer  # the caller reports the error
        data = self._snapshot(env, answer[0])
        if not self._tried:
            self._try(env, answer[0], data)
            self._tried, (env, answer) = True, _restore(env, data)
        self._write(path, hashlib.sha256(data).digest() + data)
        return env, answer

    def _snapshot(self, env: Any, obs: Any) -> bytes:
        """The observation and the environment, or its state."""
        try:
            return pickle.dumps((obs, env.get_state() if _gives_state(env) else env), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise SettingsError(
                f"{FOLDER} stores environments after reset, but env.id={self._id} cannot be pickled "
                f"({type(error).__name__}: {error}), and its class has no get_state() and set_state(state). Write "
                f"these, or unset {FOLDER}."
            ) from error

    def _try(self, env: Any, obs: Any, data: bytes) -> None:
        """Raise SettingsError if the environment's steps differ after it has been restored."""
        played = list(_play(env, obs))
        try:
            restored, (obs, _) = _restore(env, data)
            again = list(_play(restored, obs))
        except Exception as error:
            raise SettingsError(
                f"{FOLDER}: a restored environment of env.id={self._id} fails ({type(error).__name__}: {error}). Write "
                f"get_state() and set_state(state), or unset {FOLDER}."
            ) from error
        if not _same(played, again):
            raise SettingsError(
                f"{FOLDER}: the steps of an environment of env.id={self._id} differ after it was restored, since "
                f"pickling loses some of its state. Write get_state() and set_state(state), or unset {FOLDER}."
            )

    def _write(self, path: Path, data: bytes) -> None:
        """Store a level. If the cache is too large, remove the least recently used levels. If the disk is full or not
        writable, nothing is stored."""
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
            with contextlib.suppress(OSError):  # another process removed it, or nobody can
                old.unlink()
            excess -= size


def _gives_state(env: Any) -> bool:
    return all(callable(getattr(env, name, None)) for name in ("get_state", "set_state"))


def _restore(env: Any, data: bytes) -> tuple[Any, Any]:
    """Return the environment after its reset, which is another object unless it takes its state, and the result of the
    reset."""
    obs, state = pickle.loads(data)
    if _gives_state(env):
        env.set_state(state)
        return env, (obs, {})
    if type(state) is not type(env):
        raise TypeError(f"{type(state).__name__} is not {type(env).__name__}")
    return state, (obs, {})


def _play(env: Any, obs: Any) -> Iterator[Any]:
    """The results of an environment's steps with random actions that are allowed, until its episode ends."""
    choose, draw = RandomPlayer(env.action_space), np.random.default_rng(0)
    for _ in range(_TRIED):
        obs, reward, terminated, truncated, _ = env.step(choose(obs, env.action_space, draw))
        yield copy.deepcopy((obs, reward, terminated, truncated))
        if terminated or truncated:
            return


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b))
    return np.array_equal(a, b, equal_nan=isinstance(a, np.ndarray) and a.dtype.kind == "f")


def _origin(env_id: str, env: Any) -> tuple[str, ...]:
    """Everything that an environment's code depends on: versions of Python and of libraries, how it was registered, and
    digests of source files. For a file outside installed libraries, the digest covers all Python files of its folder,
    since it may import them."""
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    found = {f"python {platform.python_version()}", f"numpy {np.__version__}", platform.machine()}
    if isinstance(spec := getattr(layers[-1], "spec", None), EnvSpec):
        found.add(repr((spec.kwargs, spec.max_episode_steps)))
    if is_callable(env_id):
        with contextlib.suppress(TypeError, OSError):  # an object without a source file
            make = inspect.unwrap(load_object(env_id.removeprefix(PREFIX)))
            found.add(_digest(Path(inspect.getsourcefile(make) or "")))
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
