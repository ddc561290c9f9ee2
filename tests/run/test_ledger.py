from __future__ import annotations

import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.layout import Layout
from lockstep.run import ledger
from lockstep.run.ledger import Ledger, LedgerError
from lockstep.run.platform import this_platform
from lockstep.sweep.queue import write_json

HEAD = {"version": 1, "experiment": "e" * 64, "settings": {"seed": 1, "env": {"id": "CartPole-v1"}}, "platform": {}}


def line(i: int, **changes: Any) -> dict[str, Any]:
    shards = {str(s): {"obs": f"{i:08x}{s:08x}", "reward": f"{s:08x}{i:08x}"} for s in (10, 2, 0)}
    entry = {
        "normalizer": {"mean": f"{i:016x}"},
        "parameters": {"encoder.0.weight": f"{i:016x}", "a.bias": f"{i + 1:016x}"},
        "gradient": {s: f"{i:016x}" for s in shards},
        "rollout": shards,
        "collected_with": max(0, i - 1),
        "iteration": i,
    }
    return {**entry, **changes}


def write(path: Path, iterations: int = 5) -> bytes:
    writer = Ledger.create(path, HEAD)
    for i in range(iterations):
        writer.append(line(i))
    writer.close()
    return path.read_bytes()


# ---------------------------------------------------------------------------------------------------- digests


def test_platform_is_stable_and_plain_json(monkeypatch: pytest.MonkeyPatch) -> None:
    first = this_platform()
    assert json.loads(json.dumps(first)) == first == this_platform()
    assert first["torch"] == torch.__version__
    assert first["libraries"]["numpy"] == np.__version__
    assert first["cpu"]["model"]
    for name in ("ONEDNN_MAX_CPU_ISA", "OMP_THREAD_LIMIT", "GLIBC_TUNABLES", "NPY_DISABLE_CPU_FEATURES"):
        monkeypatch.setenv(name, "1")
        assert ledger.differing_platform(first, this_platform()) == (f"variables.{name}: absent != 1",)
        monkeypatch.delenv(name)


# ------------------------------------------------------------------------------------------------------- file


def test_what_was_written_is_read_in_canonical_order(tmp_path: Path) -> None:
    write(tmp_path / "ledger.jsonl")
    head, lines = ledger.read(tmp_path / "ledger.jsonl")
    assert head == HEAD
    assert lines == [line(i) for i in range(5)]
    assert list(lines[0]) == ["iteration", "collected_with", "rollout", "gradient", "parameters", "normalizer"]
    assert list(lines[0]["rollout"]) == list(lines[0]["gradient"]) == ["0", "2", "10"]
    assert list(lines[0]["parameters"]) == ["encoder.0.weight", "a.bias"]


def test_order_in_which_processes_report_does_not_reach_the_file(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl")
    writer = Ledger.create(tmp_path / "b.jsonl", HEAD)
    for i in range(5):
        entry = line(i)
        for name in ("rollout", "gradient"):
            entry[name] = dict(reversed(entry[name].items()))
        writer.append(dict(reversed(entry.items())))
    writer.close()
    writer.close()
    assert (tmp_path / "b.jsonl").read_bytes() == first


def test_lines_are_on_disk_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    writer = Ledger.create(tmp_path / "ledger.jsonl", HEAD)
    writer.append(line(0))
    assert len(ledger.read(tmp_path / "ledger.jsonl")[1]) == 1
    with pytest.raises(AssertionError, match="line 1 was due"):
        writer.append(line(2))
    writer.close()


def test_an_existing_ledger_is_never_overwritten(tmp_path: Path) -> None:
    before = write(tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match="exists already"):
        Ledger.create(tmp_path / "ledger.jsonl", HEAD)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("kept", [0, 3, 5])
@pytest.mark.parametrize("torn", [b"", b"\n", b'{"iteration":5,"coll', b'{"iteration":5}\n'])
def test_reopening_cuts_and_continues_as_if_never_interrupted(tmp_path: Path, kept: int, torn: bytes) -> None:
    whole = write(tmp_path / "whole.jsonl")
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(whole + torn)
    writer = Ledger.reopen(path, kept)
    assert writer.iterations == kept
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: kept + 1])
    for i in range(kept, 5):
        writer.append(line(i))
    writer.close()
    assert path.read_bytes() == whole


