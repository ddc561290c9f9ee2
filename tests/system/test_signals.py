"""What a run does when it is asked to stop, and what programs that environments start hear of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from children import Child, dispositions

from lockstep.launchers.watching import stopping_on_signals
from lockstep.system import children
from lockstep.system.supervision import unattended
from lockstep.training.context import RunStatus

ROOT = Path(__file__).parents[2]
SMALL = (
    *("train", "ppo-cartpole", "--env.adapter", "gymnasium", "--env.num-envs", "4", "--scheme.shards", "4"),
    *("--scheme.acting-batch", "0", "--algorithm.rollout", "16", "--algorithm.minibatches", "1", "--no-tensorboard"),
    *("--total-steps", "64", "--run", "run", "--display", "none"),
    "--no-check-env",  # which would play these environments before the run does
)
ENV = """
import multiprocessing, subprocess, time
from pathlib import Path
import gymnasium

HERE = Path(__file__).parent

class Hanging(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action):
        (HERE / "stepping").touch()
        time.sleep(1000)

class Starting(gymnasium.Wrapper):
    "Takes long, in a worker."

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        if multiprocessing.parent_process() is not None:
            (HERE / "starting").touch()
            time.sleep(1000)

class Owning(gymnasium.Wrapper):
    "Has a program, as the clients of simulators do."

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.program = subprocess.Popen(["sleep", "1000"])

    def close(self):
        self.program.terminate()
        self.program.wait()
        super().close()
"""


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file with the environments, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text(ENV)
    return "env.py"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of requests to stop, to be set."""
    now = [0.0]
    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_programs_and_processes_that_an_environment_starts_hear_signals_though_its_own_process_does_not() -> None:
    ours, theirs = Pipe()
    process = children.start(dispositions, (theirs,), "lockstep-test")
    try:
        assert ours.poll(120), "it waits for what does not end"
        stops, ended = ours.recv()
    finally:
        process.kill()
        process.join()
    ignored = [number for number in (1, 2, 15) if signal.getsignal(number) == signal.SIG_IGN]  # as under nohup
    assert stops == ignored, "signals that its program ignores or blocks"
    assert ended == [-signal.SIGTERM] * 3


def test_an_environment_that_owns_a_program_ends_it_in_a_collector_s_process(
    env: str, start: Callable[..., Child]
) -> None:
    child = start(*SMALL, "--env.id", f"{env}:Owning", "--layout", "cpu:a1-l1,env_processes=1")
    assert child.wait() == 0, child.output()
    assert "digest: " in child.output()


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # Python handles it here at the latest


def test_a_second_sigterm_ends_at_once_unless_it_is_an_echo(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    status = RunStatus()
    status.begin()
    with pytest.raises(KeyboardInterrupt), stopping_on_signals(status):
        send(signal.SIGTERM)
        assert status.stop_requested()
        for clock[0], number in ((0.5, signal.SIGTERM), (0.6, signal.SIGHUP), (9.0, signal.SIGHUP)):
            send(number)
        send(signal.SIGTERM)
        pytest.fail("it goes on")
    assert capsys.readouterr().err.count("SIGTERM: checkpoint and stop") == 1


def test_a_second_ctrl_c_ends_at_once_unless_it_is_an_echo(clock: list[float]) -> None:
    status = RunStatus()
    status.begin()
    with pytest.raises(KeyboardInterrupt), stopping_on_signals(status):
        for clock[0] in (0.0, 0.01):  # as `timeout --signal INT` sends it to the process and to its group
            send(signal.SIGINT)
        assert status.stop_requested()
        clock[0] = 0.1
        send(signal.SIGINT)
        pytest.fail("it goes on")


def test_a_sweep_may_pass_a_sigterm_on_late(clock: list[float]) -> None:
    status = RunStatus()
    status.begin()
    with unattended(pytest.fail), stopping_on_signals(status):
        for clock[0] in (0.0, 60.0):
            send(signal.SIGTERM)
    assert status.stop_requested()


def test_the_first_signal_ends_a_run_that_has_not_begun(capsys: pytest.CaptureFixture[str]) -> None:
    status = RunStatus()
    with pytest.raises(KeyboardInterrupt), stopping_on_signals(status):
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)  # an echo, which does not disturb the end
    assert capsys.readouterr().err.count("before the first iteration") == 1 and not status.stop_requested()


def test_a_handler_that_is_not_python_s_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    known = signal.getsignal

    def of_a_program(number: int) -> Any:
        """As if a program in which Python is embedded handled SIGTERM."""
        return None if number == signal.SIGTERM else known(number)

    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", of_a_program)
        before = known(signal.SIGTERM)
        with stopping_on_signals(RunStatus()):
            assert known(signal.SIGTERM) == before and callable(known(signal.SIGINT))
    assert known(signal.SIGTERM) == before


def test_a_signal_while_a_process_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = BaseProcess.start, list[BaseProcess]()

    def signalled(self: BaseProcess) -> None:
        start(self)
        started.append(self)
        send(signal.SIGINT)

    monkeypatch.setattr(BaseProcess, "start", signalled)
    with pytest.raises(KeyboardInterrupt), stopping_on_signals(RunStatus()):
        children.start(time.sleep, (60.0,), "lockstep-test")
    try:
        assert [process.exitcode for process in started] == [-signal.SIGKILL]
    finally:
        started[0].kill()


def test_a_process_that_stands_in_native_code_is_ended_by_a_thread() -> None:
    code = (
        "import ctypes, os, signal\n"
        "from lockstep.system import children\n"
        "children._ENDING = 0.1\n"
        "libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "libc.pthread_mutex_lock(mutex)\n"
        "with children.handling_stops(print), children.ending_for_certain(lambda number: number == signal.SIGTERM):\n"
        "    print('locked', flush=True)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == b"locked\n"
    process.terminate()
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130 and b"SIGTERM" in error, error


def test_an_inline_run_whose_step_hangs_ends_at_the_second_sigterm(env: str, start: Callable[..., Child]) -> None:
    child = start(*SMALL, "--env.id", f"{env}:Hanging")
    child.until(lambda: Path("stepping").exists(), "the first step")
    child.signal(signal.SIGTERM)
    child.until(lambda: "SIGTERM: checkpoint and stop" in child.output(), "the answer to the first SIGTERM")
    time.sleep(1.1 * children._ECHO)
    child.signal(signal.SIGTERM)
    assert child.wait() == 130


def test_a_run_whose_workers_still_start_ends_at_the_first_sigterm(env: str, start: Callable[..., Child]) -> None:
    child = start(*SMALL, "--env.id", f"{env}:Starting", "--layout", "processes:2")
    child.until(lambda: Path("starting").exists(), "the first constructor")
    child.signal(signal.SIGTERM)
    assert child.wait() == 130
    assert "before the first iteration" in child.output()
