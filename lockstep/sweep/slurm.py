"""Runs a sweep on a Slurm cluster, through submitit: a job for each run, or one job for a search."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.settings import SettingsError
from lockstep.launchers.slurm import executor, refusals, script, submitit
from lockstep.sweep.child import run_entry
from lockstep.sweep.options import SweepOptions
from lockstep.sweep.queue import SEARCH, Entry, Queue, read_json, write_json
from lockstep.sweep.runner import needs_of
from lockstep.sweep.slots import Needs

_SLOTS = 4
"""Runs of a search at a time. With more, a search ends sooner, and its runs learn less from each other."""
_ARRAY = 1000
"""Maximum number of jobs in an array: Slurm's default limit is 1001 (MaxArraySize)."""
_BESIDE = 2 * 2**30
"""Bytes that a run takes in addition to its replay memory, and half as much again for each core: torch and
environments."""
_REFUSED = 2
"""Exit code of a command that finds a mistake in its settings."""
_ENDING = 60.0
"""Seconds that runs have to write checkpoints, of the 90 that submitit leaves before a job's time limit."""


class Job:
    """A Slurm job that runs one run. Shortly before the time limit, submitit requeues it to continue from the
    checkpoint."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = folder, name

    def __call__(self) -> int:
        return run_entry(Queue(Path(self.folder)), self.name)

    def checkpoint(self) -> Any:
        """The job that continues this one."""
        return submitit().helpers.DelayedSubmission(self)

    __submitit_checkpoint__ = checkpoint


class SearchJob:
    """A Slurm job that runs a whole search as a sweep on the job's cores, since every trial follows from those
    before."""

    def __init__(self, folder: str, slots: int) -> None:
        self.folder, self.slots = folder, slots
        self._sweep: subprocess.Popen[bytes] | None = None
        self._told = False

    def __call__(self) -> int:
        # These belong to the submitting user, or to a previous node of the job.
        with contextlib.suppress(SettingsError), self._locked():
            pass
        command = [sys.executable, "-m", "lockstep", "sweep", self.folder, "--overview", "plain"]
        self._sweep = subprocess.Popen([*command, "--slots", str(self.slots)], stderr=subprocess.STDOUT)
        signal.signal(signal.SIGTERM, self._tell)  # from scancel
        code = self._sweep.wait()
        if code == _REFUSED:
            raise RuntimeError("The search could not go on: the job's log says why.")
        return code

    def checkpoint(self) -> Any:
        """The job that continues this one, after the runs have written checkpoints."""
        self._tell()
        # Not Popen.wait: this is called from a signal handler while __call__ waits for the process.
        with contextlib.suppress(SettingsError), self._locked():
            pass
        return submitit().helpers.DelayedSubmission(SearchJob(self.folder, self.slots))

    __submitit_checkpoint__ = checkpoint

    def _tell(self, *signal_and_frame: Any) -> None:
        """Ask the runs to write checkpoints and stop."""
        if self._sweep is not None and not self._told:
            self._told = True  # once: Slurm may send several signals, and a second one would end the runs at once
            self._sweep.terminate()

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return Queue(Path(self.folder)).locked(patience=_ENDING)


def submit(
    queue: Queue, entries: list[Entry], sweep: SweepOptions, say: Callable[[str], None], *, dry_run: bool = False
) -> int:
    """Submit every waiting run that has no job yet to Slurm, with one array of jobs for all runs with equal needs.

    Args:
        entries: of the queue.
        sweep: slots (the jobs of an array at once) and options of the jobs, by sbatch's names.
        say: prints a line.
        dry_run: only show the jobs that would be submitted.

    Returns:
        The number of jobs that were added, or would be.

    Raises:
        SettingsError: submitit or Slurm is missing, or refuses the options.
    """
    known = _known_jobs(queue) if dry_run else _queued_jobs()
    by_needs: dict[Needs, list[Entry]] = {}
    for entry in entries:
        if queue.state(entry.name) == "waiting" and _job(queue, entry.name) not in known:
            by_needs.setdefault(needs_of(entry), []).append(entry)
    options = {"array_parallelism": sweep.slots} if sweep.slots else {}
    options |= sweep.slurm_options
    arrays = [
        (wanted, waiting[begin : begin + _ARRAY])
        for wanted, waiting in by_needs.items()
        for begin in range(0, len(waiting), _ARRAY)
    ]
    for wanted, waiting in arrays:
        made = executor(queue.folder / "slurm", _settings(queue, wanted, options), options, dry_run=dry_run)
        if dry_run:
            count = f"{len(waiting)} job{'s' * (len(waiting) != 1)}"
            if 0 < sweep.slots < len(waiting):
                count += f", {sweep.slots} at a time"
            say(f"{count}: {', '.join(entry.name for entry in waiting)}")
            say(script(made))
            continue
        with refusals(options), made.batch():
            jobs = [made.submit(Job(str(queue.folder), entry.name)) for entry in waiting]
        for entry, job in zip(waiting, jobs):
            write_json(_jobs(queue, make=True) / f"{entry.name}.json", {"job": job.job_id})
            say(f"job {job.job_id}: {entry.name}")
    return sum(map(len, by_needs.values()))


def submit_search(
    queue: Queue, runs: list[Needs], sweep: SweepOptions, say: Callable[[str], None], *, dry_run: bool
) -> None:
    """Submit a search to Slurm as one job, with cores and GPUs for several runs at a time.

    Args:
        runs: what each run that it may start occupies.
        sweep: slots (0 for a few), runs that share a GPU, and options of the job, by sbatch's names.
        say, dry_run: as for submit.

    Raises:
        SettingsError: submitit or Slurm is missing, or refuses the options.
    """
    slots = sweep.slots or _SLOTS
    cores, gpus = max(run.cores for run in runs), max(run.gpus for run in runs)
    memory = slots * max(run.memory for run in runs)
    wanted = Needs(slots * cores, max(gpus, -(-slots * gpus // sweep.runs_per_gpu)), memory)
    settings = _settings(queue, wanted, sweep.slurm_options, slots)
    made = executor(queue.folder / "slurm", settings, sweep.slurm_options, dry_run=dry_run)
    if dry_run:
        say(f"1 job, which runs {slots} at a time:")
        say(script(made))
        return
    with refusals(sweep.slurm_options):
        job = made.submit(SearchJob(str(queue.folder), slots))
    write_json(_jobs(queue, make=True) / f"{SEARCH}.json", {"job": job.job_id})
    say(f"job {job.job_id}: all of it, {slots} runs at a time; log: {job.paths.stdout}")


def searching(queue: Queue) -> str | None:
    """The id of a search's job, None if no such job waits or runs.

    Raises:
        SettingsError: Slurm does not answer.
    """
    job = _job(queue, SEARCH)
    return job if job is not None and job in _queued_jobs() else None


def abandoned(queue: Queue) -> dict[str, str]:
    """Messages about runs that wait although they were submitted to Slurm and their jobs are gone, by name, with the
    search under SEARCH. Empty if Slurm does not answer."""
    waiting = [entry.name for entry in queue.entries() if queue.state(entry.name) == "waiting"]
    handed = {name: job for name in (*waiting, SEARCH) if (job := _job(queue, name)) is not None}
    try:
        known = _queued_jobs() if handed else set()
    except SettingsError:
        return {}
    return {
        name: f"its job {job} is gone: see {queue.folder / 'slurm' / f'{job}_0_log.err'}, and sacct -j {job}. "
        "Submit it again to continue from its checkpoints."
        for name, job in handed.items()
        if job not in known
    }


def _settings(queue: Queue, wanted: Needs, given: Mapping[str, Any], runs: int = 1) -> dict[str, Any]:
    """The default requirements of a job. Memory is only requested for replay; otherwise the cluster's default holds."""
    asked: dict[str, Any] = {"job_name": queue.folder.name, "cpus_per_task": wanted.cores}
    if wanted.gpus:
        asked["gpus_per_node"] = wanted.gpus
    if wanted.memory and not any(name.startswith("mem") for name in given):
        beside = runs * _BESIDE + wanted.cores * _BESIDE // 2
        asked["mem"] = f"{-(-(wanted.memory + beside) // 2**20)}M"
    return asked


def _queued_jobs() -> set[str]:
    """The ids of this user's jobs that wait or run."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    except (OSError, subprocess.CalledProcessError) as error:
        raise SettingsError(
            f"Slurm does not answer: {' '.join(command)} failed ({error}). Start the sweep on a machine that can "
            "submit jobs, or without --slurm."
        ) from error


def _known_jobs(queue: Queue) -> set[str]:
    """Like _queued_jobs, but empty if Slurm is not installed: the sweep may never have used it."""
    try:
        return _queued_jobs() if _jobs(queue).exists() else set()
    except SettingsError:
        return set()


def _job(queue: Queue, name: str) -> str | None:
    """The id of the last job that a run was submitted in."""
    path = _jobs(queue) / f"{name}.json"
    return read_json(path)["job"] if path.exists() else None


def _jobs(queue: Queue, *, make: bool = False) -> Path:
    folder = queue.folder / "jobs"
    if make:
        folder.mkdir(exist_ok=True)
    return folder
