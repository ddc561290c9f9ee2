"""Closing environments that users wrote, which may fail, or wait for ever for a program of theirs to end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from lockstep.runtime.output import tell

_PATIENCE = 20.0
"""Seconds that an environment may take to close."""
_HASTE = 1.0
"""Seconds that the environments of a process get once one of them has taken all of those."""
_DEAF = 10.0
"""Seconds more, after which the process is ended: native code cannot be interrupted."""

_patience: float | None = None


class _StandsStill(BaseException):
    """Raised within close(). No Exception, which close() might catch by itself."""


def close_all(envs: Iterable[Any]) -> None:
    """Close environments, each for what it is worth: what was played counts all the same, so that an error is told and
    not raised, and a close() that does not return is given up."""
    for env in envs:
        try:
            if threading.current_thread() is threading.main_thread():
                with _interrupted(_limit(), env):
                    env.close()
            else:
                _aside(_limit(), env)
        except _StandsStill as error:
            stack = "".join(traceback.format_tb(error.__traceback__)[1:-1])
            _tell_standstill(env, f"It stood here:\n{stack}")
        except Exception as error:
            tell(f"An environment could not be closed: {error!r}.", sys.stderr)


def _limit() -> float:
    return _PATIENCE if _patience is None else _patience


def _tell_standstill(env: Any, more: str) -> None:
    """Say it once a process: the others of its kind are likely to do the same."""
    global _patience
    told, _patience = _patience is not None, _HASTE
    if not told:
        tell(
            f"The close() of {_name(env)} did not return within {_PATIENCE:g} seconds and was given up. A program that "
            f"it waits for may run on. {more}".rstrip(),
            sys.stderr,
        )


def _name(env: Any) -> str:
    """The outermost of its classes that is the user's."""
    kinds = [type(env)]
    while (env := getattr(env, "env", None)) is not None:
        kinds.append(type(env))
    libraries = ("gymnasium.", "pettingzoo.", "lockstep.")
    kind = next((kind for kind in kinds if not kind.__module__.startswith(libraries)), kinds[-1])
    return f"the environment {kind.__qualname__}"


@contextlib.contextmanager
def _interrupted(seconds: float, env: Any) -> Iterator[None]:
    """Raise _StandsStill in what the main thread does for longer."""

    def interrupt(number: int, frame: object) -> None:
        raise _StandsStill

    def end() -> None:
        tell(
            f"The close() of {_name(env)} cannot be interrupted, as in native code, so this process ends. What the run "
            "has recorded is kept: lockstep resume RUN says its digest.",
            sys.stderr,
        )
        os._exit(1)

    last = threading.Timer(seconds + _DEAF, end)
    last.daemon = True
    last.start()
    handler = signal.signal(signal.SIGALRM, interrupt)
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        last.cancel()


def _aside(seconds: float, env: Any) -> None:
    """Close it in a thread of its own, which can be left: signals interrupt no other thread than the main one."""
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
        _tell_standstill(env, "")
    for error in failed:
        raise error
