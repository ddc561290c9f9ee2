"""Starts one Doom engine. It runs as a separate program with the arguments WAY PARENT MARKS HOME ENGINE ARGUMENT...

ViZDoom runs each game in a separate process. Without this program, that process would outlive a killed controller, end
at a Ctrl-C that is meant for the controller, and write its settings into the working directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(way: str, parent: str, marks: str, home: str, engine: str, *arguments: str) -> None:
    """Replace this process by the engine, or watch it.

    Args:
        way: `replace` or `watch`. The package vizdoom crashes the controller if the process that it has started ends
            before the game has begun. To avoid this, a watching process starts the engine as its child. If MARKS still
            exists when the engine ends, the watching process makes the file `failed` there, and waits.
        parent: process id of the controller. This process and the engine end with it.
        marks: folder for a file that is named after the memory shared by engine and controller. It contains the process
            id of the engine, and that of the watching process if there is one.
        home: folder in which the engine makes a folder whenever it loads a map.
        engine: the engine's program.
        arguments: the controller's arguments for the engine.
    """
    _end_with(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir(home)
    given = list(arguments)
    instance = given[given.index("+viz_instance_id") + 1]
    given[given.index("-config") + 1] = os.devnull
    watching = os.getpid()
    child = os.fork() if way == "watch" else 0
    if child == 0:
        if way == "watch":
            _end_with(watching)
        with open(os.path.join(marks, instance), "w") as mark:
            mark.write(f"{os.getpid()} {watching}")  # the engine keeps this process id
        os.execv(engine, [engine, *given])
    os.waitpid(child, 0)
    with contextlib.suppress(FileNotFoundError):
        open(os.path.join(marks, "failed"), "w").close()
        while True:
            signal.pause()


def _end_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
