"""Which process holds which shards. The shard is the unit of collecting, randomness and learning."""

from __future__ import annotations


def block(shards: int, workers: int, rank: int) -> range:
    """The contiguous shards that worker `rank` of `workers` holds; sizes differ by at most one.

    >>> [list(block(4, 3, rank)) for rank in range(3)]
    [[0, 1], [2], [3]]
    """
    assert 0 <= rank < workers <= shards
    size, larger = divmod(shards, workers)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


def holder(shards: int, workers: int, shard: int) -> int:
    """The rank of the worker that holds a shard."""
    return next(rank for rank in range(workers) if shard in block(shards, workers, rank))
