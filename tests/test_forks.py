"""What forks.py forks is as if it had begun anew, and so is what that starts."""

from __future__ import annotations

import _posixsubprocess
import fcntl
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import HIGH, LIMITS, Forks

from lockstep.system import children


@pytest.fixture
def forks() -> Forks:
    found = _posixsubprocess.fork_exec
    if not isinstance(found, Forks):
        pytest.skip("--real-processes forks nothing")
    return found


@pytest.fixture
def peculiar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has what children inherit otherwise than when the server began."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_PECULIAR", "yes")
    monkeypatch.delenv("COLUMNS", raising=False)
    mask, cores, umask = (
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]),
        os.sched_getaffinity(0),
        os.umask(0o007),
    )
    limits, handler = resource.getrlimit(resource.RLIMIT_NOFILE), signal.signal(signal.SIGALRM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    os.sched_setaffinity(0, {max(cores)})
    yield
    os.sched_setaffinity(0, cores)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    signal.signal(signal.SIGALRM, handler)
    os.umask(umask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def properties(parent: int) -> dict[str, Any]:
    """Of this process, as far as they could differ from those of another that was started in the same way."""
    main, process = sys.modules["__main__"], Path("/proc/self")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    words = [word.decode() for word in (process / "cmdline").read_bytes().split(b"\0") if word]
    streams: list[Any] = [sys.stdin, sys.stdout, sys.stderr]
    files = {int(path.name): os.path.realpath(path) for path in (process / "fd").iterdir() if path.is_symlink()}
    return {
        "parent": os.getppid() == parent,
        "words": [word.partition("(")[0] for word in words],
        "orig_argv": [word.partition("(")[0] for word in sys.orig_argv],
        "argv": sys.argv,
        "main": (main.__name__, main.__spec__, hasattr(main, "__file__")),
        "path": sys.path,
        "code": children.__file__,
        "environment": dict(os.environ),
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd")],
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
        "cores": os.sched_getaffinity(0),
        "group": (os.getpgrp(), os.getsid(0)),
        "umask": status["Umask"],
        "folder": os.getcwd(),
        "streams": [(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through) for s in streams],
        "files": sorted(number for number, file in files.items() if number < HIGH and ":" in file),
        "threads": len(os.listdir(process / "task")),
    }


def tell(pipe: Connection, parent: int, nested: bool) -> None:
    """In a child process: its properties, and those of one that it starts."""
    pipe.send((properties(parent), np.random.random()))
    if nested:
        process = children.start(tell, (pipe, os.getpid(), False), "lockstep-nested")
        process.join()
        sys.exit(process.exitcode + 5)


def started(real: bool, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(forks, "real", real)
    ours, theirs = multiprocessing.Pipe()
    process = children.start(tell, (theirs, os.getpid(), True), "lockstep-test")
    theirs.close()
    process.join()
    assert process.exitcode == 5
    return [ours.recv(), ours.recv()]


@pytest.mark.usefixtures("peculiar")
def test_a_fork_differs_from_a_process_that_begins_anew_in_nothing(
    forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource_tracker.ensure_running()
    anew, forked = (started(real, forks, monkeypatch) for real in (True, False))
    for (expected, _), (found, _) in zip(anew, forked, strict=True):
        for name, value in expected.items():
            assert found[name] == value, name
        assert expected["parent"] and expected["environment"]["LOCKSTEP_PECULIAR"] == "yes"
    assert len({number for _, number in forked}) == 2, "each has other random numbers"


def tell_file(pipe: Connection) -> None:
    pipe.send(pipe.fileno())


def test_a_process_that_has_hundreds_of_open_files_starts_others(forks: Forks) -> None:
    ours, theirs = multiprocessing.Pipe()
    high = Connection(fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH - 1))
    theirs.close()
    process = children.start(tell_file, (high,), "lockstep-test")
    high.close()
    process.join()
    assert process.exitcode == 0 and ours.recv() == HIGH - 1


ENDS = {"return": 0, "sys.exit(3)": 3, "sys.exit('why')": 1, "1 // 0": 1, "os._exit(4)": 4, "os.abort()": -6}


def end(how: str) -> None:
    """In a child process."""
    if how != "return":
        exec(how)


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.usefixtures("forks")
def test_codes_of_exit(how: str) -> None:
    process = children.start(end, (how,), "lockstep-test")
    process.join()
    assert process.exitcode == ENDS[how]


def test_the_command_line(forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-m", "lockstep", "train", "nothing"]
    ran = []
    for real in (True, False):
        monkeypatch.setattr(forks, "real", real)
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, start_new_session=True)
        ran.append((done.returncode, done.stdout, done.stderr))
    assert ran[0] == ran[1] and ran[0][0] == 2
