"""Starts Doom engines that end with this process and leave nothing behind."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

from lockstep.config.settings import SettingsError
from lockstep.envs.doom import engine_program
from lockstep.system.children import allow_files

_WHILE_STARTING = 16
"""The most files that a process briefly opens while it starts an engine."""
_GAME_MEMORY = 2_700_000
"""Bytes of shared memory for each engine."""


def starter(marks: Path, engine: str, *, watch: bool = False) -> str:
    """Write a program that starts an engine; return its path.

    Args:
        marks: folder for the program, and for one file per engine that it starts. The file is named after the memory
            that the engine shares with this process.
        engine: the engine's program.
        watch: whether another process watches the engine while it starts and discards its output (see
            lockstep.envs.doom.engine_program).
    """
    program = marks / "engine"
    start = [sys.executable, "-I", "-S", engine_program.__file__, "watch" if watch else "replace"]
    start += [str(os.getpid()), str(marks), _home(), engine]
    program.write_text(
        f'#!/bin/sh\nexec {shlex.join(start)} "$@"{" </dev/null >/dev/null 2>&1" * watch}\n', encoding="utf-8"
    )
    program.chmod(0o700)
    return str(program)


def engine_and_watch(marks: Path) -> list[int]:
    """The process ids of the engine that the program in this folder has started, and of the process that watches it."""
    others = ("engine", "failed")
    return [int(pid) for mark in marks.glob("*") if mark.name not in others for pid in mark.read_text().split()]


def unlink(marks: Path) -> None:
    """Unlink the shared memory once this process and all engines have opened it. The system then frees it when the last
    of them ends, however it ends."""
    for instance in marks.iterdir():
        for kind in ("SM", "MQCtr", "MQDoom"):
            Path("/dev/shm", f"ViZDoom{kind}{instance.name}").unlink(missing_ok=True)


def check_room(games: int) -> None:
    """Raise SettingsError if the system does not allow this process the shared memory and open files of this many more
    engines."""
    if (left := allow_files(games + _WHILE_STARTING) - _WHILE_STARTING) < games:
        raise SettingsError(
            f"{games} games of Doom need as many open files in one process, but the system allows {max(0, left)} more "
            "(ulimit -Hn). Use fewer (--env.num-envs), more collecting processes, or a higher limit (ulimit -n as "
            "root, docker run --ulimit nofile=65536)."
        )
    system = os.statvfs("/dev/shm")
    free = system.f_bavail * system.f_frsize
    if free < games * _GAME_MEMORY:
        raise SettingsError(
            f"{games} games of Doom need {games * _GAME_MEMORY / 1e6:.0f} MB of shared memory, but /dev/shm has "
            f"{free / 1e6:.0f} MB left. Use fewer (--env.num-envs), or give the container more (docker run "
            "--shm-size=1g)."
        )


def _home() -> str:
    """The common folder of all engines of a user. It is empty, and remains after they have ended."""
    home = Path(tempfile.gettempdir(), f"lockstep-vizdoom-{os.getuid()}")
    home.mkdir(mode=0o700, exist_ok=True)
    return str(home)
