"""Processes exchange tensors through the memory of (simulated) GPUs: the same bits, and no access out of order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simulated_gpu
import torch
from simulated_gpu import faults

from lockstep.core.shards import block
from lockstep.distributed.device_memory import EventHandle, OpenedMemory, OwnedMemory, counters, forget
from lockstep.distributed.local_group import Ends, LocalGroup, join
from lockstep.distributed.tree import TreeSum, partners
from lockstep.system import children
from lockstep.system.forked import call_in_fork

GPU = torch.device("cuda:0")
SHARDS = 4
SIZES = (5, 1_003, 40_003, 7, 90_001)
"""Numbers of tensors that are summed one after the other: memory grows, and is used again."""


@pytest.fixture
def gpu() -> Iterator[None]:
    with simulated_gpu.simulated(gpus=4):
        yield


def drawn(shard: int, size: int) -> torch.Tensor:
    """fp32 numbers of widely varying magnitude, whose sum's bits depend on the order of addition."""
    draw = torch.Generator().manual_seed(100 * shard + size)
    return torch.randn(size, generator=draw) * 10.0 ** torch.randint(-4, 5, (size,), generator=draw)


def start(target: Callable[..., None], size: int, *arguments: Any) -> tuple[list[Any], Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ends = join(context, size, partners(SHARDS, size))
    processes = [children.start(target, (each, answers, *arguments), f"rank-{each.rank}") for each in ends]
    for each in ends:
        each.close()
    return processes, answers


def all_of(processes: list[Any], answers: Any) -> list[Any]:
    found = sorted((answers.get(timeout=120) for _ in processes), key=lambda answer: answer[0])
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return found


def add_up(ends: Ends, answers: Any, devices: tuple[int, ...], refuses: int | None) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", devices[ends.rank])
    torch.cuda.set_device(device)
    if ends.rank == refuses:
        simulated_gpu._books().shared.refusal = "CUDA error: operation not supported"
    group = LocalGroup(ends)
    problem = group.open_devices(device)
    tree, sums = TreeSum(SHARDS, group), []
    for size in SIZES:
        total = tree.sum({shard: drawn(shard, size).to(device) for shard in block(SHARDS, group.size, group.rank)})
        assert (total.device == device) == group.on_devices
        sums.append(total.cpu().numpy())
    on_cpu = tree.sum({shard: torch.tensor([float(shard)]) for shard in block(SHARDS, group.size, group.rank)})
    answers.put((group.rank, problem, group.on_devices, sums, float(on_cpu)))
    group.close()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("devices", "refuses"),
    [
        ((0, 0), None),
        pytest.param((1, 2, 3), None, marks=pytest.mark.slow),
        pytest.param((0, 1, 2, 2), None, marks=pytest.mark.slow),
        ((0, 0), 1),
        pytest.param((0, 1, 2), 1, marks=pytest.mark.slow),
    ],
)
def test_sums_have_the_bits_of_one_process(devices: tuple[int, ...], refuses: int | None) -> None:
    wanted = []
    for size in SIZES:
        a, b, c, d = (drawn(shard, size) for shard in range(SHARDS))
        wanted.append(((a + b) + (c + d)).numpy().tobytes())
    for _, problem, on_devices, sums, on_cpu in all_of(*start(add_up, len(devices), devices, refuses)):
        assert [each.tobytes() for each in sums] == wanted and on_cpu == 6
        assert on_devices == (refuses is None), "all of them, or none"
        assert problem == (None if refuses is None else "CUDA error: operation not supported")
    assert not faults()


def wait_for_ever(ends: Ends, answers: Any) -> None:
    group = LocalGroup(ends)
    assert group.open_devices(GPU) is None
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            group.exchange(torch.ones(100_000, device=GPU), torch.empty(100_000, device=GPU), 1)
    except ConnectionError as error:
        answers.put(str(error))


@pytest.mark.usefixtures("gpu")
def test_the_death_of_a_peer_ends_every_wait() -> None:
    processes, answers = start(wait_for_ever, 2)
    assert answers.get(timeout=120) == "Connection closed by peer"
    for process in processes:
        process.join()


# Planted faults


def copy_at_once(self: OpenedMemory, into: torch.Tensor) -> None:
    into.copy_(self._memory[: into.numel()])


def careless(ends: Ends, answers: Any, what: str) -> None:
    if what == "reads at once":
        OpenedMemory.copy = copy_at_once
    if what == "does not know the reader":
        OwnedMemory.add_reader = lambda self, copied: None
    group = LocalGroup(ends)
    assert group.open_devices(GPU) is None
    sent = ends.shared.numbers(1)
    if group.rank:
        for _ in range(2):
            if what == "does not wait for the receipt":
                group._peers[0]._free = True
            group.send(torch.ones(10, device=GPU), 0)
            sent[0] += 1
    else:
        while what == "does not wait for the receipt" and sent[0] < 2:
            time.sleep(0.001)
        for _ in range(2):
            group.recv(torch.empty(10, device=GPU), 1)
    answers.put((group.rank, None))
    group.barrier()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("reads at once", "memory of a GPU was read before"),
        ("does not know the reader", "memory of a GPU was reused before"),
        ("does not wait for the receipt", "memory of a GPU was reused before"),
    ],
)
def test_an_access_out_of_order_is_found(what: str, fault: str) -> None:
    all_of(*start(careless, 2, what))
    assert any(fault in text for text in faults())


@pytest.mark.usefixtures("gpu")
def test_handles_are_refused_as_by_cuda() -> None:
    owned = OwnedMemory(GPU)
    owned.reserve(8)
    with pytest.raises(RuntimeError, match="opened by the process that made it"):
        OpenedMemory(owned.stored, GPU)
    in_time, handle = call_in_fork(lambda: OwnedMemory(GPU).stored.handle.decode(), 60.0)
    assert in_time
    with pytest.raises(RuntimeError, match="of a process that has ended"):
        OpenedMemory(EventHandle(0, handle.encode()), GPU)
    with pytest.raises(RuntimeError, match="without interprocess=True"):
        torch.cuda.Event().ipc_handle()
    assert len(faults()) == 3


def test_what_torch_leaves_of_a_killed_process_is_deleted(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.distributed.device_memory._COUNTERS", tmp_path)
    me = os.getpid()
    own, of_another_container, of_another, other = names = (
        f"torch_{me}_1_0",
        f"torch_{me}_2_0",
        f"torch_{me}0_1_0",
        "a",
    )
    for name in names:
        (tmp_path / name).write_bytes(bytes(8))
    mapped = [torch.from_file(str(tmp_path / name), True, 8, dtype=torch.uint8) for name in (own, of_another, other)]
    found = counters(me)
    assert found == {tmp_path / own} and len(mapped) == 3
    forget(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({of_another_container, of_another, other})
    forget(found)
    assert not counters(2**22 + 1), "larger than any number of a process"
