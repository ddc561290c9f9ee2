from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifests import sealed
from torch import Tensor

from lockstep.run import checkpoint
from lockstep.run.checkpoint import CheckpointError


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk only slows these tests: none of them cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def tensors(iteration: int = 0) -> dict[str, Tensor]:
    overlapping = torch.arange(12, dtype=torch.float32).reshape(6, 2) + iteration
    return {
        "scalar": torch.tensor(iteration),
        "empty": torch.zeros(0, 3),
        "bool": torch.tensor([True, False]),
        "uint8": torch.arange(250, 256).to(torch.uint8),
        "int64": torch.tensor([-(2**62), 2**62 + 1]),
        "float64": torch.tensor([1 / 3, float("nan"), float("-inf"), -0.0], dtype=torch.float64),
        "bfloat16": torch.tensor([1.0, 1e-30], dtype=torch.bfloat16),
        "strided": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).transpose(0, 2),
        "action": overlapping[1:],
        "prev_action": overlapping[:-1],
        "weight": torch.nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last) * iteration),
    }


META: dict[str, Any] = {"samples": 10**12, "scores": [0.1, None, "é"], "nested": {"10": 1, "9": 2}}


def save(directory: Path, iteration: int, *, keep: int = 3, best: bool = False) -> Path:
    parts = [
        checkpoint.write_part(directory, iteration, name, tensors(iteration), {"name": name})
        for name in ("shard-001", "learner", "shard-000")
    ]
    return checkpoint.finish(directory, iteration, parts, META, keep=keep, best=best)


def names(directory: Path) -> list[str]:
    return [path.name for path in checkpoint.list_checkpoints(directory)]


def assert_holds(path: Path, iteration: int) -> None:
    saved = checkpoint.open_checkpoint(path)
    assert (saved.iteration, saved.meta) == (iteration, META)
    assert saved.names() == ["learner", "shard-000", "shard-001"]
    for name in saved.names():
        read, meta = saved.part(name)
        assert meta == {"name": name}
        expected = tensors(iteration)
        assert set(read) == set(expected)
        for key, tensor in expected.items():
            assert (read[key].dtype, read[key].shape) == (tensor.dtype, tensor.shape)
            bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(read[key].reshape(-1).view(torch.uint8), bits), key


# ------------------------------------------------------------------------------------------- writing, reading


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 7)
    assert path == tmp_path / "checkpoints" / "00000007" == checkpoint.latest(tmp_path / "checkpoints")
    assert_holds(path, 7)
    assert sorted(p.name for p in path.iterdir()) == [
        "learner.safetensors",
        "manifest.json",
        "shard-000.safetensors",
        "shard-001.safetensors",
    ]


