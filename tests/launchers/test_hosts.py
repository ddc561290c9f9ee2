"""Processes on several hosts: network namespaces, and folders that are not the same everywhere."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from children import ROOT

from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_file
from lockstep.distributed.local_group import LocalGroup, join
from lockstep.launchers import spread
from lockstep.launchers.srun import first_host, take_part
from lockstep.launchers.torchrun import check_shared
from lockstep.system.supervision import WorkerError

HOSTS = load_file(ROOT / "benchmarks" / "hosts.py")


@pytest.mark.full  # two hosts with a group each have all of it
def test_two_hosts_compute_what_one_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Digest and ledger are compared, over a network that takes a millisecond."""
    try:
        HOSTS.Hosts(1).close()
    except PermissionError as error:
        pytest.skip(str(error))
    assert HOSTS.compare(2, HOSTS.Network(0.001), HOSTS.RUN)
    assert "digest: " in capsys.readouterr().out


GROUPS = [*HOSTS.RUN, "--scheme.shards", "8", "--scheme.lag", "1"]
"""A run in which a group's three learners have unequal parts of its four shards."""


def test_two_hosts_with_a_group_each_compute_what_one_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Started as srun does."""
    try:
        HOSTS.Hosts(1).close()
    except PermissionError as error:
        pytest.skip(str(error))
    assert HOSTS.compare(2, HOSTS.Network(0.001), GROUPS, slurm=True, layout="cpu:a1-l3-d2")
    assert "digest: " in capsys.readouterr().out


def started(number: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    """The program of one of two groups, as torchrun starts it on a host with no other."""
    ranks = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments, "--display", "none", "--layout", "cpu:a1-l1-d2"],
        env={
            **os.environ,
            **{k: str(v) for k, v in ranks.items()},
            "MASTER_ADDR": "localhost",
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


def test_a_lost_process_ends_all_groups_and_the_run_continues_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second group's collector kills itself; both programs name it. The resumed run ends as an undisturbed one."""
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text(
        "import os, signal\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Deadly(CartPoleEnv):\n"
        "    steps = 0\n"
        "    def step(self, action):\n"
        "        self.steps += 1\n"
        "        if os.environ.get('RANK') == '1' and self.steps == 40 and not os.path.exists('dead'):\n"
        "            open('dead', 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().step(action)\n"
    )
    run = [*GROUPS, "--env.id", "env.py:Deadly", "--no-tensorboard", "--no-check-env"]
    port = free_port()
    programs = [started(each, port, "train", *run, "--run", "apart", "--checkpoint-every", "1") for each in range(2)]
    said = [program.communicate(timeout=120)[1] for program in programs]
    assert [program.returncode for program in programs] == [1, 1], said
    assert all("Collector 1 of 2 was ended by SIGKILL" in each for each in said), said
    assert "Group 1 of 2 (host " in said[0]
    port = free_port()
    other = ["--checkpoint-every", "2"]  # the first group's option holds for both
    programs = [started(each, port, "resume", "apart", *other[: 2 * each]) for each in range(2)]
    out, errors = zip(*(program.communicate(timeout=120) for program in programs), strict=True)
    assert [program.returncode for program in programs] == [0, 0], errors
    alone = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", *run, "--run", "alone", "--display", "none", "--layout", "inline"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out[0].splitlines()[-1] == alone.stdout.splitlines()[-1]
    assert Path("apart/ledger.jsonl").read_bytes() == Path("alone/ledger.jsonl").read_bytes()


def test_the_first_of_three_groups_passes_on_what_another_says() -> None:
    """The second and the third have no connection: progress and the failure of one reach the other."""
    ends, together = join(multiprocessing.get_context("spawn"), 3, set()), threading.Barrier(3)

    def heard(rank: int) -> str:
        group = LocalGroup(ends[rank])
        try:
            with spread._connected(group, "localhost") as others:
                assert len(others.connections) == (2 if rank == 0 else 1)
                if rank == 1:
                    others.moved("a step")
                while rank != 1 and not others.moved(None):
                    wait(others.connections, timeout=60)
                    assert others.failure() is None
                together.wait(60)
                if rank == 1:
                    raise WorkerError("Its collector was lost.")
                while (failure := others.failure()) is None:
                    wait(others.connections, timeout=60)
                raise WorkerError(failure)
        except WorkerError as error:
            return str(error)
        finally:
            group.close()

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(heard, range(3))
    assert second == "Its collector was lost."
    assert first == third and first.startswith("Group 1 of 3 (host ") and first.endswith("): Its collector was lost.")


def meet(*folders: Path) -> list[str]:
    """What processes say that take these for their run's folder, all at once."""
    ends = join(multiprocessing.get_context("spawn"), len(folders), set())

    def answer(rank: int) -> str:
        group = LocalGroup(ends[rank])
        try:
            check_shared(group, folders[rank] / "run.json", visible=0.05)
        except SettingsError as error:
            return str(error)
        finally:
            group.close()
        return "met"

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(answer, range(len(folders))))


def test_all_processes_must_see_the_runs_folder(tmp_path: Path) -> None:
    one, older, none = (tmp_path / name for name in ("one", "older", "none"))
    for folder in (one, older):
        folder.mkdir()
        (folder / "run.json").write_text(folder.name)
    assert meet(one, one, one) == ["met"] * 3
    for other in (older, none):
        said = meet(one, one, other)
        assert all(f"not the same folder on all hosts: on {socket.gethostname()} it" in each for each in said), said


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("rack[2-3,7]-node[08-11],login", "rack2-node08"),
        ("a,b[1-2]", "a"),
        ("n[05,7]", "n05"),
        ("10.0.0.[1-2]", "10.0.0.1"),
    ],
)
def test_processes_meet_on_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_tasks_of_srun_take_part_without_torchrun() -> None:
    """The fifth of five tasks, which is on the third node."""
    slurm = {"SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}
    slurm |= {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_ID": "10"}
    told = dict(slurm)
    take_part(told)
    ranks = {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n1"}
    assert told == slurm | ranks | {"MASTER_PORT": "20070"}
    for untouched in ({"RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "5"}):  # torchrun's; a batch script's
        found = dict(untouched)
        take_part(found)
        assert found == untouched
