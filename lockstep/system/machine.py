"""The resources of the machine that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
import platform
from pathlib import Path
from typing import NamedTuple

_of_the_run: int | None = None
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Linux's names for the bf16 instructions of Intel's, AMD's and ARM's CPUs."""


def cores() -> int:
    """Number of CPU cores that this process may use. A container's quota may be lower than its number of cores."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no quota ("max"), or no cgroups of version 2
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        return min(allowed, max(1, math.ceil(quota / period)))
    return allowed


def user_cache() -> Path:
    """Where lockstep keeps files of this user that it can make again. The folder may be missing, or not writable."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(given or Path.home() / ".cache") / "lockstep"
    except RuntimeError:  # a user without a home
        return Path(os.devnull) / "lockstep"  # which can neither be read nor written


def belongs_to_a_run_with(count: int) -> None:
    """Record that this process is one of several processes of a run that share this many cores."""
    global _of_the_run
    _of_the_run = count


def cores_of_the_run() -> int:
    """Number of cores of all processes of a run on this machine. Each process may be pinned to some of them."""
    return cores() if _of_the_run is None else _of_the_run


class Cpu(NamedTuple):
    """Linux's description of the CPU. On other systems, only the model may be known."""

    model: str
    flags: frozenset[str]
    """The names of its features."""


def cpu() -> Cpu:
    """This machine's CPU. Kernels do not use this: a user may make their compiler compile for another CPU."""
    info: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        info[name.strip().lower()] = value.strip()
    flags = info.get("flags", info.get("features", "")).split()
    return Cpu(info.get("model name") or platform.processor() or platform.machine(), frozenset(flags))


def emulates_bf16() -> bool:
    """Whether this CPU is known to lack instructions for bf16, so that torch computes it at least ten times slower
    than fp32."""
    flags = cpu().flags
    return bool(flags) and not flags & _BF16_FLAGS
