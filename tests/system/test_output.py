"""Nobody who watches any more, or cannot show a letter, ends a run; what ends one is told."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import TIMEOUT, until
from sentences import says

from lockstep.cli.common import say_json
from lockstep.cli.main import main
from lockstep.config.settings import SettingsError
from lockstep.run import checkpoint
from lockstep.run.files import write_whole, writing
from lockstep.run.folder import RunFolder
from lockstep.system.output import PatientConsole, print_line
from lockstep.training.display import LiveDisplay

ROOT = Path(__file__).parents[2]
SMALL = (
    *("ppo-cartpole", "--env.adapter", "gymnasium", "--env.num-envs", "4", "--scheme.shards", "4"),
    *("--scheme.acting-batch", "0", "--algorithm.rollout", "16", "--algorithm.minibatches", "1", "--no-tensorboard"),
)
FAILING = """
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class Failing(CartPoleEnv):
    def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 20:
            {fault}
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if {nan} and self.steps == 40 else reward, *rest
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command(*arguments: str) -> str:
    return " ".join([f"PYTHONPATH={ROOT}", sys.executable, "-m", "lockstep", *arguments])


def test_a_reader_that_has_gone_ends_nothing() -> None:
    reading, writing_end = os.pipe()
    with os.fdopen(writing_end, "w") as stream:
        print_line("heard", stream)
        assert os.read(reading, 100) == b"heard\n"
        os.close(reading)
        for _ in range(3):
            print_line("not heard", stream)
    closed = io.StringIO()
    closed.close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        print_line("nor this", closed)
    print_line("nor this", None)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_pipe_loses_a_line_and_not_all_that_follow() -> None:
    reading, writing_end = os.pipe()
    os.set_blocking(writing_end, False)
    with os.fdopen(reading, "rb", 0) as reader, os.fdopen(writing_end, "w") as stream:
        for _ in range(3):
            print_line("x" * 100_000, stream)
        while len(reader.read(100_000)) == 100_000:
            pass
        print_line("after", stream)
        assert reader.read(100_000).endswith(b"after\n")


def test_a_console_s_reader_may_go() -> None:
    reading, writing_end = os.pipe()
    with os.fdopen(writing_end, "w") as stream:
        os.close(reading)
        display = LiveDisplay("title", "folder", PatientConsole(file=stream, force_terminal=True, width=80))
        display.message("not seen")
        display.message("nor this")
        display.close()


def test_letters_that_an_encoding_lacks_are_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    print_line("a · b", stream)
    assert raw.getvalue() == b"a ? b\n"


@pytest.mark.parametrize("errors_too", [False, True])
@pytest.mark.parametrize("layout", ["inline,learner_delay=1", "processes:2,learner_delay=1"])
def test_ctrl_c_in_a_pipe_still_writes_the_checkpoint(layout: str, errors_too: bool) -> None:
    """Ctrl-C ends `tee`, too, so that the next line, printed before the checkpoint, has no reader."""
    words = ("train", *SMALL, "--total-steps", "1M", "--layout", layout, "--run", "run", "--display", "plain")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, even if these tests ignore it
    try:
        reader = subprocess.Popen(["tee", "log"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        pipe = reader.stdin
        assert pipe is not None
        with pipe:
            process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *words],
                stdout=pipe,
                stderr=pipe if errors_too else subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    metrics = Path("run/metrics.jsonl")

    def two_iterations() -> bool:
        assert process.poll() is None, Path("log").read_text()
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= 2

    try:
        until(two_iterations, "two iterations", 0.05)
        reader.send_signal(signal.SIGINT)
        reader.wait(TIMEOUT)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
    finally:
        for each in (reader, process):
            each.kill()
            each.wait()
    saved = checkpoint.open_checkpoint(checkpoint.latest("run/checkpoints"))
    assert saved.iteration >= 2


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise BrokenPipeError(32, 'the simulator has died')", "BrokenPipeError: [Errno 32] the simulator has died"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_what_a_user_s_environment_raises_is_neither_silent_nor_success(fault: str, told: str) -> None:
    Path("env.py").write_text(FAILING.format(fault=fault, nan=False))
    words = [sys.executable, "-m", "lockstep", "train", *SMALL, "--env.id", "env.py:Failing", "--run", "run"]
    ran = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 1
    assert told in ran.stderr and "env.py" in ran.stderr


@pytest.mark.parametrize("layout", ["inline", "processes:2"])
def test_an_environment_that_closes_standard_output_takes_nothing_of_it(layout: str) -> None:
    fault = "import os, sys; sys.stdout and sys.stdout.close(); sys.stdout = None; os.closerange(1, 2)"
    Path("env.py").write_text(FAILING.format(fault=fault, nan=False))
    flags = ["--env.id", "env.py:Failing", "--run", "run", "--total-steps", "256", "--display", "plain"]
    words = [sys.executable, "-m", "lockstep", "train", *SMALL, *flags, "--layout", layout]
    ran = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert "digest: " in ran.stdout
    assert all(json.loads(line) for line in Path("run/ledger.jsonl").read_text().splitlines())


def test_one_score_that_is_no_number_neither_ends_a_run_nor_stands_for_the_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("env.py").write_text(FAILING.format(fault="pass", nan=True))
    flags = ["--env.id", "env.py:Failing", "--run", "run", "--total-steps", "6k", "--display", "none"]
    flags += ["--on-nonfinite", "continue", "--checkpoint-every", "1"]
    assert main(["train", *SMALL, *flags, "--scheme.shards", "1"]) == 1, "its losses are no numbers either"
    lines = [json.loads(line) for line in RunFolder.open("run").metrics.read_text().splitlines()]
    assert capsys.readouterr().err.count("env.py:Failing returned") == 1
    assert any("score/mean" in line and line["score/mean"] is None for line in lines)
    assert lines[-1]["score/mean"] > 0 and lines[-1]["score/best"] > 0
    assert checkpoint.best_iteration("run/checkpoints") in (1, 2), "with finite parameters"


def test_json_has_no_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"score": float("nan"), "all": [1.0, float("inf"), {"a": (2, float("-inf"))}]})
    assert json.loads(capsys.readouterr().out) == {"score": None, "all": [1.0, None, {"a": [2, None]}]}


