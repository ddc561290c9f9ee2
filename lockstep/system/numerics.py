"""Process-wide settings of torch that change bits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
import torch


def settle(threads: int, device: str = "cpu") -> None:
    """Compute with this many threads, and otherwise with torch's defaults, whatever this process has set; on a GPU with
    deterministic kernels."""
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    torch.set_flush_denormal(False)
    torch.set_grad_enabled(True)
    if torch.get_default_device().type != "cpu":
        torch.set_default_device(None)
    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise cuBLAS's sums may differ between calls
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.cuda.set_device(device)


@contextlib.contextmanager
def settled(threads: int, device: str = "cpu") -> Iterator[None]:
    """Like settle, but temporary and without autocast. The current GPU stays."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype()
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    where, errors = torch.get_default_device(), np.errstate(all="warn", under="ignore")
    flushed = bool(torch.tensor(1e-310, dtype=torch.float64) * 1 == 0)
    try:
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            settle(threads, device)
            with errors:
                yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.set_default_dtype(before[2])
        torch.set_flush_denormal(flushed)
        if where.type != "cpu":
            torch.set_default_device(where)
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (strict, warns):  # changing them imports torch's compiler, which takes a second
            torch.use_deterministic_algorithms(strict, warn_only=warns)
