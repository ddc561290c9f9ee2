"""Copying rollouts and minibatches to a GPU.

Shards that act together lie side by side in memory: a shard's rows of a step are followed by those of the next shard.
To copy such a shard by itself, torch would first gather it into other memory, on one thread and without pinning. So
adjacent shards are copied together as one slab, and the GPU's copy is split into views.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from lockstep.core.arrays import map_structure, named_leaves
from lockstep.core.pieces import room, side_by_side
from lockstep.core.rollout import Rollout

S = TypeVar("S")


def to_device(rollouts: dict[int, Rollout], device: torch.device) -> dict[int, Rollout]:
    """Copies of rollouts on a GPU. The host does not wait for copies from pinned memory, which must not change until
    the GPU has read it."""
    leaves, form = _pytree.tree_flatten(rollouts)
    copies: dict[int, Tensor] = {}
    for together in _slabs(leaf for leaf in leaves if leaf is not None):
        first, end = together[0].data_ptr(), max(map(_end, together))
        if 2 * sum(leaf.nbytes for leaf in together) < end - first:  # most of it belongs to other learners
            copies |= {id(leaf): sent(leaf, device) for leaf in together}
            continue
        items = (end - first) // together[0].element_size()
        slab = together[0].as_strided((items,), (1,)).to(device, non_blocking=True)
        for leaf in together:
            offset = (leaf.data_ptr() - first) // leaf.element_size()
            copies[id(leaf)] = slab.as_strided(leaf.shape, leaf.stride(), offset)
    return _pytree.tree_unflatten([copies.get(id(leaf)) for leaf in leaves], form)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """x on a device. A copy to a GPU goes through pinned memory, so that the host does not wait."""
    if device.type == "cpu" or not x.numel():
        return x.to(device)
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)  # torch keeps it until the GPU has read it
    return pinned.copy_(x).to(device, non_blocking=True)


def sent_together(batch: S, device: torch.device) -> tuple[Tensor, S]:
    """Send all tensors of a batch to a GPU in one copy. Returns the memory on the GPU, and the batch as views of it."""
    memory, _ = all_sent([leaf for _, leaf in named_leaves(batch)], device)
    return memory, laid_out(batch, memory)


def all_sent(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """As sent_together, for tensors in a sequence."""
    on_host = room(tensors, torch.device("cpu"), pinned=True)
    for piece, x in zip(side_by_side(tensors, on_host), tensors, strict=True):
        piece.copy_(x)
    memory = on_host.to(device, non_blocking=True)
    return memory, side_by_side(tensors, memory)


def laid_out(batch: S, memory: Tensor) -> S:
    """A batch with these shapes and types, as views of the memory."""
    leaves = [leaf for _, leaf in named_leaves(batch)]
    pieces = {id(leaf): piece for leaf, piece in zip(leaves, side_by_side(leaves, memory), strict=True)}
    return map_structure(lambda leaf: pieces[id(leaf)], batch)


def _slabs(leaves: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors of one type whose spans of memory overlap."""
    slabs: list[list[Tensor]] = []
    end = 0
    for leaf in sorted(leaves, key=lambda leaf: leaf.data_ptr()):
        if not slabs or leaf.data_ptr() >= end or leaf.dtype != slabs[-1][0].dtype:
            slabs.append([])
        slabs[-1].append(leaf)
        end = max(end, _end(leaf))
    return slabs


def _end(leaf: Tensor) -> int:
    """The address after a tensor's last element."""
    if not leaf.numel():
        return leaf.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return leaf.data_ptr() + (last + 1) * leaf.element_size()
