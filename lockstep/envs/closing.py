"""Closes users' environments, whose close() may fail or wait forever for a program that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lockstep.config.boundary import ENVIRONMENT_SETTINGS
from lockstep.system.output import print_line

_PATIENCE = 20.0
"""Seconds that an environment may take to close."""
_LATER_PATIENCE = 1.0
"""Seconds for the other environments of a process after one has taken too long."""
_GRACE = 10.0
"""Further seconds after which the process is ended, because native code cannot be interrupted."""

_patience: float | None = None


class _CloseTimeout(BaseException):
    """Raised within a close() that takes too long. It is not an Exception, because close() might catch that."""


def close_all(envs: Iterable[Any]) -> None:
    """Close all environments that have a close(). The run's results are complete by then, so errors are printed and not
    raised, and a close() that does not return is abandoned."""
    for env in envs:
        if not callable(getattr(env, "close", None)):
            continue
        try:
            if threading.current_thread() is threading.main_thread():
                with _interrupted(_limit(), env):
                    env.close()
            else:
                _close_in_thread(_limit(), env)
        except _CloseTimeout as error:
            stack = "".join(traceback.format_tb(error.__traceback__)[1:-1])
            _tell_timeout(env, f"It hung here:\n{stack}")
        except Exception as error:
            print_line(f"An environment could not be closed: {error!r}.", sys.stderr)


@contextlib.contextmanager
def closed_on_error(envs: Sequence[Any]) -> Iterator[None]:
    """If an error is raised, close the environments that are in `envs` by then."""
    try:
        yield
    except BaseException:
        with ENVIRONMENT_SETTINGS.applied(thorough=True):
            close_all(envs)
        raise


def _limit() -> float:
    return _PATIENCE if _patience is None else _patience


def _tell_timeout(env: Any, more: str) -> None:
    """Print a message, but only once per process, because its other environments will probably time out, too."""
    global _patience
    told, _patience = _patience is not None, _LATER_PATIENCE
    if not told:
        print_line(
            f"The close() of {_name(env)} did not return within {_PATIENCE:g} seconds and was abandoned. A program "
            f"for which it waits may keep running. {more}".rstrip(),
            sys.stderr,
        )


def _name(env: Any) -> str:
    """The name of the outermost class that belongs to the user."""
    kinds = [type(env)]
    while (env := getattr(env, "env", None)) is not None:
        kinds.append(type(env))
    libraries = ("gymnasium.", "pettingzoo.", "lockstep.")
    kind = next((kind for kind in kinds if not kind.__module__.startswith(libraries)), kinds[-1])
    return f"the environment {kind.__qualname__}"


@contextlib.contextmanager
def _interrupted(seconds: float, env: Any) -> Iterator[None]:
    """Raise _CloseTimeout in the main thread after this time."""

    def interrupt(number: int, frame: object) -> None:
        raise _CloseTimeout

    def end() -> None:
        print_line(
            f"The close() of {_name(env)} cannot be interrupted (in native code, perhaps), so this process ends. What "
            "the run has recorded is kept: lockstep resume RUN prints its digest.",
            sys.stderr,
        )
        os._exit(1)

    final = threading.Timer(seconds + _GRACE, end)
    final.daemon = True
    final.start()
    handler = signal.signal(signal.SIGALRM, interrupt)
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        final.cancel()  # before the alarm is disabled, which may still go off here
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)


def _close_in_thread(seconds: float, env: Any) -> None:
    """Close an environment in a new thread that can be abandoned, because signals interrupt only the main thread."""
    failed: list[Exception] = []

    def close() -> None:
        try:
            env.close()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _tell_timeout(env, "")
    for error in failed:
        raise error
