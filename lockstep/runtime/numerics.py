"""Settings of torch that belong to the process and change bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def settle(threads: int) -> None:
    """Compute with so many threads, and otherwise as torch does by itself, whatever this process has set."""
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    torch.set_flush_denormal(False)


@contextlib.contextmanager
def settled(threads: int) -> Iterator[None]:
    """The same for a while, without autocast."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype()
    flushed = bool(torch.tensor(1e-310, dtype=torch.float64) * 1 == 0)
    settle(threads)
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.set_default_dtype(before[2])
        torch.set_flush_denormal(flushed)
