"""Sums over the shards of one process, in the order of the tree (lockstep.distributed.tree), and sums of adjacent
numbers, in the order of torch's replaced operations (lockstep.portable.sums).

A sum of adjacent numbers has 8 parts: number i belongs to part i mod 8, and the parts are added in order.

Shape legend: S shards, P numbers of each.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled

PARTS = 8
"""Parts of a sum of adjacent numbers. A sum of at most so many numbers has the order of a plain loop."""
_ZERO = np.float32(0)
_TOGETHER = 1024
"""Numbers of each shard that are added up together, so that they stay in the cache."""


@compiled
def add_up(values: np.ndarray, first: int, last: int) -> None:
    """Write the sum over a complete subtree of shards into the first row of float32 [S, P], for the numbers first to
    last - 1 of each. Those of the other rows are overwritten, too.

    Args:
        values: of S shards, a power of two.
    """
    shards = len(values)
    for begin in range(first, last, _TOGETHER):
        end, width = min(begin + _TOGETHER, last), 1
        while width < shards:
            for left in range(0, shards, 2 * width):
                a, b = values[left, begin:end], values[left + width, begin:end]
                for i in range(len(a)):
                    a[i] += b[i]
            width *= 2


@compiled
def write_sums(items: int, sums: np.ndarray, out: np.ndarray, place: int) -> None:
    """Write the number of a slice's items and its sums of metrics [S, ...] behind each gradient in out."""
    for s in range(len(out)):
        out[s, place] = np.float32(items)
        for j in range(sums.shape[1]):
            out[s, place + 1 + j] = np.float32(sums[s, j])


@compiled
def row_sums(x: np.ndarray, out: np.ndarray) -> None:
    """Write the sum of each row, in parts: float32 [rows, count] -> [rows]"""
    count = x.shape[1]
    parts, whole = np.empty(PARTS, np.float32), count - count % PARTS
    for row in range(len(x)):
        of = x[row]
        parts[:] = _ZERO
        for i in range(0, whole, PARTS):
            for part in range(PARTS):
                parts[part] += of[i + part]
        for i in range(whole, count):
            parts[i - whole] += of[i]
        total = _ZERO
        for part in range(PARTS):
            total += parts[part]
        out[row] = total


@compiled
def column_sums(x: np.ndarray, out: np.ndarray) -> None:
    """Write the sum of each column, in parts: float32 [rows, count] -> [count]"""
    parts = np.zeros((PARTS, x.shape[1]), np.float32)
    for row in range(len(x)):
        of, to = x[row], parts[row % PARTS]
        for i in range(len(of)):
            to[i] += of[i]
    out[:] = _ZERO
    for part in range(PARTS):
        for i in range(len(out)):
            out[i] += parts[part, i]


@compiled
def middle_sums(x: np.ndarray, out: np.ndarray) -> None:
    """Write sums over the axis in the middle, float32 [outer, count, inner] -> [outer, inner]: one number after the
    other, or in parts if the inner axis has one number."""
    outer, count, inner = x.shape
    if inner == 1:
        row_sums(x.reshape((outer, count)), out.reshape(outer))
        return
    out[:] = _ZERO
    for i in range(outer):
        to = out[i]
        for j in range(count):
            of = x[i, j]
            for k in range(inner):
                to[k] += of[k]


@compiled
def first_sums(x: np.ndarray, out: np.ndarray) -> None:
    """Write sums over the first axis in the order of middle_sums: float32 [count, inner] -> [inner]"""
    count, inner = x.shape
    middle_sums(x.reshape((1, count, inner)), out.reshape((1, inner)))
