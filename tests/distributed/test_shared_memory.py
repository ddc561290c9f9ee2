"""Memory that processes share."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from lockstep.distributed.shared_memory import Arena, PrivateArena, SharedCounts, SharedMemory
from lockstep.training.context import RunStatus

ODD = 5
"""Bytes of a first tensor, so that the second one is not aligned by itself."""


def layout(arena: Arena) -> tuple[torch.Tensor, torch.Tensor]:
    return arena.zeros((ODD,), torch.uint8), arena.zeros((2, 3))


def write(memory: SharedMemory) -> None:
    head, body = memory.map(layout)
    head.fill_(7)
    body.copy_(torch.arange(6.0).view(2, 3))


def count(status: RunStatus, memory: SharedMemory) -> None:
    write(memory)
    if status.stop_requested():
        for _ in range(3):
            status.heartbeat()


@pytest.mark.slow
def test_what_one_process_writes_another_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.heap.Arena._dir_candidates", ["/proc"])  # as where /dev/shm is read-only
    memory, counts = SharedMemory(), SharedCounts(2 + 2)
    status = RunStatus(counts)
    status.request_stop()
    arguments = (RunStatus(counts, rank=1), memory)
    process: Any = multiprocessing.get_context("spawn").Process(target=count, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert status.progress() == [0, 3] and status.steps() == 0
    counts.close()
    head, body = memory.map(layout)
    assert head.tolist() == [7] * ODD and body.tolist() == [[0, 1, 2], [3, 4, 5]]
    memory.close()
    assert body.sum() == 15, "what is mapped stays after the file is closed"


def test_tensors_are_aligned_and_counted() -> None:
    count = Arena()
    layout(count)
    assert count.size == 64 + 2 * 3 * 4
    memory = SharedMemory()
    head, body = memory.map(layout)
    memory.close()
    assert head.data_ptr() % 64 == body.data_ptr() % 64 == 0
    assert not body.any()


@pytest.mark.parametrize("arena", [PrivateArena()])
def test_private_memory_is_zero_and_not_shared(arena: Arena) -> None:
    a, b = arena.zeros((2,)), arena.zeros((2,))
    a.fill_(1)
    assert b.tolist() == [0, 0]
