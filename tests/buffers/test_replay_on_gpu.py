"""Replay on a simulated GPU against the same memory on the host: equal items, state and checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated_gpu
import torch
from free_running import remembering
from simulated_books import PINNED, SYNC
from simulated_gpu import counts, faults
from test_replay_buffer import World, experiment
from test_sequences import Remembered
from tiny import EXPERIMENTS, options, replaying

from lockstep import recipes
from lockstep.buffers import replay_placement as memories
from lockstep.buffers.history import History
from lockstep.buffers.replay import Replay
from lockstep.buffers.replay_placement import Placing, on_gpu
from lockstep.buffers.slabs import sent_together
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.launchers.launch import resume, train
from lockstep.reproducibility.replay import replay
from lockstep.run import checkpoint

GPU = torch.device("cuda:0")


@pytest.fixture
def gpu() -> Iterator[None]:
    with simulated_gpu.simulated(gpus=1):
        yield
        assert not faults()


def worlds() -> dict[str, tuple[Callable[[Rollout], Replay], Iterator[Rollout]]]:
    """Memories with all that can be in them: stacks that outgrow their place, starts afresh, sequences."""

    def plain(once: bool, reset: float) -> tuple[Callable[[Rollout], Replay], Iterator[Rollout]]:
        settings = experiment(steps=200, envs=3, n_step=3, rollout=7, prioritized=True, once=once)
        return lambda each: Replay(settings, each), World(3, 9, "noise", reset).rollouts(7, 60, 9)

    def by_error() -> tuple[Callable[[Rollout], Replay], Iterator[Rollout]]:
        settings = experiment(steps=200, envs=3, n_step=3, rollout=7, prioritized=True)
        settings = settings.replace(**{"algorithm.replay.first_priority": "error"})
        rollouts, draw = World(3, 9, "noise", 0.03).rollouts(7, 60, 9), torch.Generator().manual_seed(1)
        values = (torch.randn(8, 3, 3, generator=draw) for _ in iter(int, 1))
        valued = (each.replace(value=q.amax(-1), policy=q[:-1]) for each, q in zip(rollouts, values, strict=False))
        return lambda each: Replay(settings, each), valued

    sequences = Remembered(2, 5, 3, 60, 4, 10**9, True)
    return {
        "frames": plain(True, 0.03),
        "short episodes": plain(True, 0.4),
        "stacks": plain(False, 0.03),
        "sequences": (sequences.memory, sequences.rollouts(40)),
        "first errors": by_error(),
    }


def assert_alike(here: Replay, there: Replay, draw: np.random.Generator) -> None:
    """Equal items, read without waiting."""
    times, environments, probability = here.draw(16, draw)
    expected = here.batch(times, environments, probability)
    _, places = sent_together(there.to_read(times, environments, probability), GPU)
    before = counts()
    found = there.items(places)
    assert not (counts() - before)[SYNC]
    for (name, a), (_, b) in zip(expected.named_leaves(), found.named_leaves(), strict=True):
        assert b.device == GPU and torch.equal(a, b.cpu()), name


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", worlds())
def test_items_and_checkpoints_are_those_of_a_memory_on_the_host(name: str, tmp_path: Path) -> None:
    make, rollouts = worlds()[name]
    first = next(rollouts)
    here, there = make(first), make(first)
    there.move_to(GPU)
    draw, histories = np.random.default_rng(1), (History(0), History(1))
    for number, each in enumerate([first, *rollouts]):
        here.insert(each)
        on_device = each.map(lambda x: x.to(GPU)) if number % 4 == 3 else None  # as an environment in torch gives it
        before = counts()
        there.insert(each, on_device)
        assert not (counts() - before)[SYNC] and (counts() - before)[PINNED] <= 1
        if number >= 3:
            assert_alike(here, there, draw)
        if number % 8 == 7:
            parts = [*histories[0].save(tmp_path, number, here), *histories[1].save(tmp_path, number, there)]
            checkpoint.finish(tmp_path, number, parts, {}, keep=3)
    assert (there.moves > 0) == (name == "short episodes")
    assert there.nbytes == here.nbytes
    saved = checkpoint.open_checkpoint(checkpoint.latest(tmp_path))
    for part, meta in saved.parts.items():
        if part.startswith("replay-000"):
            assert meta["sha256"] == saved.parts[part.replace("replay-000", "replay-001", 1)]["sha256"], part
    crossed = make(first), make(first)
    crossed[1].move_to(GPU)
    History(1).restore(saved, crossed[0])  # that of the GPU on the host, and the reverse
    History(0).restore(saved, crossed[1])
    assert crossed[0].count == crossed[1].count > 0
    assert_alike(*crossed, draw)


@pytest.mark.usefixtures("gpu")
def test_where_it_lies(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = experiment(steps=40, envs=2, n_step=1, rollout=8)
    (rollout,) = World(2, 1, "zero", 0.0).rollouts(8, 1)

    def chosen(device: torch.device = GPU, **placing: Any) -> bool:
        return on_gpu(settings, 1, rollout, device, Placing(tells=True, **placing))

    needed = memories.replay_bytes(settings, rollout)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * needed, 4 * needed))
    assert chosen() and not chosen(where="cpu") and not chosen(sharing=2) and not chosen(torch.device("cpu"))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3 and "on its GPU" in told[0] and "replay=cpu" in told[1] and "2 learners" in told[2]
    with pytest.raises(SettingsError, match=r"replay=gpu: .* on the CPU, since it takes .* Leave replay= out"):
        chosen(where="gpu", sharing=2)
    settings = EXPERIMENTS["hindsight"]()
    assert not chosen()
    with pytest.raises(SettingsError, match=r"replay=gpu: .*hindsight.* gives the same bits\.$"):
        chosen(where="gpu")


@pytest.mark.usefixtures("gpu")
def test_a_storage_of_the_user_is_on_the_gpu_only_if_it_says_that_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it overrides nothing, and not if only the storage that it inherits from says so."""
    settings = experiment(steps=40, envs=2, n_step=1, rollout=8)
    (rollout,) = World(2, 1, "zero", 0.0).rollouts(8, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))

    class Declared(Replay, reads_on_gpu=True): ...

    class Silent(Declared): ...

    def chosen(kind: type[Replay], **placing: Any) -> bool:
        monkeypatch.setattr(memories, "storage_for", lambda algorithm, *given: kind(*given))
        return on_gpu(settings, 1, rollout, GPU, Placing(**placing))

    assert chosen(Replay) and chosen(Declared) and not chosen(Silent)
    with pytest.raises(SettingsError, match=r"replay=gpu: .*Silent .*reads_on_gpu"):
        chosen(Silent, where="gpu")


