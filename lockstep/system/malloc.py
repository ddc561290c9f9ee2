"""Settings of the C library's memory allocator."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks instead of returning them to the kernel.

    By default, every large activation is mapped and page-faulted again at every step, which took 11% of the CPU time of
    training the Nature CNN. Without glibc, this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