def test_reopening_after_more_lines_than_there_are_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    whole = write(tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match=r"\b5 iterations\b.*checkpoint.*\b6\b"):
        Ledger.reopen(tmp_path / "ledger.jsonl", 6)
    (tmp_path / "ledger.jsonl").write_bytes(whole[:-1])
    with pytest.raises(LedgerError, match=r"\b4 iterations\b.*checkpoint.*\b5\b.*--checkpoint"):
        Ledger.reopen(tmp_path / "ledger.jsonl", 5)
    with pytest.raises(LedgerError, match=r"iteration 4.*incomplete"):
        ledger.read(tmp_path / "ledger.jsonl")
    assert (tmp_path / "ledger.jsonl").read_bytes() == whole[:-1]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A ledger of four iterations, whose file may be changed."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    return path, write(path, 4)


@settings(max_examples=300)
@given(data=st.data())
def test_changing_any_character_is_detected_and_its_iteration_named(
    written: tuple[Path, bytes], data: st.DataObject
) -> None:
    path, whole = written
    offset = data.draw(st.integers(0, len(whole) - 1), label="offset")
    value = data.draw(st.integers(0, 255).filter(lambda v: v != whole[offset]), label="byte")
    path.write_bytes(whole[:offset] + bytes([value]) + whole[offset + 1 :])
    number = whole[:offset].count(b"\n")
    with pytest.raises(LedgerError) as error:
        ledger.read(path)
    assert error.value.iteration == (number - 1 if number else None)
    assert (f"iteration {number - 1} " if number else "the head ") in str(error.value)


@pytest.mark.parametrize(
    ("order", "bad"), [([0, 2, 3], 0), ([0, 2, 1, 3], 0), ([0, 1, 1, 2], 1), ([1, 2, 3], None), ([0, 1, 2], -1)]
)
def test_removed_repeated_and_swapped_lines_are_detected(tmp_path: Path, order: list[int], bad: int | None) -> None:
    rows = write(tmp_path / "ledger.jsonl", 3).splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(rows[i] for i in order))
    if bad == -1:  # lines missing at the end are a shorter run, which the checkpoints tell
        assert len(ledger.read(tmp_path / "ledger.jsonl")[1]) == 2
        return
    with pytest.raises(LedgerError) as error:
        ledger.read(tmp_path / "ledger.jsonl")
    assert error.value.iteration == bad


