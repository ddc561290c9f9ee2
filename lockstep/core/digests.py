"""Digests of tensors, for ledgers and a run's `digest:` line."""

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
"""Bytes. From this size on, hashing a piece by itself is faster than copying it together with others or its header."""


@functools.lru_cache(4096)
def _header(dtype: Any, shape: tuple[int, ...]) -> bytes:
    """The dtype (torch's or NumPy's) and the shape as text."""
    name = dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    return f"{name}{list(shape)}".encode()


def _array(tensor: Tensor | np.ndarray) -> np.ndarray:
    """The values of a tensor. NumPy has no bf16, so its bits become int16. NumPy's small operations take a fifth of the
    time that torch's take."""
    if isinstance(tensor, np.ndarray):
        return tensor
    held = tensor.detach() if tensor.is_cpu else tensor.detach().cpu()
    return (held.view(torch.int16) if held.dtype == torch.bfloat16 else held).numpy()


def _pieces(array: np.ndarray) -> Iterable[np.ndarray]:
    """The values in logical (row-major) order, in one or more contiguous pieces."""
    if array.flags.c_contiguous:
        return (array,)
    if array[0].flags.c_contiguous and array[0].nbytes >= _LARGE:
        # A shard's rows of every step lie between those of other shards. Copying them takes longer than hashing them.
        return array
    return (np.ascontiguousarray(array),)


def fast_digest(tensor: Tensor | np.ndarray) -> str:
    """XXH3-64 over dtype, shape and bytes, as 16 hex digits. It is equal for a tensor and its numpy view.

    The memory layout does not matter: a channels-last tensor and its contiguous copy have equal digests. -0.0 and 0.0
    differ.
    """
    return _digest(_header(tensor.dtype, tensor.shape), _array(tensor))


def _digest(header: bytes, array: np.ndarray) -> str:
    if array.nbytes < _LARGE:
        return xxhash.xxh3_64_hexdigest(header + array.tobytes())
    digest = xxhash.xxh3_64(header)
    for piece in _pieces(array):
        digest.update(piece.data)
    return digest.hexdigest()


class Digests:
    """Fast digests of arrays that stay at their places in memory, so that only their numbers are read each time.

    Args:
        arrays: by name. Tensors must be in the host's memory.
    """

    def __init__(self, arrays: Mapping[str, Tensor | np.ndarray]) -> None:
        self._arrays = [(name, _header(x.dtype, x.shape), _array(x)) for name, x in arrays.items()]

    @staticmethod
    def of(structure: Any) -> Digests:
        """The Digests of all leaves of a tensor, a dict or an ArrayTuple, by their dotted names."""
        return Digests(dict(named_leaves(structure)))

    def __call__(self) -> dict[str, str]:
        """The current digests, by name."""
        return {name: _digest(header, array) for name, header, array in self._arrays}


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes in the order of sorted names: a run's `digest:` line."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        for text in (name.encode(), _header(tensors[name].dtype, tensors[name].shape)):
            digest.update(len(text).to_bytes(8, "little") + text)
        for piece in _pieces(_array(tensors[name])):
            digest.update(piece.data)
    return digest.hexdigest()
