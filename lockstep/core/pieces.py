"""Tensors side by side in one piece of memory, so that one copy moves all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 256
"""Pieces begin at multiples of this many bytes, as torch's own memory does, since kernels read several numbers at once.
"""


def room(like: Sequence[Tensor], device: torch.device, *, pinned: bool = False) -> Tensor:
    """Uninitialized memory for tensors like these: uint8."""
    return torch.empty(sum(map(_size, like)), dtype=torch.uint8, device=device, pin_memory=pinned)


def side_by_side(like: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    """Tensors of these shapes and types, as views of the memory."""
    pieces = memory.split([_size(x) for x in like])
    return [piece[: x.nbytes].view(x.dtype).view(x.shape) for piece, x in zip(pieces, like, strict=True)]


def _size(x: Tensor) -> int:
    return -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
