"""The resources of the machine that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_of_the_run: int | None = None


def cores() -> int:
    """Number of CPU cores that this process may use. A container's quota may allow fewer than it shows."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no quota ("max"), or no cgroups of version 2
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        return min(allowed, max(1, math.ceil(quota / period)))
    return allowed


def belongs_to_a_run_with(count: int) -> None:
    """Record that this process is one of several that share this many cores."""
    global _of_the_run
    _of_the_run = count


def cores_of_the_run() -> int:
    """The cores of all processes of a run on this machine together; each process may be pinned to some of them."""
    return cores() if _of_the_run is None else _of_the_run
