"""Runs as processes of their own, to be killed; and what they may not leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forks import MARK

from lockstep.system import children

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 120.0


def until(condition: Callable[[], bool], what: str, pause: float = 0.002) -> None:
    """Wait for a condition; a failure says what was waited for."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"waited {TIMEOUT:g} seconds for: {what}"
        time.sleep(pause)


def _mapped(process: int) -> set[str]:
    """The names of shared memory that a process uses."""
    with contextlib.suppress(OSError):  # it has ended
        return set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{process}/maps").read_text()))
    return set()


class Child:
    """`python -m lockstep …` in a process group, as from a terminal, with a folder of its own for temporary files."""

    def __init__(
        self, arguments: Iterable[str], folder: Path, launcher: Iterable[str] = ("-m", "lockstep"), **popen: Any
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = Path(tempfile.mkdtemp(dir=folder))
        self._shared: set[str] = set()
        """The names of shared memory that its processes have used, as far as noticed."""
        self._output = (folder / f"{self.mark}.txt").open("a+")  # so that reading it moves nothing that processes write
        self.process = subprocess.Popen(
            [sys.executable, *launcher, *arguments],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary), MARK: self.mark},
            cwd=folder,
            start_new_session=True,
            **popen,
        )

    def output(self) -> str:
        """All that it has printed so far, to standard output and error."""
        self._output.seek(0)
        return self._output.read()

    def members(self) -> set[int]:
        """Process ids of the main process and its workers that are alive."""
        alive = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has ended
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        alive.add(int(entry.name))
        return alive

    def tree(self) -> dict[str, list[int]]:
        """Process ids by kind, oldest first, of a split layout with one learner, as far as they have been started."""
        born, parents = {}, {}
        for process in self.members():
            with contextlib.suppress(OSError):  # it has ended
                if b"resource_tracker" not in Path(f"/proc/{process}/cmdline").read_bytes():
                    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                    parents[process], born[process] = int(fields[1]), (int(fields[19]), process)
        workers = sorted((p for p in parents if parents[p] == self.process.pid), key=born.__getitem__)
        return {
            "main": [self.process.pid],
            "learner": workers[:1],
            "collector": workers[1:],
            "environment": sorted((p for p in parents if parents[p] in workers), key=born.__getitem__),
        }

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition while the main process lives."""

        def met() -> bool:
            assert self.process.poll() is None, f"ended before: {what}\n{self.output()}"
            return condition()

        until(met, what, 0.01)
        self._notice()

    def signal(self, number: int) -> None:
        """To the main process alone."""
        assert self.process.poll() is None, f"ended before the signal:\n{self.output()}"
        self._notice()
        self.process.send_signal(number)

    def interrupt(self) -> None:
        """What Ctrl-C does: SIGINT to the whole group."""
        assert self.process.poll() is None, f"ended before Ctrl-C:\n{self.output()}"
        self._notice()
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
        """The exit code, after checking that nothing is left: no process, no shared memory, no temporary folder."""
        code = self.process.wait(TIMEOUT)
        until(lambda: not self.members(), "all workers to end", 0.05)
        left = [path.name for path in self.temporary.iterdir() if path.name.startswith(("lockstep", "pym"))]
        assert not left, f"left in the temporary folder: {left}"
        until(lambda: not self._shared & set(os.listdir("/dev/shm")), "shared memory to be freed", 0.05)
        return code

    def _notice(self) -> None:
        for process in self.members():
            self._shared |= _mapped(process)

    def close(self) -> None:
        """End everything that is left after a failed test."""
        for process in self.members():
            os.kill(process, signal.SIGKILL)
        self.process.wait()
        self._output.close()


def hold(pipe: Connection) -> None:
    """In a child process: read nothing."""
    time.sleep(TIMEOUT)


def dispositions(pipe: Connection) -> None:
    """In a child process: tell what a program that it starts ignores or blocks, and how SIGTERM ends that program, and
    processes that are forked as from a worker and as from a process that supervises."""
    program = subprocess.Popen(["sleep", str(TIMEOUT)])
    status = Path(f"/proc/{program.pid}/status").read_text()
    ignored, blocked = (int(status.partition(name)[2].split()[0], 16) for name in ("SigIgn:", "SigBlk:"))
    stops = [number for number in (1, 2, 15) if (ignored | blocked) >> (number - 1) & 1]
    program.terminate()
    ended = [program.wait()]
    for around in (contextlib.nullcontext(), children.handling_stops(lambda _: None)):
        with around:
            if not (forked := os.fork()):
                time.sleep(TIMEOUT)
                os._exit(0)
            os.kill(forked, signal.SIGTERM)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
    os.kill(os.getpid(), signal.SIGTERM)
    pipe.send((stops, ended))
