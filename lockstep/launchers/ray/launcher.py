"""Runs on a Ray cluster. Every process is an actor (lockstep.launchers.ray.driver)."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.config.settings import SettingsError
from lockstep.launchers.ray.driver import RayDriver
from lockstep.launchers.ray.ending import ProcessLost, require_restarts_left, say
from lockstep.launchers.ray.growing import GrowingDriver
from lockstep.launchers.ray.places import places, require_places
from lockstep.launchers.watching import stopping_on_signals
from lockstep.run.files import locked
from lockstep.system.machine import cores
from lockstep.training.context import RunStatus, Work
from lockstep.training.job import Job, Result
from lockstep.training.resuming import resumable

_PREFIX, _LOCK = "lockstep-ray-", "lock"
_PATIENCE = 10.0
"""Seconds that a cluster has to accept a connection."""


def run_ray(work: Work, job: Job) -> Result:
    """Run workers, or learners and collectors, as actors of a Ray cluster. This is the cluster that this process is
    connected to, else the one that RAY_ADDRESS names, else a new one on this machine.

    Raises:
        SettingsError: the cluster is too small.
        WorkerError: a process raised or stalled, or more were lost than the layout allows.
    """
    status, losses = RunStatus(), 0
    status.begin()  # this process does not know when its actors begin
    told = dataclasses.replace(
        job,
        folder=dataclasses.replace(job.folder, path=job.folder.path.absolute()),
        # Ray prints actors' output in this process line by line, so that a live display is impossible.
        options=dataclasses.replace(job.options, display="none" if job.options.display == "none" else "plain"),
    )
    needed = places(job)
    with connected(int(sum(each["CPU"] for each in needed))) as ray, stopping_on_signals(status):
        require_places(ray, job.layout, needed)
        while True:
            kind = GrowingDriver if job.layout.growing else RayDriver
            driver = kind(ray, work, told, status, losses)
            try:
                return dataclasses.replace(driver.run(), run=job.folder.path)
            except ProcessLost as lost:
                losses = driver.losses + 1
                require_restarts_left(losses, job.layout, str(lost))
                bound = f"{losses} of restarts={job.layout.restarts}"
                say(f"{lost}. All processes restart from the newest checkpoint ({bound}).")
                saved = resumable(told.folder, None, told.experiment)
                told = dataclasses.replace(told, checkpoint=saved and saved.path)
                begin = 0 if saved is None else saved.iteration
                told.folder.note_resumption(begin, told.layout, told.options, ())


def _library() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # otherwise it drops the lines of most iterations
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # about lost processes, which are reported anyway
    import ray
    import ray.util.scheduling_strategies

    return ray


@contextlib.contextmanager
def connected(least: int) -> Iterator[Any]:
    """Ray, connected to the cluster that this process is connected to, else to the one that RAY_ADDRESS names, else to
    a new one on this machine with at least `least` CPUs."""
    ray = _library()
    if ray.is_initialized():
        yield ray
        return
    with contextlib.ExitStack() as stack:
        scratch = None if os.environ.get("RAY_ADDRESS") else stack.enter_context(temporary_folder())
        stack.callback(ray.shutdown)
        if scratch is None:
            with _answering(os.environ["RAY_ADDRESS"], (ray.exceptions.AuthenticationError,)):
                ray.init(logging_level="WARNING")
        else:
            with _starting():
                ray.init(
                    "local",
                    num_cpus=max(cores(), least),
                    include_dashboard=False,
                    logging_level="WARNING",
                    _temp_dir=str(scratch),
                    _system_config={"worker_niceness": 0},  # otherwise all other programs take precedence
                )
        yield ray


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Explain why a cluster on this machine does not start.

    Raises:
        SettingsError: the cluster does not start. Ray raises errors of many types, including plain Exception.
    """
    try:
        yield
    except Exception as error:
        raise SettingsError(
            f"Ray could not be started on this machine: {error} It gives up after about half a minute, which a busy "
            "machine may exceed: try again, start a cluster first (ray start --head) and set RAY_ADDRESS to its "
            "address, or use --layout processes:N or cpu:aC-lL, which need no Ray and give the same result."
        ) from error


@contextlib.contextmanager
def _answering(address: str, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Explain why this process cannot connect to the cluster at this address. If nothing answers there, Ray itself
    would keep trying for minutes.

    Args:
        refusals: errors that Ray raises if the cluster refuses this process, besides ConnectionError.

    Raises:
        SettingsError: nothing answers, or the cluster refuses this process.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    answers = port.isdecimal()  # not "auto", which Ray resolves
    try:
        if answers:
            socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise _nothing_answers(address, error) from error
    try:
        yield
    except (OSError, *refusals) as error:
        if not answers:
            raise _nothing_answers(address, error) from error
        said = str(error).rstrip(".")
        raise SettingsError(
            f"The Ray cluster at RAY_ADDRESS={address} does not take this program: {said}. If it asks for a token, as "
            "ray start --head does once there is one in ~/.ray/auth_token, give all machines this file, and set "
            "RAY_AUTH_MODE=token here and where its nodes start. RAY_AUTH_MODE=disabled, set everywhere, turns tokens "
            "off; then anybody who reaches the cluster can run programs on it."
        ) from error


def _nothing_answers(address: str, error: Exception) -> SettingsError:
    return SettingsError(
        f"No Ray cluster answers at RAY_ADDRESS={address}: {error}. Start one (ray start --head), correct the "
        "address, or unset it for a cluster on this machine."
    )


@contextlib.contextmanager
def temporary_folder(below: Path = Path("/tmp")) -> Iterator[Path]:
    """A folder for a local cluster's sockets and logs, which is removed at the end. This also removes folders of killed
    processes.

    The folder is below /tmp, since a socket's path has at most a hundred characters, and Ray's part has seventy.
    """
    for left in below.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (left / _LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
            shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=below))
    try:
        unfinished = folder / "unfinished"
        with unfinished.open("w") as file, locked(file, 0.0):
            unfinished.rename(folder / _LOCK)  # locked before other processes can see it
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
