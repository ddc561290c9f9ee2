"""What this process may use of the machine."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path


def cores() -> int:
    """CPU cores that this process may use, of which a container's quota may allow fewer than it shows."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no quota ("max"), or no cgroups of version 2
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        return min(allowed, max(1, math.ceil(quota / period)))
    return allowed
