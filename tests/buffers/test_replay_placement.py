"""What replay is said to take before it is there, against what it takes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_replay_buffer import World, experiment

from lockstep import recipes
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.buffers import replay_placement
from lockstep.buffers.frames import Ring
from lockstep.buffers.replay import Replay
from lockstep.buffers.sum_tree import SumTree
from lockstep.config.settings import SettingsError
from lockstep.launchers.launch import train
from lockstep.system.memory import available_bytes


def allocated(part: Any) -> int:
    """Bytes of all arrays that an object holds, in its own parts too."""
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return part.nbytes
    if isinstance(part, dict):
        return sum(map(allocated, part.values()))
    return sum(map(allocated, vars(part).values())) if isinstance(part, (Replay, Ring, SumTree)) else 0


@pytest.mark.parametrize(("prioritized", "once"), [(False, True), (True, True), (True, False)])
def test_the_estimate_is_what_is_allocated(prioritized: bool, once: bool) -> None:
    settings = experiment(steps=2000, envs=4, n_step=3, rollout=8, prioritized=prioritized, once=once)
    (rollout,) = World(4, 1, "zero", 0.01).rollouts(8, 1)
    replay = Replay(settings, rollout)
    replay.insert(rollout)
    estimate = replay_placement.replay_bytes(settings, rollout)
    assert estimate <= allocated(replay) <= 1.01 * estimate


def test_images_that_are_no_stacks_take_more_than_one_frame() -> None:
    settings = experiment(steps=2000, envs=4, n_step=1, rollout=8)
    (rollout,) = World(4, 1, "zero", 0.01).rollouts(8, 1)
    colors = rollout.replace(obs=torch.randint(0, 256, rollout.obs.shape, dtype=torch.uint8))
    whole = experiment(steps=2000, envs=4, n_step=1, rollout=8, once=False)
    assert replay_placement.replay_bytes(settings, colors) == replay_placement.replay_bytes(whole, rollout)
    assert replay_placement.replay_bytes(settings, colors) > replay_placement.replay_bytes(settings, rollout)


def test_a_million_steps_of_atari() -> None:
    whole = recipes.dqn_atari()
    assert 7.1e9 < replay_placement.replay_bytes(whole) * whole.scheme.shards < 8e9
    assert replay_placement.replay_bytes(recipes.ppo_cartpole()) == 0


def test_refused_before_anything_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = recipes.dqn_atari()
    assert isinstance(settings.algorithm, OffPolicyConfig)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay_placement, "available_bytes", lambda: 2_000_000_000)
    with pytest.raises(SettingsError) as caught:
        train(settings)
    assert re.search(r"7\.\d GB .* 2\.0 GB of memory", str(caught.value))
    assert not list(tmp_path.iterdir())
    advised = re.search(r"--algorithm.replay.capacity (\d+)", str(caught.value))
    assert advised
    smaller = replace(settings.algorithm.replay, capacity=int(advised[1]))
    replay_placement.require(
        settings.replace(algorithm=replace(settings.algorithm, replay=smaller)), settings.scheme.shards, 1
    )


def test_what_files_contents_take_of_a_container_is_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 64000000 kB\n")
    known = {"max": f"{16 << 30}", "current": f"{15 << 30}", "stat": f"anon 1\ninactive_file {13 << 30}"}
    for name, text in known.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert available_bytes(tmp_path, tmp_path) == 14 << 30


def test_what_is_available(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:  50 kB\n")
    assert available_bytes(tmp_path, tmp_path) == 50 * 1024
    (tmp_path / "memory.current").write_text("30000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("40000\n")
    assert available_bytes(tmp_path, tmp_path) == 10_000


def test_a_container_of_version_1_limits_too(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 64000000 kB\n")
    (tmp_path / "memory").mkdir()
    known = {"limit_in_bytes": "5000", "usage_in_bytes": "3000", "stat": "cache 7\ntotal_inactive_file 1000"}
    for name, text in known.items():
        (tmp_path / "memory" / f"memory.{name}").write_text(f"{text}\n")
    assert available_bytes(tmp_path, tmp_path) == 5000 - 3000 + 1000
