"""A run whose terminal is closed, as when a connection breaks."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from children import ROOT, TIMEOUT, until

from lockstep.run import checkpoint

FLAGS = (
    *("--env.adapter", "gymnasium", "--algorithm.rollout", "8", "--layout", "inline,learner_delay=0.05"),
    *("--checkpoint-every", "1000", "--no-tensorboard"),
)
OWNING = """# Makes the terminal its own, with what SIGHUP is to mean, and becomes what follows.
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[2], sys.argv[2:])
"""

TRAIN, SWEEP = ("train", "ppo-cartpole", "--run", "run"), ("sweep", "set", "ppo-cartpole")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        (TRAIN, False),
        pytest.param(TRAIN, True, marks=pytest.mark.full),  # a sweep's processes train, and ignore it, too
        pytest.param(SWEEP, False, marks=pytest.mark.full),
        (SWEEP, True),
    ],
)
def test_a_closed_terminal_loses_nothing(words: tuple[str, ...], ignored: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", *words, *FLAGS]
    hangup = "SIG_IGN" if ignored else "SIG_DFL"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", OWNING, hangup, *command],
        stdin=theirs,
        stdout=subprocess.DEVNULL if ignored else theirs,
        stderr=subprocess.DEVNULL if ignored else theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(theirs)
    os.set_blocking(ours, False)

    def iterations() -> int:
        return sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("**/metrics.jsonl"))

    def learns(more: int = 5) -> bool:
        with contextlib.suppress(OSError):
            os.read(ours, 100_000)  # else what it prints would wait for a reader
        return iterations() >= more

    try:
        until(learns, "some iterations", 0.05)
        os.close(ours)
        if ignored:  # by nohup: it goes on
            begun = iterations()
            until(lambda: learns(begun + 20), "more iterations", 0.05)
            process.terminate()
        assert process.wait(TIMEOUT) == 130
    finally:
        process.kill()
    (folder,) = (path.parent for path in tmp_path.glob("**/metrics.jsonl"))
    assert int(checkpoint.latest(folder / "checkpoints").name) == iterations()
