"""Finding runs: which folders contain one, and which may take a new one."""

from __future__ import annotations

import re
import shlex
from datetime import datetime
from pathlib import Path

from lockstep.config.settings import SettingsError

WEIGHTS, REPLAY = "weights.safetensors", "replay.json"
"""Files of runs with a warm start, and of runs that repeat others."""
_FIRST = ("checkpoints", "run.json", WEIGHTS, REPLAY)
"""What is made before experiment.json, which marks a folder as a run."""
_NAMED = 5
"""Maximum number of runs to list if the user's path is not a run."""


def is_run(folder: Path) -> bool:
    """Whether a folder is the completely created folder of a run."""
    return (folder / "experiment.json").is_file()


def is_unfinished(folder: Path) -> bool:
    """Whether the creation of a run's folder was interrupted, so that it contains only some of the first files."""
    known = {*_FIRST, ".lock", *(f".{name}.partial" for name in (*_FIRST, "experiment.json"))}
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "checkpoints" not in found:
        return found == {".lock"}
    return found <= known and not any((folder / "checkpoints").iterdir())


def runs_in(folder: Path) -> list[Path]:
    """The runs in a sweep's folder, or in another folder of runs, sorted by name; empty for other folders."""
    home = folder / "runs" if (folder / "queue").is_dir() else folder
    return sorted(path.parent for path in home.glob("*/experiment.json"))


def not_a_run(path: Path) -> SettingsError:
    """The error for a path that is not a run. It names runs near it."""
    if path.is_dir():
        what = "is not the folder of a run (it has no experiment.json)"
    else:
        what = "is a file" if path.exists() else "does not exist"
    near = path if path.is_dir() else path.parent
    if (near / "queue").is_dir():
        what = "is the folder of a sweep, not of a run" if path.is_dir() else what
        near = near / "runs"
    runs = sorted(runs_in(near), key=lambda run: run.stat().st_mtime)
    found = "Runs found" if len(runs) <= _NAMED else f"The newest of {len(runs)} runs"
    hint = f" {found} in {near}: {', '.join(run.name for run in runs[: -_NAMED - 1 : -1])}." if runs else ""
    every = (
        f" report, compare and plot accept the whole folder: {shlex.quote(str(path))}."
        if path.is_dir() and len(runs) > 1
        else ""
    )
    return SettingsError(f"{path} {what}. Give the folder that train printed.{hint}{every}")


def require_empty(requested: str) -> None:
    """Raise SettingsError unless a new run can use this folder."""
    path = Path(requested)
    if path.exists() and not (path.is_dir() and (not any(path.iterdir()) or is_unfinished(path))):
        advice = f"continue it with: lockstep resume {shlex.quote(requested)}, or " if is_run(path) else ""
        raise SettingsError(
            f"--run {requested} exists and is not empty. Nothing was overwritten: {advice}choose another folder."
        )


def new_folder(requested: str | None, env_id: str, algorithm: str, seed: int) -> Path:
    """Make the folder of a new run: the requested one, or one in runs/ whose name says what is learned, and when.

    Raises:
        SettingsError: the requested folder exists and is not empty.
    """
    if requested is not None:
        require_empty(requested)
        path = Path(requested)
        path.mkdir(parents=True, exist_ok=True)
        return path
    task = re.sub(r"[^A-Za-z0-9.]+", "-", Path(env_id.removesuffix(".py")).name).strip("-.")
    stem = f"{task}-{algorithm}-s{seed}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while True:
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path
