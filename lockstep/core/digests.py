"""Digests of tensors, which ledgers and a run's `digest:` line hold."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lockstep.core.arrays import named_leaves

_LARGE = 1 << 16
"""Bytes from which hashing a piece by itself is faster than copying all pieces together first."""


@functools.lru_cache(4096)
def _header(dtype: Any, shape: tuple[int, ...]) -> bytes:
    """The dtype, torch's or NumPy's, and the shape as text."""
    name = dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    return f"{name}{list(shape)}".encode()


def _array(tensor: Tensor | np.ndarray) -> np.ndarray:
    """The values of a tensor, those of bf16 as whole numbers, which NumPy knows."""
    if isinstance(tensor, np.ndarray):
        return tensor
    held = tensor.detach() if tensor.is_cpu else tensor.detach().cpu()
    return (held.contiguous().view(torch.int16) if held.dtype == torch.bfloat16 else held).numpy()


def _pieces(tensor: Tensor | np.ndarray) -> Iterable[np.ndarray]:
    """The values in logical (row-major) order, contiguous, in one piece or in several. With NumPy, since its small
    operations take a fifth of the time of torch's."""
    array = _array(tensor)
    if array.flags.c_contiguous:
        return (array,)
    if array[0].flags.c_contiguous and array[0].nbytes >= _LARGE:
        # A shard's rows of every step, between those of other shards: copying them takes longer than hashing them.
        return array
    return (np.ascontiguousarray(array),)


def fast_digest(tensor: Tensor | np.ndarray) -> str:
    """XXH3-64 over dtype, shape and bytes, as 16 hex digits; equal for a tensor and its numpy view.

    Memory layout does not matter: a channels-last tensor and its contiguous copy agree. -0.0 and 0.0 differ.
    """
    digest = xxhash.xxh3_64(_header(tensor.dtype, tensor.shape))
    if isinstance(tensor, np.ndarray) and tensor.flags.c_contiguous:  # few calls: some steps hash dozens of arrays
        digest.update(tensor.data)
        return digest.hexdigest()
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
        for text in (name.encode(), _header(tensors[name].dtype, tensors[name].shape)):
            digest.update(len(text).to_bytes(8, "little") + text)
        for piece in _pieces(tensors[name]):
            digest.update(piece.data)
    return digest.hexdigest()
