"""What Ray's nodes run to start a worker, with its command line: it has the server of ray_forks.py fork one."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import sys

SERVER = "LOCKSTEP_TEST_RAY_FORKS"
"""The environment variable with the address of the server's socket."""


def main() -> None:
    given = {
        "arguments": [sys.executable, *sys.argv[1:]],
        "environment": dict(os.environb),
        "folder": os.getcwdb(),
        "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "cores": os.sched_getaffinity(0),
        "limits": [resource.getrlimit(value) for name, value in vars(resource).items() if name.startswith("RLIMIT_")],
        "umask": os.umask(0),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ[SERVER])
        socket.send_fds(server, [pickle.dumps(given)], [0, 1, 2])
        assert server.recv(64).isdigit(), "The server could not fork; its output says why."


if __name__ == "__main__":
    main()
