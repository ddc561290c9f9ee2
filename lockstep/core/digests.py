"""Digests of tensors, which ledgers and a run's `digest:` line hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lockstep.core.arrays import named_leaves

_LARGE = 1 << 16
"""Bytes from which hashing a piece by itself is faster than copying all pieces together first."""


def _header(tensor: Tensor | np.ndarray) -> bytes:
    """The dtype and shape as text."""
    dtype = tensor.dtype.name if isinstance(tensor, np.ndarray) else str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}".encode()


def _pieces(tensor: Tensor | np.ndarray) -> Iterator[np.ndarray]:
    """The values as flat bytes in logical (row-major) order, in one piece or in several."""
    held = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else tensor.detach().cpu()
    if held.dim() > 1 and not held.is_contiguous() and held[0].is_contiguous() and held[0].nbytes >= _LARGE:
        # A shard's rows of every step, between those of other shards: copying them takes longer than hashing them.
        yield from held.flatten(1).view(torch.uint8).numpy()
    else:
        yield held.reshape(-1).contiguous().view(torch.uint8).numpy()


def fast_digest(tensor: Tensor | np.ndarray) -> str:
    """XXH3-64 over dtype, shape and bytes, as 16 hex digits; equal for a tensor and its numpy view.

    Memory layout does not matter: a channels-last tensor and its contiguous copy agree. -0.0 and 0.0 differ.
    """
    digest = xxhash.xxh3_64(_header(tensor))
    for piece in _pieces(tensor):
        digest.update(piece.data)
    return digest.hexdigest()


def structure_digests(structure: Any) -> dict[str, str]:
    """Fast digest of every leaf of a tensor, a dict or an ArrayTuple, keyed by its dotted name."""
    return {name: fast_digest(leaf) for name, leaf in named_leaves(structure)}


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes in the order of sorted names: a run's `digest:` line."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        for text in (name.encode(), _header(tensors[name])):
            digest.update(len(text).to_bytes(8, "little") + text)
        for piece in _pieces(tensors[name]):
            digest.update(piece.data)
    return digest.hexdigest()
