"""Starts one Doom engine. It runs as a separate program with the arguments PARENT MARKS HOME ENGINE ARGUMENT...

ViZDoom runs each game in a separate process. That process would outlive a killed controller, end at a Ctrl-C that is
meant for the controller, and write its settings into the working directory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, marks: str, home: str, engine: str, *arguments: str) -> None:
    """Replace this process by the engine.

    Args:
        parent: process id of the controller. The engine ends with it.
        marks: folder for an empty file with the name of the memory that engine and controller share.
        home: folder in which the engine makes a folder whenever it loads a map.
        engine: the program.
        arguments: the controller's arguments for the engine.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the controller has already ended
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir(home)
    given = list(arguments)
    instance = given[given.index("+viz_instance_id") + 1]
    os.close(os.open(os.path.join(marks, instance), os.O_CREAT | os.O_WRONLY))
    given[given.index("-config") + 1] = os.devnull
    os.execv(engine, [engine, *given])


if __name__ == "__main__":
    main(*sys.argv[1:])
