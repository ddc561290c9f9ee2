"""Assigns shards to processes. The shard is the unit of collecting, randomness and learning."""

from __future__ import annotations


def block(shards: int, workers: int, rank: int, groups: int = 1) -> range:
    """The contiguous shards that worker `rank` of `workers` holds. Sizes differ by at most one in a group.

    Args:
        groups: how many groups of equal size the workers are divided into. Shards are divided among the groups first,
            so that the collectors of a group hold the same shards as its learners.

    >>> [list(block(4, 3, rank)) for rank in range(3)]
    [[0, 1], [2], [3]]
    >>> [list(block(8, 6, rank, groups=2)) for rank in range(6)]
    [[0, 1], [2], [3], [4, 5], [6], [7]]
    """
    assert 0 <= rank < workers <= shards and workers % groups == 0
    if groups > 1:
        each = workers // groups
        of_group = block(shards, groups, rank // each)
        own = block(len(of_group), each, rank % each)
        return of_group[own.start : own.stop]
    size, larger = divmod(shards, workers)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


def holder(shards: int, workers: int, shard: int, groups: int = 1) -> int:
    """The rank of the worker that holds a shard. groups: as for block."""
    return next(rank for rank in range(workers) if shard in block(shards, workers, rank, groups))
