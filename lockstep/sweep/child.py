"""The process of one run of a sweep."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import from_json
from lockstep.config.settings import Diverged, SettingsError
from lockstep.config.user_code import look_for_files_in
from lockstep.run.files import is_full
from lockstep.sweep.queue import Entry, Outcome, Queue
from lockstep.system import children
from lockstep.system.output import print_line

INTERRUPTED = 130
"""Exit code of a run that was asked to stop and can continue."""
ELSEWHERE = 75
"""Exit code if another process already executes the run."""
FULL = 77
"""Exit code if the disk is full. The run can continue once there is space."""
LOST = 76
"""The exit code used for a run whose machine was lost. The run can continue elsewhere."""
STOPPED = (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)
"""Exit codes of a run that was asked to stop, or that a signal ended before the run handled signals."""


def start(
    queue: Queue, name: str, cores: Iterable[int], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start the process of a run. It ends when this process ends, and its output goes to the run's log."""
    with open(queue.log(name), "ab") as log:
        return new_python("lockstep.sweep.child:main", arguments(queue, name, cores), log, environment)


def new_python(
    entry: str,
    given: list[str],
    log: IO[bytes],
    environment: Mapping[str, str] | None = None,
    files: Iterable[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a Python with this one's sys.path, which ends with the exit code of a function.

    Args:
        entry: MODULE:FUNCTION.
        given: what the function gets.
        log: the file of its output.
        environment: its variables, by default those of this process.
        files: files of this process that it inherits.
    """
    module, _, function = entry.partition(":")
    # Not -m, which would search the current folder first even if this process does not.
    begin = (
        rf"import sys; sys.path[:] = sys.argv.pop(1).split('\n'); from {module} import {function}; "
        f"sys.exit({function}(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", begin, "\n".join(sys.path), *given],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        pass_fds=tuple(files),
        start_new_session=True,  # Ctrl-C goes to the sweep, which then asks its runs to stop
    )


def arguments(queue: Queue, name: str, cores: Iterable[int]) -> list[str]:
    """The arguments of main in a child of this process."""
    return [str(queue.folder), name, str(os.getpid()), ",".join(map(str, cores))]


def main(given: list[str]) -> int:
    """Run one entry of a queue on the cores that the sweep assigned to it, and stop when the sweep dies."""
    folder, name, parent, cores = given
    children.die_with_parent(int(parent))
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    return run_entry(Queue(Path(folder)), name)


def run_entry(queue: Queue, name: str) -> int:
    """Begin a run or continue it, and record how it ended. Returns the exit code."""
    with queue.claimed(name) as mine:
        if not mine:
            print(f"{name} is being run by another process.", file=sys.stderr)
            return ELSEWHERE
        if not queue.has(name):
            print(f"{name} was taken out of the sweep.", file=sys.stderr)  # by a Slurm job that was still queued
            return 0
        ended = queue.outcome(name)
        if ended is None:
            try:
                ended = _train(queue, queue.entry(name))
                if ended is None:
                    return INTERRUPTED
                queue.end(name, ended)
            except KeyboardInterrupt:
                return INTERRUPTED
            except Diverged as error:  # bad settings diverge, too, and a search has to learn from them
                ended = Outcome("stopped", reason=str(error))
                print_line(ended.reason, sys.stderr)
                queue.end(name, ended)
            except Exception as error:  # not SystemExit, with which a requeued Slurm job exits
                ended = Outcome("failed", reason=_explained(error))
                print_line(ended.reason, sys.stderr)
                if _is_busy(error):
                    return ELSEWHERE
                if is_full(error):
                    return FULL
                queue.end(name, ended)
        return 1 if ended.state == "failed" else 0


def _train(queue: Queue, entry: Entry) -> Outcome | None:
    """How the run ended; None if it was asked to stop before its end."""
    # Importing torch takes seconds. By now this process has its cores and ends when its parent ends.
    from lockstep.launchers.launch import resume, train
    from lockstep.system.supervision import unattended

    with contextlib.suppress(OSError):
        os.chdir(entry.directory)
    look_for_files_in(entry.directory)
    sys.argv[:] = entry.command or ["lockstep", "sweep", str(queue.folder)]  # what the run records as its command

    def fail(reason: str) -> None:
        code = 1
        try:
            print_line(reason, sys.stderr)
            queue.end(entry.name, Outcome("failed", reason=reason))
        except OSError as error:
            code = FULL if is_full(error) else 1
        finally:
            os._exit(code)

    folder = queue.run(entry.name)
    queue.discard_unfinished_folder(entry.name)
    known = {field.name for field in dataclasses.fields(RunOptions)}
    given: dict[str, Any] = {name: value for name, value in entry.options.items() if name in known}
    options = RunOptions(**{**given, "run": str(folder)})
    layout = Layout.parse(entry.layout)
    with unattended(fail):
        if folder.exists():
            result = resume(folder, layout, options)
        else:
            result = train(from_json(entry.experiment), layout, options)
    if result.stopped:
        return None
    return Outcome("done", result.digest, result.iterations, result.score)


def _is_busy(error: Exception) -> bool:
    """Whether another process trains the run, for example by hand."""
    from lockstep.run.lock import RunBusy

    return isinstance(error, RunBusy)


def _explained(error: Exception) -> str:
    """A traceback, or only the message if the error explains itself."""
    from lockstep.system.supervision import WorkerError

    return str(error) if isinstance(error, (SettingsError, WorkerError)) else traceback.format_exc().rstrip()
