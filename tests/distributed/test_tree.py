"""The spine's spine: a sum over shards has the same bits on any number of processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.shards import block
from lockstep.distributed.groups import GlooGroup, Group
from lockstep.distributed.local_group import Ends, LocalGroup, join
from lockstep.distributed.tree import TreeSum, partners

FEW, MANY = 1_003, 40_003
"""Numbers of each tensor: partners swap few as a whole, and many in halves if they are more than two."""


def shard_tensors(shards: int, size: int = FEW) -> dict[int, Tensor]:
    """fp32 numbers of widely varying magnitude, whose sum's bits depend on the order of addition."""
    draw = np.random.default_rng(7)
    tensors = {
        shard: torch.from_numpy((draw.standard_normal(size) * 10.0 ** draw.integers(-4, 5, size)).astype(np.float32))
        for shard in range(shards)
    }
    for shard, tensor in tensors.items():
        tensor[[0, -1]] = torch.tensor(0x7FC00000 + shard, dtype=torch.int32).view(torch.float32)
    return tensors


def reference(values: list[Tensor]) -> Tensor:
    """Independent: recursive halves of the list."""
    if len(values) == 1:
        return values[0].clone()
    half = len(values) // 2
    return reference(values[:half]) + reference(values[half:])


def _reduce(rank: int, size: int, shards: int, numbers: int, path: str, ends: Ends | None, queue: Any) -> None:
    torch.set_num_threads(1)
    group = LocalGroup(ends) if ends else GlooGroup(f"file://{path}/store", rank, size)
    values = shard_tensors(shards, numbers)
    mine = block(shards, size, rank)
    tree = TreeSum(shards, group)
    sums = [tree.sum({shard: values[shard].clone() for shard in mine}) for _ in range(2)]
    sums = [each.view(torch.int32) for each in sums]  # of two NaNs, too, the same one has to remain
    tiny = tree.sum({shard: torch.tensor([float(shard)], dtype=torch.float64) for shard in mine})
    ordinary = torch.stack([values[shard] for shard in mine]).sum(0)
    if ends is None:
        dist.all_reduce(ordinary)
    gathered = group.gather(rank * 10)
    queue.put((rank, [s.numpy() for s in sums], float(tiny[0]), ordinary.numpy(), gathered))
    group.close()


def run(size: int, shards: int, path: Path, kind: str = "gloo", numbers: int = FEW) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ends = join(context, size, partners(shards, size)) if kind == "local" else [None] * size
    processes = [
        context.Process(target=_reduce, args=(rank, size, shards, numbers, str(path), each, queue))
        for rank, each in enumerate(ends)
    ]
    for process in processes:
        process.start()
    for each in ends:
        if each:
            each.close()
    answers = sorted((queue.get(timeout=120) for _ in processes), key=lambda answer: answer[0])
    for process in processes:
        process.join()
    return answers


@pytest.mark.parametrize("shards", [1, 2, 4, 8, 32])
def test_one_process_adds_in_tree_order(shards: int) -> None:
    values = shard_tensors(shards)
    total = TreeSum(shards, Group()).sum({s: v.clone() for s, v in values.items()})
    assert torch.equal(total.view(torch.int32), reference(list(values.values())).view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gloo", "local"])
@pytest.mark.parametrize("numbers", [FEW, MANY])
@pytest.mark.parametrize(("size", "shards"), [(2, 4), (3, 4), (4, 4), (3, 8)])
def test_any_number_of_processes_gives_the_same_bits(
    size: int, shards: int, numbers: int, kind: str, tmp_path: Path
) -> None:
    expected = reference(list(shard_tensors(shards, numbers).values())).view(torch.int32).numpy()
    for rank, sums, tiny, _, gathered in run(size, shards, tmp_path, kind, numbers):
        for total in sums:
            np.testing.assert_array_equal(total, expected)
        assert tiny == shards * (shards - 1) / 2
        assert gathered == ([10 * r for r in range(size)] if rank == 0 else None)


def test_an_ordinary_all_reduce_does_not(tmp_path: Path) -> None:
    """fp32, 4 processes of 2 shards: the sum's bits differ from those of one process adding in order."""
    shards = 8
    expected = torch.stack(list(shard_tensors(shards).values())).sum(0)[1:-1].numpy()  # without the NaNs
    for _, sums, _, ordinary, _ in run(4, shards, tmp_path):
        np.testing.assert_allclose(ordinary[1:-1], expected, rtol=1e-2, atol=1e-1)
        assert (ordinary[1:-1] != expected).any(), "fp32 addition became associative?"
        in_order = reference(list(shard_tensors(shards).values()))
        np.testing.assert_array_equal(sums[0], in_order.view(torch.int32).numpy())
