"""Ray's workers that begin with torch, Ray and lockstep imported, which takes each of them three seconds otherwise.

Ray's nodes start their workers themselves, so forks.py cannot. But what they run for it can be chosen: ray_worker.py,
for which a server, this file, forks. Clusters that lockstep starts itself have ordinary workers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fork_server import DEATH, begin, end, prepare
from forks import KIND, MARK, NO_MARK, ROOM, Order, prctl
from ray_worker import SERVER

_MODULES = ("ray", "ray._private.node", "lockstep.launchers.ray.actors", "lockstep.training.loops")
_NOT_FOR_WORKERS = (b"--language", b"--serialized-runtime-env-context")
"""Arguments for the program in whose place ray_worker.py is."""


@contextlib.contextmanager
def forked_workers(real: bool) -> Iterator[None]:
    """Nodes that this process starts have such workers, unless those that begin anew are asked for."""
    if real:
        yield
        return
    params = importlib.import_module("ray._private.parameter").RayParams
    starting = functools.partialmethod(
        params.__init__, setup_worker_path=str(Path(__file__).with_name("ray_worker.py"))
    )
    with tempfile.TemporaryDirectory() as folder, socket.socket(*KIND) as listening:
        address = f"{folder}/server"
        listening.bind(address)
        listening.listen(64)
        command = [sys.executable, __file__, str(listening.fileno()), str(os.getpid()), "x" * ROOM]
        environment = {**os.environ, MARK: NO_MARK}
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[listening.fileno()])
        try:
            with mock.patch.dict(os.environ, {SERVER: address}), mock.patch.object(params, "__init__", starting):
                yield
        finally:
            server.kill()
            server.wait()


def main() -> None:
    listening, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    prctl(DEATH, signal.SIGKILL)
    path, first = sys.path[1:], _asked(listening)
    os.environb.update(first[0]["environment"])  # Ray reads its node's settings when it is imported
    prepare(_MODULES)
    order = _serve(listening, parent, first)
    script = os.fsdecode(order.arguments[1])
    sys.path[:] = [str(Path(script).parent), *path]
    sys.orig_argv[:] = map(os.fsdecode, order.arguments)
    sys.argv[:] = sys.orig_argv[1:]
    runpy.run_path(script, run_name="__main__")
    end(0)


def _asked(listening: socket.socket) -> tuple[dict[str, Any], list[int], socket.socket]:
    """What the next ray_worker.py says about itself, its files, and where it waits for an answer."""
    channel, _ = listening.accept()
    message, files, _, _ = socket.recv_fds(channel, 1 << 20, 3)
    return pickle.loads(message), files, channel


def _order(given: dict[str, Any]) -> Order:
    """In a fork: what to become, of what ray_worker.py says about itself."""
    words = [word for word in map(os.fsencode, given["arguments"]) if not word.startswith(_NOT_FOR_WORKERS)]
    return Order(os.getppid(), **(given | {"arguments": words, "flags": 0, "files": [0, 1, 2], "group": os.getpid()}))


def _serve(listening: socket.socket, parent: int, first: tuple[dict[str, Any], list[int], socket.socket]) -> Order:
    """Returns in the forks."""
    given, files, channel = first
    while os.getppid() == parent:
        if os.fork() == 0:
            return begin(functools.partial(_order, given), files, channel)
        for file in files:
            os.close(file)
        channel.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        given, files, channel = _asked(listening)
    os._exit(0)


if __name__ == "__main__":
    main()
