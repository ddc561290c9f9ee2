"""Memory that the system provides step by step, as it is written."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def zeros_on_demand(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Like torch.zeros, but on a CPU, memory is taken only for what has been written.

    torch.zeros writes all of it, which takes about a second per gigabyte, and short runs never fill their replay.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size or (device or torch.get_default_device()).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
