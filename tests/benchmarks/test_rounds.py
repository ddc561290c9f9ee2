"""Systems measured in turn: processes that answer when they are asked, and the table of their rates."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from children import until
from other_systems import installed, served
from other_systems.installed import PeerError
from other_systems.rounds import interleave, table
from other_systems.served import Served


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> contextlib.closing[Served]:
    """A peer's process that runs this script beside _serve.py."""
    folder = Path(served.__file__).parent
    (tmp_path / "_serve.py").write_text((folder / "_serve.py").read_text())
    (tmp_path / "script.py").write_text(text)
    monkeypatch.setattr(served, "__file__", str(tmp_path / "served.py"))
    return contextlib.closing(Served("Peer", Path(sys.executable), "script.py", {"samples": 10}))


def test_a_process_answers_as_often_as_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "import json, sys, time\nfrom _serve import serve\nsamples = json.loads(sys.argv[1])['samples']\n"
        "def train():\n    print('chatter')\n    time.sleep(0.02)\n    return samples\nserve(train)\n"
    )
    with start(tmp_path, monkeypatch, text) as peer:
        for seconds in (0.0, 0.1):
            # Of sleeps that only ever last longer: at most the nominal rate.
            assert 0 < peer.measure(seconds) <= 10 / 0.02
        stat = Path(f"/proc/{peer.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it to stop, so that it disturbs nobody")


def test_a_process_that_ends_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        start(tmp_path, monkeypatch, "import sys; sys.exit('what it said')") as peer,
        pytest.raises(PeerError, match=r"Peer ended with code 1:\nwhat it said"),
    ):
        peer.measure(0.0)


def test_rows_are_measured_in_turn_without_those_that_fail() -> None:
    order: list[str] = []

    def row(name: str, *rates: float) -> float:
        order.append(name)
        if order.count(name) > len(rates):
            raise PeerError("no more")
        return rates[order.count(name) - 1]

    rows = {"a": lambda: row("a", 1.0, 2.0), "b": lambda: row("b", 3.0), "c": lambda: row("c", 4.0, 5.0)}
    said: list[str] = []
    assert interleave(rows, 2, said.append) == {"a": [1.0, 2.0], "c": [4.0, 5.0]}
    assert order == ["a", "b", "c", "c", "b", "a"]  # forth and back
    assert "b is left out: no more" in said


def test_ratios_are_to_the_fastest_row_of_a_peer() -> None:
    found = {"lockstep": [3000.0, 4000.0, 9000.0], "Peer, 1 thread": [1000.0], "Peer, 2 threads": [2000.0]}
    assert table(found, ("Peer", "Absent")).splitlines() == [
        "|  | samples/s | beside Peer |",
        "|---|---|---|",
        "| lockstep | 4,000 (3,000 to 9,000) | 2.00 × |",
        "| Peer, 1 thread | 1,000 (1,000 to 1,000) | 0.50 × |",
        "| Peer, 2 threads | 2,000 (2,000 to 2,000) | 1.00 × |",
    ]


def test_a_repository_is_cloned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path / "source"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setenv("LOCKSTEP_PEERS", str(tmp_path / "peers"))
    (tmp_path / "source").mkdir()
    git("init", "--quiet")
    commits = []
    for text in ("old", "new"):
        (tmp_path / "source" / "file").write_text(text)
        git("add", "file")
        git("commit", "--quiet", "--message", text)
        commits.append(git("rev-parse", "HEAD"))
    folder = installed.clone_of("peer", str(tmp_path / "source"), commits[0])
    assert (folder / "file").read_text() == "old"
    assert installed.clone_of("peer", "nowhere", commits[0]) == folder
    with pytest.raises(PeerError, match="peer cannot be installed"):
        installed.clone_of("peer", str(tmp_path / "nowhere"), commits[1])
