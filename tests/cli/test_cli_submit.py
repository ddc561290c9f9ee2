"""One run as a Slurm job. Slurm's programs are scripts here; submitit, and what the tasks do, are real."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from children import ROOT, until
from sentences import says

from lockstep import recipes
from lockstep.cli.main import main
from lockstep.cli.submit import SubmitArguments, _settings
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.run.folder import RunFolder

RUN = (
    *("ppo-cartpole", "--env.adapter", "gymnasium", "--scheme.acting-batch", "0", "--algorithm.rollout", "8"),
    *("--algorithm.epochs", "1", "--algorithm.minibatches", "1", "--checkpoint-every", "2", "--no-tensorboard"),
    *("--total-steps", str(8 * 8 * 40), "--display", "none"),
)
TASKS = ("--nodes", "2", "--tasks-per-node", "2")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["submit", *RUN, *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["submit", *RUN, *arguments]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_script_is_shown(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--slurm-options", "partition=long", "time=600", "--dry-run")
    text = shown(capsys, "--run", "runs/one", *TASKS, "--layout", "torchrun,env_processes=3", *options)
    wanted = ("nodes=2", "ntasks-per-node=2", "cpus-per-task=3", "job-name=one", "partition=long", "time=600")
    for line in wanted:
        assert f"#SBATCH --{line}\n" in text
    assert text.splitlines()[0] == "#!/bin/bash" and "srun" in text
    assert not (cluster / "submitted").exists() and not Path("runs").exists()
    text = shown(capsys, "--run", "runs/one", "--layout", "cpu:a2-l1", "--scheme.lag", "async", *options)
    assert "#SBATCH --cpus-per-task=3\n" in text and "#SBATCH --ntasks-per-node=1\n" in text
    text = shown(capsys, "--run", "runs/one", *TASKS, "--layout", "torchrun,device=0", "--dry-run")
    assert "#SBATCH --gpus-per-task=1\n" in text, "the nodes have GPUs, whatever this machine has"
    groups = ("--scheme.shards", "8", "--nodes", "2", "--layout", "a0-l1,2,3-d2", "--precision", "fp32")
    text = shown(capsys, "--run", "runs/one", *groups, "--dry-run")
    assert "#SBATCH --gpus-per-node=4\n" in text and "#SBATCH --cpus-per-task=4\n" in text, "a group on each node"
    text = shown(capsys, "--run", "runs/one", *TASKS, "--dry-run", "--json")
    assert "#SBATCH --nodes=2\n" in json.loads(text)["script"]


def test_what_cannot_work_is_refused_before_it_waits_in_a_queue(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "needs --run FOLDER" in refused(capsys, *TASKS)
    run = ("--run", "runs/one")
    assert "starts its processes itself" in refused(capsys, *run, *TASKS, "--layout", "processes:4")
    assert "8 processes for scheme.shards=4" in refused(capsys, *run, "--nodes", "4", "--tasks-per-node", "2")
    assert says(refused(capsys, *run, *TASKS, "--scheme.lag", "async"), "freely", "separate processes")
    assert says(refused(capsys, *run, "--nodes", "0"), "nodes", "at least 1")
    assert "torchrun,device=0" in refused(capsys, *run, *TASKS, "--layout", "torchrun,device=0+1")
    assert "torchrun,device=0" in refused(capsys, *run, *TASKS, "--layout", "torchrun,device=local")
    groups = ("--layout", "a0-l1-d2", "--tasks-per-node", "2", "--slurm-options", "gpus_per_task=2")
    assert says(refused(capsys, *run, *groups), "gpus_per_task=2", "only its own GPUs", "Leave it out")
    assert says(refused(capsys, *run, "--model.encoder", "nature"), "model.encoder=nature", "images")
    assert "missing.py" in refused(capsys, *run, "--callback", "missing.py:follow")
    assert "partiton" in refused(capsys, *run, "--slurm-options", "partiton=long")
    Path("full").mkdir()
    Path("full/file").touch()
    assert says(refused(capsys, "--run", "full"), "full ", "not empty")
    assert not (cluster / "submitted").exists()


@pytest.fixture
def tasks(cluster: Path) -> Iterator[Callable[[], list[subprocess.Popen[str]]]]:
    """Starts the two tasks of job 7 as Slurm would."""
    started: list[subprocess.Popen[str]] = []
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]

    def begin() -> list[subprocess.Popen[str]]:
        for rank in range(2):
            slurm = {
                "SUBMITIT_EXECUTOR": "slurm",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "localhost",
                "SLURM_JOB_NUM_NODES": "1",
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "MASTER_PORT": str(port),
            }
            path = os.pathsep.join([str(ROOT), *sys.path])
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "submitit.core._submit", str(cluster / "runs/one.slurm")],
                    env={**os.environ, **slurm, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        return started[-2:]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_job_trains_and_goes_on_after_it_was_canceled(
    cluster: Path, tasks: Callable[[], list[subprocess.Popen[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("--run", "runs/one", "--tasks-per-node", "2", "--layout", "torchrun,learner_delay=0.05")
    assert "job 7: runs/one\n" in shown(capsys, *run)
    assert "#SBATCH --ntasks-per-node=2" in (cluster / "submitted").read_text()

    first = tasks()
    until(lambda: any(Path("runs/one/checkpoints").glob("0*")), "a checkpoint")
    for process in first:
        process.terminate()  # as scancel does
    stopped = [process.communicate(timeout=120)[0] for process in first]
    assert [process.returncode for process in first] == [0, 0]
    assert ": lockstep resume runs/one" in stopped[0]
    second = tasks()
    printed, other = (process.communicate(timeout=120)[0].splitlines() for process in second)
    assert [process.returncode for process in second] == [0, 0]

    assert main(["train", *RUN, "--run", "alone"]) == 0
    digest = capsys.readouterr().out.splitlines()[-1]
    assert digest.startswith("digest: ") and digest in printed
    assert digest not in other, "only the first task speaks"
    ledgers = [RunFolder(Path(name)).ledger.read_bytes() for name in ("runs/one", "alone")]
    assert ledgers[0] == ledgers[1]

    assert "another experiment" in refused(capsys, *run, "--seed", "2")


def test_a_layout_that_starts_its_processes_itself_gets_the_gpus_of_its_node() -> None:
    given = SubmitArguments(recipes.ppo_cartpole(), RunOptions(run="runs/one"))
    for layout, gpus in (("a0,1-l2", {"gpus_per_node": 3}), ("torchrun,device=0", {"gpus_per_task": 1}), ("ray:2", {})):
        asked = _settings(given, Layout.parse(layout))
        assert {name: count for name, count in asked.items() if name.startswith("gpus")} == gpus


def test_lines_of_the_shell_run_before_the_program(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ("setup=module load cuda/12.1; source env.sh", "teardown=date", "srun_args=--mpi none", "exclusive=true")
    text = shown(capsys, "--run", "runs/one", "--slurm-options", *lines, "--dry-run").splitlines()
    begin, program, end = (text.index(line) for line in ("# setup", "# command", "# teardown"))
    assert "module load cuda/12.1; source env.sh" in text[begin:program] and "date" in text[end:]
    assert any(line.startswith("export SRUN_CPUS_PER_TASK") for line in text[begin:program])
    assert any(line.startswith("srun ") and "--mpi none" in line for line in text[program:end])
    assert "#SBATCH --exclusive" in text


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("setup=3", "must be a shell command"),
        ("time=10:00:00", "whole number, of minutes"),
        ("cpus_per_task=many", "whole number"),
        ("use_srun=maybe", "true or false"),
        ("additional_parameters=3", "dict"),
        ("partiton=long", "Did you mean partition"),
        ("nodes=2", "--nodes"),
        ("map_count=2", "leave it out"),
    ],
)
def test_options_that_slurm_does_not_have_or_of_another_kind_are_named(
    option: str, words: str, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, "--run", "runs/one", "--slurm-options", option, "--dry-run")
    assert option in told and words in told
