"""Lets tasks that srun started without torchrun be the processes of layout torchrun.

torchrun sets environment variables that tell its processes their ranks and the address where they meet. Slurm sets
other variables with the same information, and this module translates them.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

_PORTS = range(20_000, 32_000)
"""Ports below those that Linux assigns to connections."""


def take_part(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables from Slurm's if srun started this process and torchrun did not. Existing variables are
    kept, so that users can choose MASTER_ADDR and MASTER_PORT."""
    if "RANK" in environment or not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"} <= environment.keys():
        return
    size, node = int(environment["SLURM_NTASKS"]), int(environment.get("SLURM_NODEID", "0"))
    step = int(environment.get("SLURM_JOB_ID", "0")) * 7 + int(environment.get("SLURM_STEP_ID", "0"))
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(_tasks_of(environment.get("SLURM_STEP_TASKS_PER_NODE", str(size)), node)),
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_PORTS[step % len(_PORTS)]),
    }
    for name, value in found.items():
        environment.setdefault(name, value)


def first_host(hosts: str) -> str:
    """The first host of a list in Slurm's format.

    >>> first_host("rack[2-3,7]-node[08-11],login")
    'rack2-node08'
    """
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", hosts)
    assert first is not None, "it matches anything"
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])


def _tasks_of(tasks: str, node: int) -> int:
    """How many tasks a node has, from a text like 4(x2),3, which means two nodes with 4 tasks and one with 3."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(number)] * int(times or 1)
    return counts[min(node, len(counts) - 1)]
