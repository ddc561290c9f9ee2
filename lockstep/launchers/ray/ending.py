"""The reasons why a run on a Ray cluster restarts or ends early, and messages to the user."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from lockstep.config.layout import Layout
from lockstep.launchers.ray.actors import call
from lockstep.launchers.ray.requests import Process
from lockstep.launchers.watching import no_progress
from lockstep.system.output import print_line
from lockstep.system.supervision import WorkerError


class ProcessLost(Exception):
    """A process of the run is lost. The text says which one, and why."""


def require_restarts_left(losses: int, layout: Layout, text: str) -> None:
    """Raise WorkerError if the layout allows fewer losses. text: describes the last loss."""
    if losses > layout.restarts:
        longer = dataclasses.replace(layout, restarts=Layout.restarts)
        raise WorkerError(
            f"{text}. The layout allows only {layout.restarts} losses. To survive more, use --layout "
            f"{longer},restarts=N; lockstep resume continues from the newest checkpoint."
        )


def say(text: str) -> None:
    """Print a line for the user."""
    print_line(text, sys.stderr)


def stalled(ray: Any, processes: Sequence[Process], patience: float, layout: Layout) -> WorkerError:
    """The error of a run that has made no progress for `patience` seconds. Prints the stack of each process."""
    unstarted = [process.name for process in processes if process.steps < 0]
    if unstarted:
        return WorkerError(
            f"Ray has not started {', '.join(unstarted)} within {patience:g} seconds: the cluster may lack resources "
            f"that they need, or may have lost nodes. ray status shows its state."
        )
    stacks = [(process.name, call(process.handle, "stack")) for process in processes]
    for name, ref in stacks:
        with contextlib.suppress(ray.exceptions.RayError):
            say(f"\n{name}, stack:\n{ray.get(ref, timeout=2.0)}")
    return WorkerError(no_progress(patience, {process.name: process.steps for process in processes}, layout))
