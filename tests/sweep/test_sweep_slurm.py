"""Slurm's programs are scripts here; submitit, and what a job does, are real."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import ROOT, until
from clusters import script
from sentences import says
from tiny import options

from lockstep.cli.main import main
from lockstep.config.extras import install_command
from lockstep.config.serialization import from_json
from lockstep.launchers.launch import train
from lockstep.sweep.options import SweepOptions
from lockstep.sweep.queue import Queue
from lockstep.sweep.slots import Needs
from lockstep.sweep.slurm import submit_search

SMALL = (
    *("--env.adapter", "gymnasium", "--env.num-envs", "8", "--scheme.acting-batch", "0", "--algorithm.rollout", "8"),
    *("--algorithm.epochs", "1", "--algorithm.minibatches", "1", "--checkpoint-every", "2", "--no-tensorboard"),
    *("--total-steps", str(8 * 8 * 40), "--layout", "inline,learner_delay=0.05"),
)
SUBMIT = ("--slurm", "--slurm-options", "partition=long", "time=600")


@pytest.fixture
def job(cluster: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts a job as Slurm would, the only one or one of an array."""

    def begin(index: int | None = None) -> subprocess.Popen[bytes]:
        slurm = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": str(7 + (index or 0)), "SLURM_PROCID": "0"}
        if index is not None:
            slurm |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
        return subprocess.Popen(
            [sys.executable, "-m", "submitit.core._submit", str(cluster / "set/slurm")],
            env={**os.environ, **slurm, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            stderr=subprocess.DEVNULL,
        )

    return begin


def test_jobs_are_shown_before_they_are_submitted(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = ("--layout", "processes:2")
    assert main(["sweep", "set", "ppo-cartpole", *SMALL, *layouts, "--seed", "1..3", *SUBMIT, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "3 jobs: ppo-cartpole-CartPole-v1-s1-" in shown
    for line in ("--partition=long", "--time=600", "--cpus-per-task=2", "--job-name=set"):
        assert f"#SBATCH {line}" in shown
    assert not (cluster / "set").exists() and not (cluster / "submitted").exists()


def test_arrays_are_as_long_as_slurm_takes(
    cluster: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.sweep.slurm._ARRAY", 2)
    assert main(["sweep", "set", "ppo-cartpole", *SMALL, "--seed", "1..5", *SUBMIT, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^(\d) jobs?: ", shown, re.MULTILINE) == ["2", "2", "1"]


def test_replay_asks_for_memory(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "set", "dqn-cartpole", "--algorithm.replay.capacity", "1M", "--slurm", "--dry-run"]
    assert main(command) == 0
    (asked,) = re.findall(r"#SBATCH --mem=(\d+)M", capsys.readouterr().out)
    assert 3072 < int(asked) < 4096
    assert main([*command, "--slurm-options", "mem_per_cpu=9G"]) == 0
    assert "--mem=" not in capsys.readouterr().out


def test_what_free_running_runs_ask_for_and_what_no_machine_could_run(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = [
        "sweep",
        "set",
        "ppo-cartpole",
        "--env.adapter",
        "gymnasium",
        "--scheme.lag",
        "async",
        "--slurm",
        "--dry-run",
    ]
    assert main([*free, "--layout", "a0-l1"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --time=1440" in shown and "#SBATCH --gpus-per-node=2" in shown
    assert main([*free, "--layout", "cpu:a9-l1"]) == 2
    assert says(capsys.readouterr().err, "cpu:a9-l1", "scheme.shards=4")


def test_what_slurm_refuses_is_told_in_its_words(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(cluster / "bin" / "sbatch", "echo 'invalid partition specified: long' >&2; exit 1")
    assert main(["sweep", "set", "ppo-cartpole", *SMALL, *SUBMIT]) == 2
    assert "invalid partition specified: long" in capsys.readouterr().err


@pytest.mark.real_processes
def test_a_job_goes_on_after_its_time_is_up(
    cluster: Path, job: Callable[..., subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ("sweep", "set", "ppo-cartpole", *SMALL, "--seed", "1..2", *SUBMIT)
    assert main([*sweep, "--slots", "1", "--dry-run"]) == 0
    assert "2 jobs, 1 at a time: " in capsys.readouterr().out
    assert main([*sweep, "--slots", "1"]) == 0
    assert "2 jobs submitted" in capsys.readouterr().out
    assert "#SBATCH --array=0-1%1\n" in (cluster / "submitted").read_text()

    (cluster / "jobs").write_text("7_0\n7_1\n")
    assert main(["sweep", "set", *SUBMIT]) == 0
    assert "0 jobs submitted" in capsys.readouterr().out, "they have jobs already"

    queue = Queue.open(Path("set"))
    first, second = queue.entries()
    process = job(0)
    until(lambda: any((queue.run(first.name) / "checkpoints").glob("0*")), "a checkpoint")
    assert queue.state(first.name) == "running"
    process.send_signal(warning(cluster))
    process.wait(120)
    assert (cluster / "requeued").read_text() == "requeue 7_0\n"
    assert queue.state(first.name) == "waiting"
    assert main(["sweep", "set", "--status"]) == 0
    assert "is gone" not in capsys.readouterr().out
    (cluster / "jobs").write_text("7_1\n")
    assert main(["sweep", "set", "--status"]) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "is gone" in line]
    assert says(said, "job 7_0 is gone", f"{cluster}/set/slurm/7_0_0_log.err")
    assert f"--error {cluster}/set/slurm/%A_%a_%t_log.err" in (cluster / "submitted").read_text()
    assert job(0).wait(120) == 0
    outcome = queue.outcome(first.name)
    assert outcome is not None
    assert outcome.digest == train(from_json(first.experiment), options=options(Path("undisturbed"))).digest

    (cluster / "jobs").write_text("")
    assert main(["sweep", "set", *SUBMIT]) == 0
    assert f"job 7: {second.name}" in capsys.readouterr().out, "its job is gone, and the other has done its own"


SEARCH = ("--search", "algorithm.learning_rate=log:1e-4..1e-2", "--trials", "3")


# Other tests cancel a job of one run, and send SIGTERM to a sweep.
@pytest.mark.parametrize("end", ["its time is up", pytest.param("scancel", marks=pytest.mark.full)])
def test_a_search_is_one_job_which_ends_with_checkpoints(
    cluster: Path, job: Callable[..., subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str], end: str
) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    sweep = ("sweep", "set", "ppo-cartpole", *SMALL, *SEARCH, "--slots", "2", *SUBMIT)
    assert main(list(sweep)) == 0
    assert says(capsys.readouterr().out, "job 7: ", "2 runs at a time")
    queue = Queue.open(Path("set"))
    process = job()
    until(lambda: any(Path("set/runs").glob("*/checkpoints/0*")), "a checkpoint")
    (cluster / "jobs").write_text("7\n")
    assert main(["sweep", "set", "--trials", "4", *SUBMIT]) == 2
    assert says(capsys.readouterr().err, "Job 7 ", "scancel 7")
    process.send_signal(signal.SIGTERM if end == "scancel" else warning(cluster))
    process.wait(120)
    assert (cluster / "requeued").exists() == (end != "scancel")
    begun = [run for run in map(queue.run, (entry.name for entry in queue.entries())) if run.exists()]
    for run in begun:
        saved = max(
            (int(path.name) for path in (run / "checkpoints").glob("0*")), default=0
        )  # 0: told while it started
        metrics = run / "metrics.jsonl"
        rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        assert saved == rows, "it was told, not killed"
    assert {queue.state(entry.name) for entry in queue.entries()} <= {"waiting", "done"}, "no process is left"

    (cluster / "jobs").write_text("")
    assert job().wait(120) == 0
    assert {queue.state(entry.name) for entry in queue.entries()} == {"done"} and len(queue.entries()) == 3
    assert main(["sweep", "set", *SUBMIT]) == 0
    assert "nothing is left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--layout", "processes:2"), ("cpus-per-task=8",)),
        (("--layout", "a0-l1", "--slots", "3"), ("cpus-per-task=6", "gpus-per-node=6")),
        (("--layout", "a0-l1", "--slots", "3", "--runs-per-gpu", "2"), ("cpus-per-task=6", "gpus-per-node=3")),
    ],
)
def test_what_the_job_of_a_search_asks_for(
    cluster: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    assert main(["sweep", "set", "ppo-cartpole", *SMALL, *SEARCH, *flags, *SUBMIT, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "1 job, which runs" in shown and "export SRUN_CPUS_PER_TASK" in shown
    for line in wanted:
        assert f"#SBATCH --{line}\n" in shown
    assert not (cluster / "set").exists() and not (cluster / "submitted").exists()


def test_early_stops_need_a_sweep_that_watches(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = ("--stop-early", "median@1k")
    assert main(["sweep", "set", "ppo-cartpole", *SMALL, *stop, *SUBMIT]) == 2
    assert says(capsys.readouterr().err, "--stop-early median@1k", "--slurm")
    assert not Path("set").exists()
    pytest.importorskip("optuna", reason="Optuna is not installed")
    assert main(["sweep", "search", "ppo-cartpole", *SMALL, *SEARCH, *stop, *SUBMIT]) == 0
    assert json.loads(Path("search/sweep.json").read_text())["stop_early"] == "median@1k", "its job takes it from there"


def warning(cluster: Path) -> signal.Signals:
    """What Slurm sends before a job's time is up."""
    named = re.search(r"--signal=(\w+)@", (cluster / "submitted").read_text())
    assert named
    return signal.Signals[f"SIG{named[1]}"]


def test_a_cluster_that_does_not_answer(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(cluster / "bin" / "squeue", "exit 1")
    assert main(["sweep", "set", "ppo-cartpole", *SMALL, *SUBMIT]) == 2
    assert says(capsys.readouterr().err, "Slurm", "squeue")


def test_options_that_sbatch_does_not_have(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "set", "ppo-cartpole", *SMALL, "--slurm", "--slurm-options", "partiton=long"]) == 2
    assert "partiton" in capsys.readouterr().err


def test_without_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "submitit" else found(name))
    assert main(["sweep", "set", "ppo-cartpole", *SMALL, *SUBMIT, "--dry-run"]) == 2
    assert install_command("slurm") in capsys.readouterr().err


def test_the_job_of_a_search_has_room_for_its_largest_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("lockstep.sweep.slurm.executor", lambda _, settings, *__, **___: asked.append(settings))
    monkeypatch.setattr("lockstep.sweep.slurm.script", lambda _: "")
    runs, options = [Needs(1, 2, 2**30), Needs(2, 1)], SweepOptions(slots=3, runs_per_gpu=8)
    submit_search(Queue.make(tmp_path / "set"), runs, options, lambda _: None, dry_run=True)
    memory = 3 * 1024 + 3 * 2048 + 3 * 2 * 1024  # of replay, beside it for each run, and for each core
    assert asked == [{"job_name": "set", "cpus_per_task": 6, "gpus_per_node": 2, "mem": f"{memory}M"}]
