"""The outcomes of actors' calls: a result, an error that a process raised, or the loss of a process."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from lockstep.config.settings import SettingsError
from lockstep.system.supervision import WorkerError

_COLOR = re.compile(r"\x1b\[\d*m")
"""A terminal color in the texts of Ray's exceptions."""
_NAME = re.compile(r"repr=(.+?)\)")
"""The name of a process in an error's text. The last one raised the error, and earlier ones failed because of it."""


def outcome(ray: Any, ref: Any) -> tuple[Any, Exception | None]:
    """The result of a call that has ended, or Ray's error."""
    try:
        return ray.get(ref), None
    except ray.exceptions.RayError as error:
        return None, error


def raised(ray: Any, error: Exception | None) -> Exception | None:
    """The error that another process raised; None if the process was lost instead."""
    while isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause  # type: ignore[attr-defined]
        if not isinstance(cause, ray.exceptions.RayError):
            return error
        error = cause
    return None


def fail(error: Any) -> NoReturn:
    """End the run with an error that a process raised."""
    if isinstance(error.cause, SettingsError):
        raise error.cause.bare()
    text = _COLOR.sub("", str(error))
    raise WorkerError(f"{(_NAME.findall(text) or ['A process'])[-1]} failed:\n{text}")


def short(error: Exception) -> str:
    """The most informative line of Ray's report of a loss."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "died" in line.lower() or "dead" in line.lower() or "lost" in line.lower()]
    return ((said or lines or [type(error).__name__])[-1])[:300].rstrip(".")