def test_tensors_that_were_read_own_their_memory(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    read, _ = checkpoint.open_checkpoint(path).part("learner")
    read["action"].fill_(9)
    shutil.rmtree(path)
    assert torch.equal(read["prev_action"], tensors(1)["prev_action"])


def test_equal_state_gives_equal_files(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", 5), save(tmp_path / "b", 5)
    for file in a.iterdir():
        assert file.read_bytes() == (b / file.name).read_bytes()


def test_counters_with_integer_keys_are_not_mistaken_for_damage(tmp_path: Path) -> None:
    part = checkpoint.write_part(tmp_path, 1, "learner", {}, {})
    path = checkpoint.finish(tmp_path, 1, [part], {"shards": {2: "b", 10: "a"}}, keep=1)
    saved = checkpoint.open_checkpoint(path)
    assert saved.meta == {"shards": {"2": "b", "10": "a"}}
    assert saved.part("learner") == ({}, {})


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for i in range(1, 8):
        save(tmp_path, i, keep=2, best=i in (1, 3))
    assert names(tmp_path) == ["00000003", "00000006", "00000007"]
    assert checkpoint.best_iteration(tmp_path) == 3
    assert_holds(tmp_path / "00000003", 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == names(tmp_path)


def test_a_run_resumed_from_an_earlier_one_deletes_neither_its_own_nor_the_later(tmp_path: Path) -> None:
    for i in (10, 20, 30):
        save(tmp_path, i)
    save(tmp_path, 11, keep=1)
    assert names(tmp_path) == ["00000011", "00000020", "00000030"]
    assert [p.name for p in checkpoint.set_aside_newer(tmp_path, 11)] == ["00000020.superseded", "00000030.superseded"]
    assert checkpoint.latest(tmp_path).name == "00000011"
    assert_holds(tmp_path / "00000020.superseded", 20)
    save(tmp_path, 20)
    checkpoint.set_aside_newer(tmp_path, 11)
    assert names(tmp_path) == ["00000011"]


def test_listing_is_numerical_and_sees_only_checkpoints(tmp_path: Path) -> None:
    assert checkpoint.list_checkpoints(tmp_path / "absent") == []
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.latest(tmp_path)
    for name in ("100000000", "00000020", ".partial-00000030", ".removing-00000001", "00000040.superseded", "notes"):
        (tmp_path / name).mkdir()
    assert names(tmp_path) == ["00000020", "100000000"]


def test_a_part_or_a_checkpoint_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="no part 'replay', only learner, shard-000, shard-001"):
        checkpoint.open_checkpoint(path).part("replay")
    with pytest.raises(CheckpointError, match=r"no checkpoint .*00000004\. Checkpoints there: 00000003\."):
        checkpoint.open_checkpoint(tmp_path / "00000004")


@pytest.mark.parametrize("name", ["", "..", "-1", "newest"])
def test_names_of_no_checkpoint_are_refused(run: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"Unknown checkpoint .* Use latest, best or an iteration"):
        checkpoint.find(run / "checkpoints", name)


def test_finishing_without_the_file_of_a_part_is_refused(tmp_path: Path) -> None:
    part = checkpoint.write_part(tmp_path, 1, "learner", tensors(), {})
    with pytest.raises(AssertionError):
        checkpoint.finish(tmp_path, 1, [{**part, "bytes": part["bytes"] + 1}], META, keep=1)
    with pytest.raises(FileNotFoundError):
        checkpoint.finish(tmp_path, 1, [{**part, "name": "other"}], META, keep=1)
    assert names(tmp_path) == []


# ----------------------------------------------------------------------------------------------------- damage


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with three checkpoints."""
    for i in (20, 40, 60):
        save(tmp_path / "checkpoints", i, best=i == 20)
    return tmp_path


FILES = ["manifest.json", "learner.safetensors", "shard-000.safetensors", "shard-001.safetensors"]
shared_fixture = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@shared_fixture
@given(data=st.data())
def test_any_flipped_bit_is_detected_and_its_file_named(run: Path, data: st.DataObject) -> None:
    file = run / "checkpoints" / "00000060" / data.draw(st.sampled_from(FILES), label="file")
    whole = file.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(whole) - 1), label="bit")
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    file.write_bytes(flipped)
    try:
        with pytest.raises(CheckpointError) as error:
            checkpoint.open_checkpoint(file.parent)
    finally:
        file.write_bytes(whole)
    assert file.name in str(error.value)
    assert f"lockstep resume {run} --checkpoint 00000040" in str(error.value)


@shared_fixture
@given(data=st.data())
def test_truncation_is_detected_and_its_file_named(run: Path, data: st.DataObject) -> None:
    file = run / "checkpoints" / "00000060" / data.draw(st.sampled_from(FILES), label="file")
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1), label="length")])
    try:
        with pytest.raises(CheckpointError) as error:
            checkpoint.open_checkpoint(file.parent)
    finally:
        file.write_bytes(whole)
    assert file.name in str(error.value)


def test_a_missing_file_is_named_and_the_newest_intact_checkpoint_offered(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "00000060" / "shard-001.safetensors").unlink()
    (checkpoints / "00000040" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"shard-001\.safetensors cannot be read.*--checkpoint 00000020"):
        checkpoint.open_checkpoint(checkpoints / "00000060")
    (checkpoints / "00000020" / "learner.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="earlier one"):
        checkpoint.open_checkpoint(checkpoints / "00000060")


def test_the_command_that_is_offered_quotes_the_run(tmp_path: Path) -> None:
    checkpoints = tmp_path / "my run" / "checkpoints"
    for i in (20, 40):
        save(checkpoints, i)
    (checkpoints / "00000040" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=re.escape(f"lockstep resume '{tmp_path}/my run' --checkpoint 00000020")):
        checkpoint.open_checkpoint(checkpoints / "00000040")


def test_damage_after_opening_is_detected_when_a_part_is_read(run: Path) -> None:
    saved = checkpoint.open_checkpoint(run / "checkpoints" / "00000060")
    with (saved.path / "learner.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError, match=r"learner\.safetensors has .* bytes, but"):
        saved.part("learner")
    assert saved.part("shard-000")[1] == {"name": "shard-000"}


def test_a_manifest_of_another_format_is_named(run: Path) -> None:
    file = run / "checkpoints" / "00000060" / "manifest.json"
    file.write_bytes(sealed({**json.loads(file.read_bytes()), "version": 2}))
    with pytest.raises(CheckpointError, match="has format version 2"):
        checkpoint.open_checkpoint(file.parent)


def test_a_damaged_best_checkpoint_counts_as_none_and_stops_no_run(run: Path) -> None:
    checkpoints = run / "checkpoints"
    assert checkpoint.best_iteration(checkpoints) == 20
    (checkpoints / "00000020" / "manifest.json").write_bytes(b"{")
    assert checkpoint.best_iteration(checkpoints) is None
    save(checkpoints, 80, keep=3)
    assert names(checkpoints) == ["00000040", "00000060", "00000080"]
    save(checkpoints, 100, keep=1, best=True)
    assert checkpoint.best_iteration(checkpoints) == 100


def test_the_best_of_what_a_resume_set_aside_no_longer_counts(run: Path) -> None:
    save(run / "checkpoints", 80, keep=4, best=True)
    checkpoint.set_aside_newer(run / "checkpoints", 60)
    assert checkpoint.best_iteration(run / "checkpoints") == 20


# ---------------------------------------------------------------------------------------------------- crashes


class Crash(BaseException):
    """Stands for the end of the process."""


STEPS = ("replace", "rename", "fsync", "mkdir", "unlink", "rmdir")


def crash_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Let so many system calls that change the file system succeed, and no further one."""
    done = 0

    def limited(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if done == steps:
                raise Crash
            done += 1
            return call(*args, **kwargs)

        return wrapper

    for name in STEPS:
        monkeypatch.setattr(os, name, limited(getattr(os, name)))


def crashes(monkeypatch: pytest.MonkeyPatch, prepare: Callable[[], None], act: Callable[[], object]) -> Iterator[int]:
    """Crash at each step of act in turn, yielding after each crash; ends once act completes."""
    for steps in range(1000):
        prepare()
        with monkeypatch.context() as patch:
            crash_after(patch, steps)
            try:
                act()
                return
            except Crash:
                pass
        yield steps


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("iteration", [3, 2], ids=["next", "again"])
def test_a_crash_at_any_step_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int, best: bool
) -> None:
    directory = tmp_path / "checkpoints"

    def prepare() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        save(directory, 1, best=True)
        save(directory, 2)

    seen = set()
    for step in crashes(monkeypatch, prepare, lambda: save(directory, iteration, keep=1, best=best)):
        for path in checkpoint.list_checkpoints(directory):
            assert_holds(path, int(path.name))
        checkpoint.recover(directory)
        assert [p.name for p in directory.iterdir() if p.name.startswith(".")] == []
        newest = checkpoint.latest(directory)
        assert int(newest.name) in (2, iteration), step
        for path in checkpoint.list_checkpoints(directory):
            assert_holds(path, int(path.name))
        recorded = checkpoint.best_iteration(directory)
        assert recorded in ((1, iteration) if best else (1,))
        assert f"{recorded:08d}" in names(directory)
        seen.add((newest.name, recorded))
        save(directory, iteration, keep=1, best=best)
        assert names(directory) == sorted({f"{iteration:08d}"} if best else {"00000001", f"{iteration:08d}"})
    assert len(seen) == 1 + (iteration == 3 or best), "a checkpoint and its mark come together"


def test_a_crash_while_recovering_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "checkpoints"

    def prepare() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        save(directory, 1)
        save(directory, 2)
        os.rename(directory / "00000002", directory / ".replaced-00000002")
        checkpoint.write_part(directory, 2, "learner", tensors(2), {})
        shutil.copytree(directory / "00000001", directory / ".removing-00000000")

    steps = 0
    for _ in crashes(monkeypatch, prepare, lambda: checkpoint.recover(directory)):
        steps += 1
        checkpoint.recover(directory)
        assert names(directory) == ["00000001", "00000002"]
        assert_holds(directory / "00000002", 2)
        assert [p.name for p in directory.iterdir() if p.name.startswith(".")] == []
    assert steps >= 8


def test_contents_reach_the_disk_before_the_name_and_the_name_before_anything_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    events: list[tuple[str, str]] = []
    rename = os.rename

    def recorded_rename(source: Path, target: Path) -> None:
        events.append(("rename", target.name))
        rename(source, target)

    monkeypatch.setattr(os, "rename", recorded_rename)
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name)))
    save(tmp_path, 2, keep=1)
    files = [".shard-001.safetensors", ".learner.safetensors", ".shard-000.safetensors", ".manifest.json"]
    assert events == [
        *(("fsync", f"{file}.partial") for file in files),
        ("fsync", ".partial-00000002"),
        ("rename", "00000002"),
        ("fsync", tmp_path.name),
        ("rename", ".removing-00000001"),
    ]


