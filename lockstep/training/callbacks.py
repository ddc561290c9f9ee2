"""Users' functions that follow a run in the process that records it. They get copies, so they change no bit."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.agent import Agent
from lockstep.config.boundary import EnvironmentSettings
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.evaluation.policy import Policy
from lockstep.evaluation.scores import Evaluation

_THEIRS = EnvironmentSettings()
"""The process-wide settings, such as torch's default dtype, that callbacks make. They apply while callbacks run."""


@dataclass(frozen=True)
class Progress:
    """A run after an iteration, as callbacks see it."""

    run: Path
    """The run's folder."""
    iteration: int
    """Iterations done."""
    iterations: int
    """Those of the whole run."""
    metrics: dict[str, float]
    """A copy of the iteration's line in metrics.jsonl: samples, score/mean, loss/policy, …"""
    policy: Callable[[], Policy]
    """Makes a copy of the present policy on the CPU, for lockstep.Actor, or for its parameters
    (`progress.policy().model.named_parameters()`). Each call copies all parameters."""
    stop: Callable[[], None]
    """Ends the run after this iteration, or if on_checkpoint calls it after the next one, as at its ordinary end: with
    a checkpoint, from which `lockstep resume` goes on."""


class Callback:
    """Follows a run. Override some of its methods, and name it (`--callback file.py:Name`) or pass an object of it to
    lockstep.train. An exception that one of them raises ends the run."""

    def on_iteration(self, progress: Progress) -> None:
        """Called after every iteration."""

    def on_evaluation(self, progress: Progress, evaluation: Evaluation) -> None:
        """Called after every evaluation (--eval-every), which follows on_iteration."""

    def on_checkpoint(self, progress: Progress, path: Path) -> None:
        """Called after every checkpoint, the last one included; path: its folder."""


CallbackLike = Callback | Callable[[Progress], Any]
"""A callback, or its on_iteration."""


class _Function(Callback):
    """A callback that is only an on_iteration."""

    def __init__(self, function: Callable[[Progress], Any]) -> None:
        self._function = function

    def on_iteration(self, progress: Progress) -> None:
        self._function(progress)


def callback_of(given: CallbackLike | str) -> Callback:
    """The callback that a user has given; see check."""
    found = load_object(given) if isinstance(given, str) else given
    found = found() if isinstance(found, type) else found
    return found if isinstance(found, Callback) else _Function(found)


def check(given: CallbackLike | str, layout: Layout) -> None:
    """Check the callback that a user has given: a Callback, its class, a function, or a reference to one of these.

    Raises:
        SettingsError: it is something else, or the layout starts processes and cannot send it to them.
    """
    named = isinstance(given, str)
    name = f"--callback {given}" if named else f"on_iteration={given!r}"
    found = load_object(given) if isinstance(given, str) else given
    is_class = isinstance(found, type) and issubclass(found, Callback)
    if is_class and not _takes(found, 0):
        raise SettingsError(f"{name}: the class must need no arguments. Give each of them a default value.")
    if not (is_class or isinstance(found, Callback)) and (isinstance(found, type) or not _takes(found, 1)):
        raise SettingsError(
            f"{name} is {found!r}, but must be a function with one argument, as in def follow(progress): ..., or a "
            "subclass of lockstep.Callback."
        )
    if named or not layout.launcher.starts_processes:
        return
    try:
        pickle.dumps(given)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SettingsError(
            f"{name} cannot be sent to the processes of the layout {layout} ({error}). Define it at the top level of "
            'a file, or use the layout "inline".'
        ) from error


def _takes(function: Any, arguments: int) -> bool:
    """Whether something can be called with this many arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


@contextlib.contextmanager
def _their_code() -> Iterator[None]:
    """Apply the settings of callbacks, and show what they print at once: a worker process ends without doing so.

    Raises:
        RuntimeError: a callback raised SettingsError, which would pass for a mistake in the run's own settings and
            be told without a traceback.
    """
    try:
        with _THEIRS.applied(thorough=True):
            yield
    except SettingsError as error:
        raise RuntimeError(f"The callback raised {type(error).__name__}: {error}") from error
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is no reader, or no stream
        sys.stdout.flush()


class CallbackRunner:
    """Calls the callback of a run."""

    def __init__(self, callback: Callback, run: Path, agent: Agent, frames_per_step: int) -> None:
        self._callback, self._run, self._agent = callback, run, agent
        self._frames_per_step = frames_per_step
        self._done, self._metrics = 0, dict[str, float]()
        self.stopped = False
        """Whether the callback has asked for the end."""

    def iteration(self, done: int, metrics: dict[str, float]) -> None:
        """Tell it of an iteration; done: how many there are with it."""
        self._done, self._metrics = done, metrics
        with _their_code():
            self._callback.on_iteration(self._progress())

    def evaluation(self, result: Evaluation) -> None:
        with _their_code():
            self._callback.on_evaluation(self._progress(), copy.deepcopy(result))

    def checkpoint(self, path: Path) -> None:
        with _their_code():
            self._callback.on_checkpoint(self._progress(), path)

    def _progress(self) -> Progress:
        whole = self._agent.experiment.iterations
        return Progress(self._run, self._done, whole, dict(self._metrics), self._policy, self._stop)

    def _stop(self) -> None:
        self.stopped = True

    def _policy(self) -> Policy:
        agent = self._agent
        model = copy.deepcopy(agent.model).requires_grad_(False).cpu()
        agent.normalizers.apply(model)
        samples = int(self._metrics["samples"])
        return Policy(model, copy.deepcopy(agent.experiment), self._done, samples, samples * self._frames_per_step)
