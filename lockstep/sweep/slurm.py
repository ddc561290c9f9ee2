"""The sweep on a Slurm cluster: a job for each run, through submitit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.runtime.slurm import executor, script, submitit
from lockstep.settings import SettingsError
from lockstep.sweep.child import run_entry
from lockstep.sweep.queue import Entry, Queue, read_json, write_json
from lockstep.sweep.runner import needs_of
from lockstep.sweep.slots import Needs


class Job:
    """What a Slurm job does. Short before its time is up, submitit queues it again, to go on from the checkpoint."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = folder, name

    def __call__(self) -> int:
        return run_entry(Queue(Path(self.folder)), self.name)

    def checkpoint(self) -> Any:
        """The job that continues this one."""
        return submitit().helpers.DelayedSubmission(self)

    __submitit_checkpoint__ = checkpoint


def submit(
    queue: Queue, entries: list[Entry], options: dict[str, Any], say: Callable[[str], None], *, dry_run: bool = False
) -> int:
    """Hand every run that waits, and has no job yet, to Slurm: one array of jobs for each number of cores and GPUs.

    Args:
        entries: of the queue.
        options: of the jobs, by sbatch's names.
        say: shows a line.
        dry_run: only show the jobs that would be submitted.

    Returns:
        How many jobs there are, or would be, that were not there before.

    Raises:
        SettingsError: submitit or Slurm is missing, or refuses the options.
    """
    known = set() if dry_run else _queued_jobs()
    by_needs: dict[Needs, list[Entry]] = {}
    for entry in entries:
        if queue.state(entry.name) == "waiting" and _job(queue, entry.name) not in known:
            by_needs.setdefault(needs_of(entry), []).append(entry)
    for wanted, waiting in by_needs.items():
        made = executor(queue.folder / "slurm", _settings(queue, wanted), options, dry_run=dry_run)
        if dry_run:
            say(f"{len(waiting)} job{'s' * (len(waiting) != 1)}: {', '.join(entry.name for entry in waiting)}")
            say(script(made))
            continue
        with made.batch():
            jobs = [made.submit(Job(str(queue.folder), entry.name)) for entry in waiting]
        for entry, job in zip(waiting, jobs):
            write_json(_jobs(queue, make=True) / f"{entry.name}.json", {"job": job.job_id})
            say(f"job {job.job_id}: {entry.name}")
    return sum(map(len, by_needs.values()))


def _settings(queue: Queue, wanted: Needs) -> dict[str, Any]:
    gpus = {"gpus_per_node": wanted.gpus} if wanted.gpus else {}
    return {"job_name": queue.folder.name, "cpus_per_task": wanted.cores, **gpus}


def _queued_jobs() -> set[str]:
    """The ids of this user's jobs that wait or run."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    except (OSError, subprocess.CalledProcessError) as error:
        raise SettingsError(
            f"Slurm does not answer: {' '.join(command)} failed ({error}). Start the sweep on a machine from which "
            "jobs can be submitted, or without --slurm."
        ) from error


def _job(queue: Queue, name: str) -> str | None:
    """The id of the job that a run was handed to last."""
    path = _jobs(queue) / f"{name}.json"
    return read_json(path)["job"] if path.exists() else None


def _jobs(queue: Queue, *, make: bool = False) -> Path:
    folder = queue.folder / "jobs"
    if make:
        folder.mkdir(exist_ok=True)
    return folder