def test_json_is_alone_though_an_environment_prints(capfd: pytest.CaptureFixture[str]) -> None:
    Path("env.py").write_text(FAILING.format(fault="pass", nan=False) + "print('connecting to the simulator')\n")
    arguments = [*SMALL, "--env.id", "env.py:Failing", "--layout", "inline", "--dry-run", "--json"]
    assert main(["train", *arguments]) == 0
    told = capfd.readouterr()
    assert json.loads(told.out)["layout"] == "inline" and "connecting" in told.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", *SMALL, "--run", "/proc/nothing/run"),
        ("train", *SMALL, "--run", "file/run"),
        ("sweep", "file/sweep", "ppo-cartpole"),
    ],
)
def test_places_that_cannot_be_written_are_named(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert main([*arguments]) == 2
    assert "error: Cannot write " in capsys.readouterr().err


def test_writing_passes_on_what_is_no_matter_of_files() -> None:
    with pytest.raises(ZeroDivisionError), writing("here"):
        raise ZeroDivisionError
    with pytest.raises(SettingsError, match="write here: No space left"), writing("here"):
        raise OSError(28, "No space left on device")


def test_closed_standard_streams_end_nothing() -> None:
    short = ("--total-steps", "128", "--layout", "processes:2", "--run", "run", "--display", "none")
    ran = subprocess.run(f"{command('train', *SMALL, *short)} <&- 2>&-", shell=True, stdout=subprocess.PIPE, text=True)
    assert ran.returncode == 0 and "digest: " in ran.stdout


def test_a_message_out_of_a_signal_s_handler_ends_nothing() -> None:
    class Busy(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    print_line("stopping", Busy())


@pytest.mark.parametrize("layout", ["inline", "processes:2"])
def test_a_full_disk_is_told(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("failing.py").write_text(FAILING.format(fault="raise OSError(28, 'No space left on device')", nan=False))
    assert main(["train", *SMALL, "--env.id", "failing.py:Failing", "--layout", layout, "--display", "none"]) == 1
    told = capsys.readouterr().err
    assert says(told, "error: ", "The disk is full") and "[Errno 28] No space" in told


def test_a_full_disk_leaves_no_half_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert main(["train", *SMALL, "--run", "run"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert main(["train", *SMALL, "--run", "run", "--total-steps", "64", "--display", "none"]) == 0
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "fsync", full)
        write_whole(Path("file"), b"text")
    assert [path.name for path in Path().iterdir()] == ["run"]
    with pytest.raises(SettingsError, match=r"File name too long\b.*shorter"), writing("x"):
        Path(300 * "x").mkdir()
