"""Whether Slurm hides a node's GPUs from the tasks that it runs there."""

from __future__ import annotations

import os
from collections.abc import Mapping


def hidden_by_slurm(seen: int, environment: Mapping[str, str] = os.environ) -> str:
    """The variables which show that this task sees only its own GPUs and not all GPUs of its job on the node. Empty if
    there are none.

    Args:
        seen: the number of GPUs that this task sees.

    >>> hidden_by_slurm(4, {"SLURM_GPUS_PER_TASK": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    'SLURM_GPUS_PER_TASK=4, CUDA_VISIBLE_DEVICES=0,1,2,3'
    >>> hidden_by_slurm(4, {"SLURM_JOB_GPUS": "0,1,2,3", "SLURM_TRES_PER_TASK": "cpu=4"})
    ''
    """
    shown = [
        name
        for name, value in environment.items()
        if name == "SLURM_GPUS_PER_TASK"
        or (name == "SLURM_TRES_PER_TASK" and "gpu" in value)  # newer versions set this for --gpus-per-task
        or (name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS") and len(value.split(",")) > seen)
    ]
    if shown and "CUDA_VISIBLE_DEVICES" in environment:
        shown.append("CUDA_VISIBLE_DEVICES")
    return ", ".join(f"{name}={environment[name]}" for name in shown)
