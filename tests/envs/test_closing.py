"""What environments do at the end ends nothing else."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import pytest

from lockstep.envs import closing
from lockstep.envs.closing import close_all

ROOT = Path(__file__).parents[2]


class Standing(gymnasium.Wrapper):
    """An environment whose close() waits for ever."""

    def close(self) -> None:
        time.sleep(1000)


class Failing(Standing):
    def close(self) -> None:
        raise OSError("the simulator has gone")


class Closing(Standing):
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "_PATIENCE", 0.05)
    monkeypatch.setattr(closing, "_LATER_PATIENCE", 0.05)
    monkeypatch.setattr(closing, "_patience", None)


def in_a_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [lambda call: call(), in_a_thread], ids=["main-thread", "another-thread"])
def test_a_close_that_stands_still_is_given_up_and_named(
    run: Callable[[Callable[[], None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    env = gymnasium.make("CartPole-v1")
    last = Closing(env)
    run(lambda: close_all([Standing(gymnasium.wrappers.TimeLimit(env, 9)), Failing(env), Standing(env), last]))
    error = capsys.readouterr().err
    assert error.count("close() of the environment Standing") == 1
    assert "the simulator has gone" in error and last.closed


def test_the_place_is_shown_where_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    close_all([Standing(gymnasium.make("CartPole-v1"))])
    assert "time.sleep(1000)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_close_that_stands_in_native_code_ends_the_process() -> None:
    code = (
        "import ctypes\n"
        "from lockstep.envs import closing\n"
        "closing._PATIENCE = closing._GRACE = 0.1\n"
        "class Env:\n"
        "    def close(self):\n"
        "        mutex = ctypes.create_string_buffer(64)\n"
        "        for _ in range(2):\n"
        "            ctypes.CDLL(None).pthread_mutex_lock(mutex)\n"
        "closing.close_all([Env()])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ran.returncode == 1 and "close() of the environment Env" in ran.stderr
