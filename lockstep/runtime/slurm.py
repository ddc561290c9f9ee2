"""Jobs of a Slurm cluster, through submitit: what sweeps and single runs share."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.settings import SettingsError, require

_REQUEUES = 1000
"""Times that a job which has used up its time is queued again."""

_MINUTES = 24 * 60
"""A job's limit, unless the user says another."""
_CORES = "export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}"
"""Since Slurm 22.05 srun does not take this from sbatch by itself."""


def submitit() -> Any:
    """The package.

    Raises:
        SettingsError: it is not installed.
    """
    otherwise = "lockstep train, and lockstep sweep without --slurm, take this machine."
    require("submitit", "slurm", "A job on Slurm", otherwise)
    return importlib.import_module("submitit")


def executor(folder: Path, settings: dict[str, Any], options: dict[str, Any], *, dry_run: bool) -> Any:
    """What hands jobs to Slurm.

    Args:
        folder: of submitit's files; all nodes must see it.
        settings: of the jobs, by sbatch's names.
        options: the user's, which take precedence.
        dry_run: whether the jobs are only to be shown.

    Raises:
        SettingsError: submitit or Slurm is missing, or refuses the options.
    """
    slurm = submitit().SlurmExecutor
    if dry_run:  # a machine without Slurm can show what it would be asked for

        class Shown(slurm):
            @classmethod
            def affinity(cls) -> int:
                return 1

        slurm = Shown
    with refusals(options):
        made = slurm(folder=folder, max_num_timeout=_REQUEUES)
        made.update_parameters(**{"setup": [_CORES], "time": _MINUTES, **settings, **options})
    return made


@contextlib.contextmanager
def refusals(options: dict[str, Any]) -> Iterator[None]:
    """Say what Slurm does not take, in its own words.

    Raises:
        SettingsError: Slurm refuses the options, or a job with them.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        given = f" with --slurm-options {' '.join(f'{n}={x}' for n, x in options.items())}" if options else ""
        raise SettingsError(f"Slurm does not take a job{given}: {error}") from error


def script(made: Any) -> str:
    """The batch script that an executor would submit."""
    return made._make_submission_file_text(made._submitit_command_str, "dry-run")
