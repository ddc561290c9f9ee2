"""Sums over all shards with one binary tree. The shape of the tree depends only on the number of shards.

Floating-point addition is commutative but not associative: a sum's bits depend on its parentheses, not on the process
that computes it. The parentheses form a complete binary tree over the S slots, so the sum is the same on 1, 2, … S
processes. A process adds up the complete subtrees inside its block, and sends only these partial sums."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.core.shards import block, holder
from lockstep.distributed.groups import SMALL, Group


def partners(shards: int, workers: int, groups: int = 1) -> set[tuple[int, int]]:
    """Pairs of workers that exchange partial sums. groups: as Group.groups."""
    if _halves(shards, workers):
        return {(rank, rank ^ (1 << level)) for rank in range(workers) for level in range(workers.bit_length() - 1)}
    pairs, size = set(), 2
    while size <= shards:
        for start in range(0, shards, size):
            pairs.add((holder(shards, workers, start, groups), holder(shards, workers, start + size // 2, groups)))
        size *= 2
    return {(a, b) for a, b in pairs if a != b}


def _halves(shards: int, workers: int) -> bool:
    """Whether blocks are equal and their number is a power of two, so that partners can swap halves."""
    return shards % workers == 0 and workers & (workers - 1) == 0


def complete(shards: range) -> bool:
    """Whether these consecutive shards are exactly the leaves of one node of the tree."""
    count = len(shards)
    return count & (count - 1) == 0 and shards.start % count == 0


class TreeSum:
    """Reduces one tensor per shard to a global sum in every process of the group."""

    def __init__(self, shards: int, group: Group) -> None:
        self.shards, self.group = shards, group
        self.kept: dict[int, Tensor] = {}
        """State per shard of subclasses that do more than add. Checkpoints contain it. Here it is empty. A resumed run
        has it on the device of the gradients."""
        self._block = block(shards, group.size, group.rank, group.groups)
        self._subtrees: list[tuple[int, int, Tensor]] = []
        self._halving = _halves(shards, group.size)

    def push(self, shard: int, value: Tensor) -> None:
        """Add one shard's tensor, in the order of this process's shards. The tree owns the tensor now and may change
        it."""
        self.push_sum(shard, value, 1)

    def push_sum(self, shard: int, value: Tensor, size: int) -> None:
        """As push, for the sum over a complete subtree of `size` shards, which begins with this shard."""
        assert shard in self._block
        self._subtrees.append((shard, size, value))
        while len(self._subtrees) > 1:
            (left, size, a), (right, other, b) = self._subtrees[-2:]
            if size != other or left % (2 * size) or left + size != right:
                break
            self._subtrees[-2:] = [(left, 2 * size, a.add_(b))]

    def finish(self) -> Tensor:
        """Exchange the partial sums and return the total."""
        subtrees = {(start, size): value for start, size, value in self._subtrees}
        self._subtrees = []
        if self.group.size == 1:
            return subtrees[0, self.shards]
        if not self.group.on_devices:
            subtrees = {place: value.cpu() for place, value in subtrees.items()}
        if self._halving:
            (total,) = subtrees.values()
            # Two processes send the same amount either way. On GPUs, messages take longer than copies.
            whole = self.group.size == 2 or total.nbytes <= SMALL or total.device.type != "cpu"
            return self._double(total) if whole else self._halve_and_double(total)
        like = next(iter(subtrees.values()))
        total = self._climb(0, self.shards, subtrees, like)
        return self._broadcast(torch.empty_like(like) if total is None else total)

    def sum(self, values: dict[int, Tensor]) -> Tensor:
        """Reduce one tensor for each shard of this process."""
        for shard in self._block:
            self.push(shard, values[shard])
        return self.finish()

    def _double(self, total: Tensor) -> Tensor:
        """For equal power-of-two blocks of two processes, small tensors, or GPUs. At each level of the tree, partners
        swap their sums, and both add them up. This takes half as many exchanges as _halve_and_double."""
        group, own, distance = self.group, total.view(-1), 1
        while distance < group.size:
            incoming = group.swap(own, group.rank ^ distance)
            left, right = (incoming, own) if group.rank & distance else (own, incoming)
            torch.add(left, right, out=own)  # in this order, since the sum of two NaNs has the bits of the left one
            distance *= 2
        return total

    def _halve_and_double(self, total: Tensor) -> Tensor:
        """For equal power-of-two blocks. At each level of the tree, partners swap halves, so a process sends fewer than
        2N numbers in all."""
        group, flat = self.group, total.view(-1)
        low, high = 0, flat.numel()
        spans = []
        distance = 1
        while distance < group.size:
            middle = (low + high) // 2
            lower, upper = (low, middle), (middle, high)
            keep, give = (upper, lower) if group.rank & distance else (lower, upper)
            incoming = torch.empty(keep[1] - keep[0], dtype=flat.dtype)
            group.exchange(flat[give[0] : give[1]], incoming, group.rank ^ distance)
            own = flat[keep[0] : keep[1]]
            left, right = (incoming, own) if group.rank & distance else (own, incoming)
            torch.add(left, right, out=own)  # in this order, as in _double
            spans.append((keep, give, distance))
            low, high = keep
            distance *= 2
        for keep, give, distance in reversed(spans):
            group.exchange(flat[keep[0] : keep[1]], flat[give[0] : give[1]], group.rank ^ distance)
        return total

    def _climb(self, start: int, size: int, subtrees: dict[tuple[int, int], Tensor], like: Tensor) -> Tensor | None:
        """For blocks of any size. The process that holds a node's first shard computes the node's sum. All processes
        walk the same tree in the same order, so they cannot deadlock."""
        if (start, size) in subtrees:
            return subtrees[start, size]
        workers, groups = self.group.size, self.group.groups
        holders = {holder(self.shards, workers, shard, groups) for shard in range(start, start + size)}
        if len(holders) == 1:
            return None
        half = size // 2
        left = self._climb(start, half, subtrees, like)
        right = self._climb(start + half, half, subtrees, like)
        to, origin = (holder(self.shards, workers, shard, groups) for shard in (start, start + half))
        if to != origin:
            if self.group.rank == origin:
                assert right is not None
                self.group.send(right, to)
            elif self.group.rank == to:
                right = torch.empty_like(like)
                self.group.recv(right, origin)
        if self.group.rank != to:
            return None
        assert left is not None and right is not None
        return left.add_(right)

    def _broadcast(self, total: Tensor) -> Tensor:
        for rank in range(1, self.group.size):
            if self.group.rank == 0:
                self.group.send(total, rank)
            elif self.group.rank == rank:
                self.group.recv(total, 0)
        return total