def test_layouts_say_where() -> None:
    layout = Layout.parse("a0,0-l0,0,1,replay=gpu")
    assert str(layout) == "a0,0-l0,0,1,replay=gpu" and [layout.learners_beside(i) for i in range(3)] == [2, 2, 1]
    assert Layout.parse("ray:2,worker.gpus=0.5").learners_beside(0) == 2
    assert Layout.parse("torchrun,device=local").learners_beside(0) == 1


@pytest.mark.parametrize(
    ("devices", "expected"), [("local", 1), ("0+1+2+3", 1), ("0+1", 2), ("0", 4)], ids=["local", "four", "two", "one"]
)
def test_torchrun_shares_the_gpus_of_a_machine_among_its_own_processes(
    devices: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in {"LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "WORLD_SIZE": 8, "RANK": 5}.items():
        monkeypatch.setenv(name, str(number))
    layout = dataclasses.replace(Layout.parse(f"torchrun,device={devices}"), workers=8)
    assert layout.learners_beside(5) == expected
    for text, match in (("inline,replay=gpu", "needs learners on GPUs"), ("inline,device=0,replay=host", "replay")):
        with pytest.raises(SettingsError, match=match):
            Layout.parse(text)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_a_run_goes_on_where_its_memory_lay_elsewhere(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["r2d2-prioritized-frames"]()
    whole, graphs = train(experiment, Layout.parse("inline,device=0,replay=cpu"), options(tmp_path / "whole")), []
    for text, other in (("inline,device=0,graphs=1", "replay=cpu"), ("inline,device=0,replay=cpu", "replay=gpu")):
        train(experiment, Layout.parse(text), options(tmp_path / text), stop_after=2)
        graphs.append(resume(tmp_path / text, Layout.parse(f"inline,device=0,{other}")).digest)
    assert graphs == [whole.digest] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_observations_of_an_environment_in_torch_stay_on_the_gpu(tmp_path: Path) -> None:
    experiment = replaying(recipes.sac_mujoco, replay={}).replace(
        **{"env.id": "wind:Wind", "env.adapter": "auto", "env.reseed_every": 6, "algorithm.n_step": 2}
    )
    digests = {
        train(experiment, Layout.parse(f"inline,device=0,{text}"), options(tmp_path / text)).digest
        for text in ("replay=cpu", "replay=gpu,graphs=1")
    }
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
# Asynchronous gradients are the harder case of the two.
@pytest.mark.parametrize("gradients", [pytest.param(0, marks=pytest.mark.full), "async"])
def test_a_free_running_run_is_repeated_with_its_memory_on_the_host(gradients: Any, tmp_path: Path) -> None:
    ran = train(remembering(gradient_lag=gradients), Layout.parse("a0-l0"), options(tmp_path / "ran"))
    again = replay(ran.run, Layout.parse("inline,device=0,replay=cpu"), options(tmp_path / "again"))
    assert again.ok and again.digest == ran.digest
