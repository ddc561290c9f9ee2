"""Calls users' functions in the process that records a run. They get copies, so they do not change its bits."""

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
from lockstep.config.user_code import load_object, program_is_file
from lockstep.evaluation.policy import Policy
from lockstep.evaluation.scores import Evaluation

_SETTINGS = EnvironmentSettings()
"""The process-wide settings, such as torch's default dtype, that callbacks change. They apply while callbacks run."""


@dataclass(frozen=True)
class Progress:
    """The state of a run after an iteration, for callbacks."""

    run: Path
    """The run's folder."""
    iteration: int
    """Iterations done."""
    iterations: int
    """Iterations of the whole run."""
    metrics: dict[str, float]
    """A copy of the iteration's line in metrics.jsonl: samples, score/mean, loss/policy, …"""
    policy: Callable[[], Policy]
    """Makes a copy of the current policy on the CPU, for lockstep.Actor or to read its parameters
    (`progress.policy().model.named_parameters()`). Each call copies all parameters."""
    stop: Callable[[], None]
    """Ends the run after this iteration, or after the next one if on_checkpoint calls it. The run writes a checkpoint,
    from which `lockstep resume` continues."""


class Callback:
    """Follows a run. Override some of its methods. Then name the class (`--callback file.py:Name`), or pass an object
    of it to lockstep.train. An exception in a method ends the run."""

    def on_iteration(self, progress: Progress) -> None:
        """Called after every iteration."""

    def on_evaluation(self, progress: Progress, evaluation: Evaluation) -> None:
        """Called after every evaluation (--eval-every). Evaluations come after on_iteration."""

    def on_checkpoint(self, progress: Progress, path: Path) -> None:
        """Called after every checkpoint, including the last one. path: the checkpoint's folder."""


CallbackLike = Callback | Callable[[Progress], Any]
"""A callback, or a function that is called like on_iteration."""


class _Function(Callback):
    """A callback with a function as its on_iteration."""

    def __init__(self, function: Callable[[Progress], Any]) -> None:
        self._function = function

    def on_iteration(self, progress: Progress) -> None:
        self._function(progress)


def callback_of(given: CallbackLike | str) -> Callback:
    """The Callback for a user's setting or argument, which `check` has checked."""
    found = load_object(given) if isinstance(given, str) else given
    found = found() if isinstance(found, type) else found
    return found if isinstance(found, Callback) else _Function(found)


def check(given: CallbackLike | str, layout: Layout) -> None:
    """Check a user's callback: a Callback, its class, a function, or a reference to one of these.

    Raises:
        SettingsError: it is something else, or it cannot be sent to the processes that the layout starts.
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
    if why := unsendable(given, to_this_machine=layout.launcher.one_machine):
        raise SettingsError(
            f"{name} cannot be sent to the processes of the layout {layout} ({why}). Define it at the top level of a "
            'file and import it, or use the layout "inline".'
        )


def unsendable(given: CallbackLike, *, to_this_machine: bool = True) -> str:
    """Why a callback cannot be sent to other processes; empty if it can. On this machine, they import the program."""
    try:
        if b"__main__" in pickle.dumps(given) and to_this_machine and not program_is_file():
            return "it is made at a prompt, in a notebook or on standard input"
    except Exception as error:  # of any type: multiprocessing's locks raise RuntimeError
        return str(error) or type(error).__name__
    return ""


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
    """Apply the settings of callbacks, and flush their output, since a worker process may end without flushing it.

    Raises:
        RuntimeError: a callback raised SettingsError. Without this, it would be reported without a traceback, like a
            mistake in the run's settings.
    """
    try:
        with _SETTINGS.applied(thorough=True):
            yield
    except SettingsError as error:
        raise RuntimeError(f"The callback raised {type(error).__name__}: {error}") from error
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is no reader, or no stream
        sys.stdout.flush()


class CallbackRunner:
    """Calls the callback of a run.

    Args:
        done: the iterations that are done when the run begins or continues.
        metrics: their last line of metrics, if the first call may be about an evaluation.
    """

    def __init__(
        self, callback: Callback, run: Path, agent: Agent, frames_per_step: int, done: int, metrics: dict[str, float]
    ) -> None:
        self._callback, self._run, self._agent = callback, run, agent
        self._frames_per_step = frames_per_step
        self._done, self._metrics = done, metrics
        self.stopped = False
        """Whether the callback has called Progress.stop."""

    def iteration(self, done: int, metrics: dict[str, float]) -> None:
        """Call on_iteration. done: how many iterations are done, including this one."""
        self._done, self._metrics = done, metrics
        with _their_code():
            self._callback.on_iteration(self._progress())

    def evaluation(self, result: Evaluation) -> None:
        """Call on_evaluation."""
        with _their_code():
            self._callback.on_evaluation(self._progress(), copy.deepcopy(result))

    def checkpoint(self, path: Path) -> None:
        """Call on_checkpoint."""
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
        frames, experiment = samples * self._frames_per_step, copy.deepcopy(agent.experiment)
        return Policy(model, experiment, self._done, samples, frames, kernels=agent.kernels)
