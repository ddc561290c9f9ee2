"""Processes on several hosts: network namespaces, and folders that are not the same everywhere."""

from __future__ import annotations

import multiprocessing
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from children import ROOT

from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_file
from lockstep.distributed.local_group import LocalGroup, join
from lockstep.launchers.torchrun import check_shared

HOSTS = load_file(ROOT / "benchmarks" / "hosts.py")


def test_two_hosts_compute_what_one_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Digest and ledger are compared, over a network that takes a millisecond."""
    try:
        HOSTS.Hosts(1).close()
    except PermissionError as error:
        pytest.skip(str(error))
    assert HOSTS.compare(2, HOSTS.Network(0.001), HOSTS.RUN)
    assert "digest: " in capsys.readouterr().out


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
