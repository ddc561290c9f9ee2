"""How much memory this process can still get."""

from __future__ import annotations

import contextlib
from pathlib import Path

_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files that limit this process, say how much it uses, and what of that are files' contents that can be given back:
version 2, version 1."""


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still get without swapping; None where the system does not say so."""
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
    """The cgroup of this process, and all that it is part of: as a job of Slurm's, or a service, it is not at the root,
    and each of them may have a limit."""
    own = Path("/")
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        own = next((Path(line.split(":", 2)[2]) for line in lines if line.startswith("0::")), own)
    return [cgroup / group.relative_to("/") for group in (own, *own.parents)]
