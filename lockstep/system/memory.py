"""The memory that this process can still allocate."""

from __future__ import annotations

import contextlib
from pathlib import Path

_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""For versions 2 and 1 of cgroups: the files with the memory limit, the current use, and statistics, and the name of
the statistic for reclaimable file cache, which is a part of the use."""


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still allocate without swapping; None if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
    except OSError:
        return None
    known = [int(lines["MemAvailable"].split()[0]) * 1024]
    for group in _groups(proc, cgroup):
        for limit, usage, statistics, cached in _CGROUPS:
            if (group / limit).is_file() and (group / usage).is_file():
                most, used = ((group / file).read_text(encoding="ascii").strip() for file in (limit, usage))
                with contextlib.suppress(OSError):
                    entries = (line.split() for line in (group / statistics).read_text(encoding="ascii").splitlines())
                    used = int(used) - sum(int(value) for name, value in entries if name == cached)
                known += [int(most) - int(used)] if most != "max" else []
    return max(0, min(known))


def _groups(proc: Path, cgroup: Path) -> list[Path]:
    """The cgroup of this process and all its parents. Each may have a limit, since Slurm jobs and services are not at
    the root."""
    own = Path("/")
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        own = next((Path(line.split(":", 2)[2]) for line in lines if line.startswith("0::")), own)
    return [cgroup / group.relative_to("/") for group in (own, *own.parents)]