def test_a_missing_empty_or_foreign_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="There is no ledger"):
        ledger.read(tmp_path / "ledger.jsonl")
    (tmp_path / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(LedgerError, match="is empty"):
        ledger.read(tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match="is empty"):
        Ledger.reopen(tmp_path / "ledger.jsonl", 0)
    Ledger.create(tmp_path / "later.jsonl", {**HEAD, "version": 2}).close()
    with pytest.raises(LedgerError, match="has format 2"):
        ledger.read(tmp_path / "later.jsonl")


# ------------------------------------------------------------------------------------------------- comparison


def lines(*changes: tuple[int, dict[str, Any]], count: int = 4) -> list[dict[str, Any]]:
    result = [line(i) for i in range(count)]
    for i, change in changes:
        result[i] = {**result[i], **change}
    return result


def test_equal_runs_have_no_difference() -> None:
    assert ledger.compare(HEAD, lines(), HEAD, lines()) is None
    assert ledger.compare({**HEAD, "platform": {"cpu": "x"}}, lines(), HEAD, lines()) is None


def test_the_cause_is_named_before_its_effects() -> None:
    rollout = {**line(2)["rollout"], "10": {"obs": "x", "reward": "x"}}
    everything: dict[str, Any] = {
        "collected_with": 0,
        "rollout": rollout,
        "gradient": {**line(2)["gradient"], "2": "g", "10": "h"},
        "parameters": {"encoder.0.weight": "p", "a.bias": "q"},
        "normalizer": {"mean": "m"},
    }
    expected = [
        ("the version that collected", "1", "0"),
        ("rollout of shard 10, obs", "000000020000000a", "x"),
        ("gradient of shard 2", f"{2:016x}", "g"),
        ("parameter encoder.0.weight", f"{2:016x}", "p"),
        ("normalizer.mean", f"{2:016x}", "m"),
    ]
    for where, a, b in expected:
        found = ledger.compare(HEAD, lines(), HEAD, lines((2, everything), (3, {"parameters": {}})))
        assert found is not None
        assert (found.iteration, found.where, found.a, found.b) == (2, where, a, b)
        assert str(found) == f"Iteration 2: {where} differs, {a} != {b}."
        everything.pop(next(iter(everything)))


def test_the_first_shard_and_the_first_iteration_come_first() -> None:
    both = {"10": {"obs": "y"}, "2": {"obs": "x"}, "0": line(1)["rollout"]["0"]}
    found = ledger.compare(HEAD, lines(), HEAD, lines((3, {"collected_with": 9}), (1, {"rollout": both})))
    assert found is not None
    assert (found.iteration, found.where, found.b) == (1, "rollout of shard 2, obs", "x")


def test_an_entry_that_only_one_run_has_differs() -> None:
    changed = dict(line(0)["gradient"])
    del changed["10"]
    less = lines((0, {"gradient": changed}))
    for a, b, sides in ((lines(), less, ("0" * 16, "absent")), (less, lines(), ("absent", "0" * 16))):
        found = ledger.compare(HEAD, a, HEAD, b)
        assert found is not None
        assert (found.where, found.a, found.b) == ("gradient of shard 10", *sides)
    found = ledger.compare(HEAD, lines(), HEAD, lines((2, {"events": []})))
    assert found is not None
    assert (found.iteration, found.where) == (2, "the timing decisions")


def test_lengths_count_unless_fewer_iterations_are_asked_for() -> None:
    found = ledger.compare(HEAD, lines(), HEAD, lines(count=3))
    assert found is not None
    assert (found.iteration, found.where, found.a, found.b) == (3, "length", "4 iterations", "3 iterations")
    assert ledger.compare(HEAD, lines(), HEAD, lines(count=3), iterations=3) is None
    assert ledger.compare(HEAD, lines((3, {"parameters": {}})), HEAD, lines(), iterations=3) is None
    short = ledger.compare(HEAD, lines(), HEAD, lines(count=3), iterations=4)
    assert short is not None
    assert short.where == "length"
    both_short = ledger.compare(HEAD, lines(count=3), HEAD, lines(count=3), iterations=4)
    assert both_short is not None


def test_settings_are_named_with_the_difference_or_alone() -> None:
    other = {**HEAD, "experiment": "f" * 64, "settings": {"seed": 2, "env": {"id": "Acrobot-v1"}, "new": [1, 2]}}
    alone = ledger.compare(HEAD, lines(), other, lines())
    assert alone is not None
    assert (alone.iteration, alone.where, alone.a, alone.b) == (None, "settings: seed", "1", "2")
    assert alone.settings == ("env.id: CartPole-v1 != Acrobot-v1", "new: absent != [1, 2]")
    found = ledger.compare(HEAD, lines(), other, lines((0, {"collected_with": 5})))
    assert found is not None
    assert re.match(r"Iteration 0: the version that collected .*0 != 5 \(.*: seed:", str(found))
    forged = ledger.compare(HEAD, lines(), {**HEAD, "experiment": "f" * 64}, lines())
    assert forged is not None
    assert forged.where == "settings: identity"


def test_a_platform_names_all_that_bits_depend_on() -> None:
    found = this_platform()
    assert set(found) == {"cpu", "gpu", "cudnn", "torch", "python", "os", "libraries", "variables"}
    assert set(found["cpu"]) == {"model", "features", "capability"} and found["cpu"]["capability"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3])) and found["os"].startswith("Linux")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two models of GPU, and the file of their driver."""

    def properties(device: str) -> SimpleNamespace:
        name = ["Large", "Small MIG 1g.10gb"][int(device.removeprefix("cuda:"))]
        return SimpleNamespace(name=name, major=9, minor=0, multi_processor_count=132 if name == "Large" else 16)

    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version:  gcc 12.2.0\n"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr("lockstep.run.gpus._DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    return tmp_path / "version"


def of(layout: str) -> dict[str, Any]:
    return this_platform(layout=Layout.parse(layout))


@pytest.mark.usefixtures("two_gpus")
def test_a_platform_names_the_gpus_that_a_layout_uses_and_no_others() -> None:
    assert of("processes:2") == this_platform() and this_platform()["gpu"] == []
    found = of("a0,0-l1")
    assert json.loads(json.dumps(found)) == found
    assert found["gpu"] == ["Large", "Small MIG 1g.10gb"]
    assert found["devices"] == {"collecting": "Large", "learning": "Small MIG 1g.10gb"}
    assert found["cuda"]["driver"] == "570.86.15" and {"runtime", "cublas"} < set(found["cuda"])
    assert found["cuda"]["models"]["Large"] == {"capability": "9.0", "multiprocessors": 132, "mig": False}
    assert found["cuda"]["models"]["Small MIG 1g.10gb"]["mig"]
    assert found["cuda"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert of("acpu-l0")["devices"] == {"collecting": "CPU", "learning": "Large"}


@pytest.mark.usefixtures("two_gpus")
def test_a_platform_is_that_of_every_layout_with_the_same_devices() -> None:
    alone = of("inline,device=0")
    for text in ("processes:4,device=0", "a0-l0", "a0,0-l0,0", "inline,device=0,graphs=1"):
        assert of(text) == alone, text
    assert ledger.differing_platform(alone, of("acpu-l0")) == ("devices.collecting: Large != CPU",)
    on_cpu = ("devices.collecting: Large != CPU", "devices.learning: Large != CPU")
    assert ledger.differing_platform(alone, of("inline")) == on_cpu


def test_a_driver_whose_version_is_hidden_is_none(two_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    two_gpus.unlink()
    monkeypatch.setattr("ctypes.CDLL", missing)
    found = of("inline,device=0")["cuda"]
    assert found["driver"] is found["cublas"] is None


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_earlier_versions_recorded_for_a_whole_machine_say_nothing() -> None:
    earlier = {**this_platform(), "gpu": ["Large"], "cudnn": 90100}
    for now in (this_platform(), of("inline,device=0")):
        assert ledger.differing_platform(earlier, now) == ledger.differing_platform(now, earlier) == ()
    assert ledger.differing_platform(earlier, {**this_platform(), "torch": "1.0"}) != ()


def test_a_checkpoint_relies_on_lines_that_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    writer = Ledger.create(tmp_path / "ledger.jsonl", HEAD)
    writer.append(line(0))
    synced.clear()
    writer.sync()
    assert synced == ["ledger.jsonl"]
    writer.close()
    write_json(tmp_path / "entry.json", 1)
    assert synced[-1] == tmp_path.name, "the name of a file is in its folder"


def test_the_last_line_of_another_format_is_refused_too(tmp_path: Path) -> None:
    writer = Ledger.create(tmp_path / "later.jsonl", {**HEAD, "version": 2})
    writer.append(line(0))
    writer.close()
    with pytest.raises(LedgerError, match="has format 2"):
        ledger.read_last(tmp_path / "later.jsonl", 1)


def test_another_platform_is_named_as_a_cause() -> None:
    here, there = ({**HEAD, "platform": {"torch": x, "libraries": {"numpy": "1"}}} for x in ("1", "2"))
    found = ledger.compare(here, lines(), there, lines((0, {"collected_with": 5})))
    assert found is not None and found.settings == ("platform.torch: 1 != 2",)


def test_libraries_of_one_platform_alone_were_not_used() -> None:
    here, there = {"libraries": {"numpy": "1", "mujoco": "3"}}, {"libraries": {"numpy": "2", "minatar": "1"}}
    assert ledger.differing_platform(here, there) == ("libraries.numpy: 1 != 2",)


def test_another_version_of_an_environment_is_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"mpe2": "1.1", "numpy": "2"}
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or metadata.distribution("no-such-thing"))
    here = this_platform()
    versions["mpe2"] = "1.2"
    assert ledger.differing_platform(here, this_platform()) == ("libraries.mpe2: 1.1 != 1.2",)


def test_first_lines_are_read_whatever_follows(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(write(path, 3)[:-20])
    assert ledger.read(path, 2) == (HEAD, [line(0), line(1)])
    assert ledger.read_last(path, 2) == (HEAD, line(1)) and ledger.read_last(path, 0) == (HEAD, HEAD)
    with pytest.raises(LedgerError, match=r"\b2 iterations\b"):
        ledger.read(path, 3)
