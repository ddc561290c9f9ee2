from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sentences import says

from lockstep.cli import common
from lockstep.cli.main import VERBS, main
from lockstep.config.extras import install_command
from lockstep.kernels import cache
from lockstep.system.supervision import WorkerError

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def complaint(capsys: Captured, *arguments: str) -> str:
    """Run a command that is a user's mistake; return its one paragraph."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_help_names_every_verb_and_needs_no_torch() -> None:
    code = (
        "import sys; from lockstep.cli.main import main; status = main(['--help']);"
        "assert 'torch' not in sys.modules and 'tyro' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {verb} " in done.stdout for verb in VERBS)


@pytest.mark.real_processes
def test_module_is_the_command() -> None:
    command = [sys.executable, "-m", "lockstep", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout.split()[0]) == (0, "lockstep")


def test_no_verb_shows_the_usage_and_fails(capsys: Captured) -> None:
    assert main([]) == 2
    assert "usage: lockstep" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: Captured) -> None:
    assert main([verb, "--help"]) == 0
    assert f"lockstep {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "meant"), [("trian", "train"), ("evl", "eval"), ("Verify", "verify")])
def test_unknown_verb_names_close_ones(given: str, meant: str, capsys: Captured) -> None:
    assert f"Did you mean {meant}" in complaint(capsys, given)


@pytest.mark.parametrize("verb", ["eval", "record", "plot", "verify", "replay", "resume"])
def test_folder_that_is_no_run(verb: str, capsys: Captured) -> None:
    assert "runs/nothing does not exist" in complaint(capsys, verb, "runs/nothing")


def test_diff_of_folders_that_are_no_runs(capsys: Captured) -> None:
    assert "a does not exist" in complaint(capsys, "diff", "a", "b")


def test_layout_errors_come_before_work(capsys: Captured) -> None:
    assert "Unknown layout 'proceses:2'" in complaint(capsys, "verify", "runs/x", "--layout", "proceses:2")


def test_other_ranks_say_nothing(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    common.say("text")
    assert main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_interrupt_and_worker_failure_have_their_exit_codes(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    def failed(arguments: list[str]) -> int:
        raise WorkerError("Worker 1 of 2 was ended by SIGKILL")

    def broken(arguments: list[str]) -> int:
        raise RuntimeError("a defect")

    monkeypatch.setattr("lockstep.cli.catalog.recipes", interrupted)
    assert main(["recipes"]) == 130
    monkeypatch.setattr("lockstep.cli.catalog.recipes", failed)
    assert main(["recipes"]) == 1
    assert says(capsys.readouterr().err, "Worker 1 of 2", "SIGKILL")
    monkeypatch.setattr("lockstep.cli.catalog.recipes", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["recipes"])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WorkerError("Worker 0 of 2 was ended by SIGKILL")])
def test_a_terminal_gets_its_cursor_back(
    error: BaseException, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr("lockstep.cli.catalog.recipes", ended)
    main(["recipes"])
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    main(["recipes"])
    assert capsys.readouterr().out == "\x1b[?25h\n"


def test_help_of_a_command_may_be_asked_for_by_a_word(capsys: Captured) -> None:
    assert main(["help", "eval"]) == 0
    assert capsys.readouterr().out.startswith("usage: lockstep eval RUN")
    assert "no command 'evl'" in complaint(capsys, "help", "evl")


def test_recipes(capsys: Captured) -> None:
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ppo-cartpole"].startswith("PPO on CartPole")
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed and text in printed for name, text in found.items())


def test_envs(capsys: Captured) -> None:
    assert main(["envs", "cartpole-V1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "gymnasium" in found["CartPole-v1"] and all("cartpole-v1" in name.lower() for name in found)
    assert main(["envs", "CartPole-v1"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out


def test_unknown_env_names_close_ones(capsys: Captured) -> None:
    assert "Did you mean CartPole-v1" in complaint(capsys, "envs", "CartPol-v1x")


@pytest.mark.slow
def test_doctor_examines_and_measures(capsys: Captured) -> None:
    assert main(["doctor", "--seconds", "0.01", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["cores"] >= 1 and report["machine"]["memory_gigabytes"] > 0
    assert report["packages"]["torch"] != "missing"
    assert report["extras"]["wandb"]["install"] == install_command("wandb")
    assert report["speed"]["CartPole-v1 environment steps"] > 0
    assert report["speed"]["Atari network, bf16, trained samples"] > 0
    assert main(["doctor", "--seconds", "0"]) == 0
    printed = capsys.readouterr().out
    assert "memory" in printed and "speed" not in printed
    assert f"kernels   {cache.folder()}: " in printed


@pytest.mark.parametrize(
    "words",
    [
        "doctor --seconds nan",
        "doctor --seconds -1",
        "doctor --seconds inf",
        "bench ppo-cartpole --seconds inf",
        "tune ppo-cartpole --budget inf",
    ],
)
def test_times_that_no_clock_reaches_are_refused(words: str, capsys: Captured) -> None:
    assert " ".join(words.split()[-2:]) in complaint(capsys, *words.split())


def test_doctor_says_that_kernels_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("lockstep.cli.doctor.kernels_folder", lambda: None)
    assert main(["doctor", "--seconds", "0"]) == 0
    assert "kernels   compiled anew by every process" in capsys.readouterr().out


def test_progress_of_children_goes_to_standard_error_too(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; from lockstep.cli.common import progress_to_stderr, say_json\n"
        "with progress_to_stderr():\n"
        "    print('progress')\n"
        "    subprocess.run([sys.executable, '-c', 'print(\"child\")'], check=True)\n"
        "say_json({'a': 1})"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert json.loads(done.stdout) == {"a": 1}
    assert sorted(done.stderr.split()) == ["child", "progress"]


def test_every_host_is_told_of_a_mistake_once(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    for local, told in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", local)
        common.complain("no such thing")
        assert capsys.readouterr().err.count("no such thing") == told
