"""Submits Slurm jobs through submitit, for sweeps and single runs."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.config.settings import SettingsError, require

_REQUEUES = 1000
"""How often a job that reached its time limit is requeued."""

_MINUTES = 24 * 60
"""A job's default time limit in minutes."""
_CORES = "export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}"
"""Since Slurm 22.05, srun does not inherit this number from sbatch."""

_LISTS = ("setup", "teardown")
"""Options with shell commands to run before and after the job's program."""
_COUNTS = (
    *("array_parallelism", "cpus_per_gpu", "cpus_per_task", "gpus_per_node", "gpus_per_task", "signal_delay_s", "time"),
)
_SWITCHES = ("stderr_to_stdout", "use_srun")
_OURS = {"nodes": "--nodes", "ntasks_per_node": "--tasks-per-node", "map_count": "", "num_gpus": ""}
"""Options that lockstep sets itself, with the corresponding flag, if there is one."""


def submitit() -> Any:
    """The submitit package.

    Raises:
        SettingsError: it is not installed.
    """
    otherwise = "lockstep train, and lockstep sweep without --slurm, run on this machine."
    require("submitit", "slurm", "A job on Slurm", otherwise)
    return importlib.import_module("submitit")


def executor(folder: Path, settings: dict[str, Any], options: dict[str, Any], *, dry_run: bool) -> Any:
    """The object that submits jobs to Slurm.

    Args:
        folder: the folder of submitit's files. All nodes must be able to read it.
        settings: the jobs' settings, by sbatch's names.
        options: the user's options, which take precedence.
        dry_run: whether to only show the jobs.

    Raises:
        SettingsError: submitit or Slurm is missing, or Slurm refuses the options.
    """
    slurm = submitit().SlurmExecutor
    if dry_run:  # works on machines without Slurm

        class Shown(slurm):
            @classmethod
            def affinity(cls) -> int:
                return 1

        slurm = Shown
    with refusals(options):
        made = slurm(folder=folder, max_num_timeout=_REQUEUES)
        given = _typed(options)
        given["setup"] = [_CORES, *given.get("setup", [])]
        made.update_parameters(**{"time": _MINUTES, **settings, **given})
    return made


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    """The user's options in submitit's types. Some of them are lists, which the command line passes as texts.

    Raises:
        SettingsError: an option does not exist, or has the wrong type.
    """
    known = set(importlib.import_module("submitit.slurm.slurm")._get_default_parameters()) - set(_OURS)
    typed: dict[str, Any] = {}
    for name, value in options.items():
        what = f"--slurm-options {name}={value}"
        if name in _OURS:
            instead = f"use the flag {_OURS[name]} of lockstep submit" if _OURS[name] else "leave it out"
            raise SettingsError(f"{what}: lockstep sets this itself, so {instead}.")
        if name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), known, n=2, cutoff=0.6)
            meant = f" Did you mean {' or '.join(close)}?" if close else ""
            raise SettingsError(f"{what}: there is no such option.{meant} Known are {', '.join(sorted(known))}.")
        if name in _LISTS or name == "srun_args":
            if isinstance(value, str):
                value = shlex.split(value) if name == "srun_args" else value.splitlines()
            if not (isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)):
                raise SettingsError(f'{what} must be a shell command, as in "{name}=module load cuda".')
            value = list(value)
        elif name in _COUNTS:
            _require(isinstance(value, int) and not isinstance(value, bool), what, "a whole number", name == "time")
        elif name in _SWITCHES:
            _require(isinstance(value, bool), what, "true or false")
        elif name == "additional_parameters":
            _require(isinstance(value, dict), what, "a dict, which is only possible in Python")
        else:  # sbatch parses the text itself
            _require(isinstance(value, (str, int, float)), what, "a text or a number")
        typed[name] = value
    return typed


def _require(fits: bool, what: str, kind: str, minutes: bool = False) -> None:
    if not fits:
        raise SettingsError(f"{what} must be {kind}{', of minutes: 10 hours are 600' if minutes else ''}.")


@contextlib.contextmanager
def refusals(options: dict[str, Any]) -> Iterator[None]:
    """Turn submitit's errors into a SettingsError with Slurm's message.

    Raises:
        SettingsError: Slurm refuses the options, or a job with them.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        given = f" with --slurm-options {' '.join(f'{n}={x}' for n, x in options.items())}" if options else ""
        raise SettingsError(f"Slurm refuses a job{given}: {error}") from error


def script(made: Any) -> str:
    """The batch script that an executor would submit."""
    return made._make_submission_file_text(made._submitit_command_str, "dry-run")
