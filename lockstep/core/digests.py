"""Digests of tensors, which ledgers and a run's `digest:` line hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lockstep.core.arrays import named_leaves


def _header_and_bytes(tensor: Tensor | np.ndarray) -> tuple[bytes, np.ndarray]:
    """The dtype and shape as text, and the values as flat bytes in logical (row-major) order."""
    if isinstance(tensor, np.ndarray):
        dtype, data = tensor.dtype.name, np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    else:
        dtype = str(tensor.dtype).removeprefix("torch.")
        data = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    return f"{dtype}{list(tensor.shape)}".encode(), data


def fast_digest(tensor: Tensor | np.ndarray) -> str:
    """XXH3-64 over dtype, shape and bytes, as 16 hex digits; equal for a tensor and its numpy view.

    Memory layout does not matter: a channels-last tensor and its contiguous copy agree. -0.0 and 0.0 differ.
    """
    header, data = _header_and_bytes(tensor)
    digest = xxhash.xxh3_64(header)
    digest.update(data.data)
    return digest.hexdigest()


def structure_digests(structure: Any) -> dict[str, str]:
    """Fast digest of every leaf of a tensor, a dict or an ArrayTuple, keyed by its dotted name."""
    return {name: fast_digest(leaf) for name, leaf in named_leaves(structure)}


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes in the order of sorted names: a run's `digest:` line."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        header, data = _header_and_bytes(tensors[name])
        for piece in (name.encode(), header):
            digest.update(len(piece).to_bytes(8, "little") + piece)
        digest.update(data.data)
    return digest.hexdigest()
