"""A peer's process that measures whenever it is asked, and waits in between, so that rounds can be interleaved."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from other_systems.installed import PeerError

_ANSWER = "samples/s "
"""How a line begins that answers; a peer may print others."""


class Served:
    """A script of this folder, under the Python of a peer. The first answer includes what it compiles.

    Between measurements it is stopped, because threads of some libraries spin while they wait.
    """

    def __init__(
        self, peer: str, python: Path, script: str, task: Mapping[str, Any], variables: Mapping[str, str] | None = None
    ) -> None:
        self._peer = peer
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name(script)), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(variables or {})},
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def measure(self, seconds: float) -> float:
        """Samples per second over at least this time.

        Raises:
            PeerError: it ended; the text has the last lines of its errors.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(OSError):  # it has ended, and its output ends as well
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                self._process.send_signal(signal.SIGSTOP)
                return float(line.removeprefix(_ANSWER))
        self._process.wait()
        self._errors.seek(0)
        last = "\n".join(self._errors.read().strip().splitlines()[-6:])
        raise PeerError(f"{self._peer} ended with code {self._process.returncode}:\n{last}")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.communicate()
        self._errors.close()


def rate_of(
    name: str, start: Callable[[], Served], seconds: float, stack: contextlib.ExitStack
) -> Callable[[], float] | None:
    """Start a peer and let it compile. Returns what measures it for so many seconds, or None if it cannot run here.

    Args:
        stack: closes the peer.
    """
    print(f"starting {name} …", flush=True)
    try:
        served = stack.enter_context(contextlib.closing(start()))
        served.measure(0.0)
    except PeerError as error:
        print(f"{name} is left out: {error}", flush=True)
        return None
    return functools.partial(served.measure, seconds)
