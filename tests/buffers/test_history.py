"""Replay in checkpoints: exact, each step written once, and no checkpoint changed by the next."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from test_replay_buffer import World, experiment

from lockstep.buffers.history import History
from lockstep.buffers.replay import Replay
from lockstep.core.rollout import Rollout
from lockstep.run import checkpoint
from lockstep.run.checkpoint import CheckpointError


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk only slows these tests: none of them cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def assert_equal_from_here(memory: Replay, twin: Replay, rollouts: list[Rollout], n: int = 16) -> None:
    """Both draw the same, now and after each of some rollouts."""
    for number, each in enumerate([None, *rollouts]):
        if each is not None:
            memory.insert(each)
            twin.insert(each)
        drawn, again = (m.draw(n, np.random.default_rng(number)) for m in (memory, twin))
        assert all(np.array_equal(a, b) for a, b in zip(drawn, again, strict=True))
        for a, b in zip(memory.batch(*drawn).leaves(), twin.batch(*again).leaves(), strict=True):
            assert torch.equal(a, b)
        if "priorities" in memory.state():
            for m in (memory, twin):
                m.prioritize(*drawn[:2], np.random.default_rng(number).random(n))


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(("steps", "rollout", "afresh"), [(40, 5, 7), (200, 7, 3), (21, 4, 10**9)])
def test_every_kept_checkpoint_restores_what_was(
    steps: int, rollout: int, afresh: int, once: bool, tmp_path: Path
) -> None:
    settings = experiment(steps=steps, envs=3, n_step=3, rollout=rollout, prioritized=True, once=once)
    rollouts = list(World(3, 9, "noise", 0.03).rollouts(rollout, 300 // rollout, afresh))
    memory, history = Replay(settings, rollouts[0]), History(0)
    draw = np.random.default_rng(1)
    for number, each in enumerate(rollouts[:-6]):
        memory.insert(each)
        if number >= 2:
            memory.prioritize(*memory.draw(8, draw)[:2], draw.random(8))
        if number % 3 == 2:
            checkpoint.finish(tmp_path, number, history.save(tmp_path, number, memory), {}, keep=3, best=number == 5)
    numbers = [int(path.name) for path in checkpoint.list_checkpoints(tmp_path)]
    assert len(numbers) == 4 and numbers[0] == 5
    newest = checkpoint.open_checkpoint(checkpoint.latest(tmp_path))
    twins = {}
    for number in numbers:
        twins[number] = Replay(settings, rollouts[0])
        saved = checkpoint.open_checkpoint(tmp_path / f"{number:08d}")
        assert History(0).restore(saved, twins[number])
    for number in numbers[1:]:
        older = twins[number]
        for each in rollouts[number + 1 : newest.iteration + 1]:
            older.insert(each)
        assert older.count == twins[newest.iteration].count
        reference = Replay(settings, rollouts[0])
        History(0).restore(newest, reference)
        # Priorities were learned in between.
        older.load({**older.state(), **{name: reference.state()[name] for name in ("priorities", "largest")}})
        assert_equal_from_here(older, reference, rollouts[newest.iteration + 1 : newest.iteration + 4])


def test_a_restored_history_goes_on(tmp_path: Path) -> None:
    settings = experiment(steps=100, envs=2, n_step=1, rollout=6)
    rollouts = list(World(2, 5, "zero", 0.02).rollouts(6, 60))
    memory, history = Replay(settings, rollouts[0]), History(0)
    for number, each in enumerate(rollouts[:50]):
        memory.insert(each)
        if number % 5 == 4:
            parts = history.save(tmp_path, number, memory)
            path = checkpoint.finish(tmp_path, number, parts, {}, keep=1)
            memory, history = Replay(settings, rollouts[0]), History(0)
            history.restore(checkpoint.open_checkpoint(path), memory)
    whole = Replay(settings, rollouts[0])
    for each in rollouts[:50]:
        whole.insert(each)
    assert_equal_from_here(whole, memory, rollouts[50:])


def test_a_first_rollout_of_resets_alone_does_not_decide_how_observations_were_kept(tmp_path: Path) -> None:
    """A resumed run shapes its memory after the next rollout, which may be one that shows no stacks."""
    settings = experiment(steps=100, envs=2, n_step=1, rollout=6)
    stacks, noise = (list(World(2, 5, "noise", ends).rollouts(6, 40)) for ends in (0.02, 1.0))
    memory, history = Replay(settings, stacks[0]), History(0)
    for each in stacks[:30]:
        memory.insert(each)
    path = checkpoint.finish(tmp_path, 1, history.save(tmp_path, 1, memory), {}, keep=1)
    twin = Replay(settings, noise[0])
    assert twin.nbytes != memory.nbytes, "of the other kind"
    assert History(0).restore(checkpoint.open_checkpoint(path), twin)
    assert twin.nbytes == memory.nbytes
    assert_equal_from_here(memory, twin, stacks[30:])


def test_steps_are_written_once(tmp_path: Path) -> None:
    settings = experiment(steps=2048, envs=2, n_step=1, rollout=16)
    rollouts = list(World(2, 5, "zero", 0.01).rollouts(16, 200))
    memory, history = Replay(settings, rollouts[0]), History(0)
    written: set[int] = set()
    before: dict[str, int] = {}
    for number, each in enumerate(rollouts):
        memory.insert(each)
        if number % 4 != 3:
            continue
        path = checkpoint.finish(tmp_path, number, history.save(tmp_path, number, memory), {}, keep=2)
        files = {file.name: file.stat().st_ino for file in path.glob("replay-000-*")}
        anew = [name for name, inode in files.items() if before.get(name) != inode]
        assert len(anew) <= 4, "64 steps are two segments of 32, and one may have been begun before"
        written.update(files.values())
        before = files
    assert len(before) >= 64, "all that is remembered"
    inodes = {file.stat().st_ino for file in tmp_path.rglob("replay-000-*")}
    assert len(inodes) <= len(before) + 6, "checkpoints share their files"


def test_a_checkpoint_that_somebody_deletes_is_not_needed_by_the_next(tmp_path: Path) -> None:
    settings = experiment(steps=100, envs=2, n_step=1, rollout=16)
    rollouts = list(World(2, 5, "zero", 0.02).rollouts(16, 8))
    memory, history = Replay(settings, rollouts[0]), History(0)
    for number in (1, 2):
        for each in rollouts[3 * number - 3 : 3 * number]:
            memory.insert(each)
        shutil.rmtree(tmp_path / "00000001", ignore_errors=True)
        checkpoint.finish(tmp_path, number, history.save(tmp_path, number, memory), {}, keep=2)
    twin = Replay(settings, rollouts[0])
    assert History(0).restore(checkpoint.open_checkpoint(checkpoint.latest(tmp_path)), twin)
    assert_equal_from_here(memory, twin, rollouts[6:])


def test_every_segment_is_a_sign_of_life(tmp_path: Path) -> None:
    settings = experiment(steps=100, envs=2, n_step=1, rollout=16)
    rollouts = list(World(2, 5, "zero", 0.02).rollouts(16, 5))
    memory, beats = Replay(settings, rollouts[0]), list[str]()
    for each in rollouts:
        memory.insert(each)
    parts = History(0, lambda: beats.append("save")).save(tmp_path, 1, memory)
    saved = checkpoint.open_checkpoint(checkpoint.finish(tmp_path, 1, parts, {}, keep=1))
    History(0, lambda: beats.append("restore")).restore(saved, Replay(settings, rollouts[0]))
    assert beats == ["save"] * 6 + ["restore"] * 6 and len(parts) == 7


def test_a_damaged_segment_is_named(tmp_path: Path) -> None:
    settings = experiment(steps=100, envs=2, n_step=1, rollout=16)
    rollouts = list(World(2, 5, "zero", 0.02).rollouts(16, 5))
    memory, history = Replay(settings, rollouts[0]), History(3)
    for each in rollouts:
        memory.insert(each)
    path = checkpoint.finish(tmp_path, 1, history.save(tmp_path, 1, memory), {}, keep=2)
    file = path / "replay-003-00000002.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"replay-003-00000002\.safetensors .*SHA-256"):
        checkpoint.open_checkpoint(path)


def test_without_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: Path) -> None:
        raise PermissionError(1, "this file system has no links")

    monkeypatch.setattr(os, "link", refuse)
    part = checkpoint.write_part(tmp_path, 1, "a", {"x": torch.arange(3)}, {})
    first = checkpoint.finish(tmp_path, 1, [part], {}, keep=1)
    second = checkpoint.finish(tmp_path, 2, [checkpoint.link_part(tmp_path, 2, part, first)], {}, keep=1)
    assert checkpoint.open_checkpoint(second).part("a")[0]["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("again", [False, True])
def test_checkpoints_at_every_step_hold_what_was(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    settings = experiment(steps=100, envs=2, n_step=1, rollout=1)
    rollouts = list(World(2, 5, "zero", 0.02).rollouts(2, 1)) + list(World(2, 5, "zero", 0.02).rollouts(1, 40))
    whole, copy, history = Replay(settings, rollouts[0]), Replay(settings, rollouts[0]), History(0)
    for number, each in enumerate(rollouts[1:]):
        whole.insert(each)
        copy.insert(each)
        path = checkpoint.finish(tmp_path, number, history.save(tmp_path, number, copy), {}, keep=1)
        if again:
            copy, history = Replay(settings, rollouts[0]), History(0)
            history.restore(checkpoint.open_checkpoint(path), copy)
    twin, newest = Replay(settings, rollouts[0]), checkpoint.latest(tmp_path)
    assert History(0).restore(checkpoint.open_checkpoint(newest), twin)
    times = np.arange(whole.episode_ends()[0], whole.count)
    for env in range(2):
        items = times, np.full(len(times), env), np.ones(len(times))
        for a, b in zip(whole.batch(*items).leaves(), twin.batch(*items).leaves(), strict=True):
            assert torch.equal(a, b)
    stored = whole.count - whole.steps + 1, whole.count
    assert torch.equal(whole.between(*stored)["valid"], twin.between(*stored)["valid"])