def test_recovering_where_nothing_was_written_is_harmless(tmp_path: Path) -> None:
    checkpoint.recover(tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()


KILLED = textwrap.dedent("""
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    from lockstep.run import checkpoint

    torch.set_num_threads(1)
    directory = Path(sys.argv[1])

    def write(i):
        t = {"x": torch.full((1000,), float(i))}
        parts = [checkpoint.write_part(directory, i, name, t, {}) for name in ("a", "b")]
        checkpoint.finish(directory, i, parts, {"i": i}, keep=2, best=i % 5 == 0)

    os.fsync = lambda descriptor: None
    random.seed(0)
    begin = time.perf_counter()
    write(1)
    write(2)
    seconds, trials = time.perf_counter() - begin, 0
    while trials < 15 or int(checkpoint.latest(directory).name) < 5:
        trials += 1
        checkpoint.recover(directory)
        first = int(checkpoint.latest(directory).name)
        child = os.fork()
        if child == 0:
            for i in range(first, first + 10000):
                write(i)
        time.sleep(random.uniform(0.0, 2.0 + trials / 10) * seconds)  # longer and longer: the machine may get busier
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        checkpoint.recover(directory)
        left = [p.name for p in directory.iterdir() if p.name.startswith(".")]
        assert not left, left
        found = checkpoint.list_checkpoints(directory)
        assert int(found[-1].name) >= first and len(found) >= min(2, first), found
        for path in found:
            saved = checkpoint.open_checkpoint(path)
            assert saved.meta == {"i": int(path.name)} and saved.part("b")[0]["x"][0] == int(path.name)
        best = checkpoint.best_iteration(directory)
        assert best is None or f"{best:08d}" in [p.name for p in found]
    print(found[-1].name)
""")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigkill_at_random_moments_leaves_intact_checkpoints(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "checkpoints")], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5
