"""Runs in processes that torchrun has started on one or more machines."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from pathlib import Path

from lockstep.config.settings import SettingsError
from lockstep.distributed.groups import MEETING, GlooGroup, Group
from lockstep.launchers.watching import stopping_on_signals, watched
from lockstep.system.output import print_line
from lockstep.system.supervision import WorkerError
from lockstep.training.context import RunStatus, Work, WorkerContext
from lockstep.training.job import Job, Result

VISIBLE = 60.0
"""Seconds until a new file is visible on other hosts, since NFS caches folders."""


def run_torchrun(work: Work, job: Job) -> Result:
    """Run one of the processes that torchrun started. torchrun notices when a process ends, and each process watches
    itself for stalls."""
    status = RunStatus()
    status.begin()  # on a signal, stop together with the others: a process that ends alone would count as lost
    group = meet(status)
    try:
        job = agree(group, job)
        job = dataclasses.replace(job, layout=dataclasses.replace(job.layout, workers=group.size))
        with (
            stopping_on_signals(status),
            watched(_end_here, status, job.layout.stall_timeout, group, job.environments_each),
        ):
            result = work(job, WorkerContext(group), status)
        assert result is not None, "learners return a result"
        return result
    finally:
        group.close()


def _end_here(reason: str) -> None:
    """End this process. Then torchrun ends the others."""
    print_line(f"Process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {reason}", sys.stderr)
    os._exit(1)


def meet(status: RunStatus) -> GlooGroup:
    """The group of all processes that torchrun or srun started. Waits until all have connected.

    Raises:
        WorkerError: some did not connect.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    late = (
        "the others did not connect: one of them ended, or the network interface that gloo chose cannot reach them "
        "(set GLOO_SOCKET_IFNAME to choose another)"
    )
    try:
        with watched(lambda _: _end_here(late), status, 3 * MEETING.total_seconds()):
            return GlooGroup("env://", rank, size)
    except RuntimeError as error:
        raise WorkerError(
            f"Process {rank} of {size} did not meet the others: {error}. One of them may have ended before (see its "
            "output), or cannot reach the first process's host, or another program uses the port where they meet. "
            "MASTER_ADDR and MASTER_PORT choose host and port."
        ) from error


def agree(group: Group, job: Job) -> Job:
    """The job with the first process's folder, checkpoint and experiment, which contains the digests of the files that
    it begins with.

    Raises:
        SettingsError: not all processes see the folder.
    """
    paths = (job.folder.path.absolute(), job.checkpoint and job.checkpoint.absolute())
    path, checkpoint, experiment = group.broadcast((*paths, job.experiment))
    check_shared(group, path / "run.json")
    if group.rank == 0:
        return job
    folder = dataclasses.replace(job.folder, path=path)
    return dataclasses.replace(job, folder=folder, checkpoint=checkpoint, experiment=experiment)


def check_shared(group: Group, file: Path, visible: float = VISIBLE) -> None:
    """Raise SettingsError unless all processes see the file that the first process wrote. Each process writes its
    shards' parts of checkpoints next to it.

    Args:
        group: the processes.
        file: the file that the first process wrote.
        visible: seconds within which every process must see it.
    """
    written = group.broadcast(file.read_bytes() if group.rank == 0 else None)
    deadline = time.monotonic() + visible
    while not (seen := file.is_file() and file.read_bytes() == written) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = group.gather(None if seen else socket.gethostname())
    blind = group.broadcast(sorted({host for host in blind if host}) if blind is not None else None)
    if blind:
        raise SettingsError(
            f"{file.parent} is not the same folder on all hosts: on {', '.join(blind)} it lacks the file that the "
            "first process wrote. Every process writes its part of each checkpoint into this folder: put --run on a "
            "file system that all hosts share, such as NFS, or use --nproc-per-node on one host."
        )
