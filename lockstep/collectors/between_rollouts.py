"""The state of acting that a shard carries from one rollout to the next. Checkpoints save and restore it.

Shape legend: A rows of an acting batch, K core state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.buffers.rollout_buffers import RolloutBuffer
from lockstep.collectors.stepping import ActingShard


def saved(member: ActingShard, buffer: RolloutBuffer, core_state: Tensor) -> dict[str, Tensor]:
    """A shard's state by name, without the state of its environments.

    Args:
        buffer: the rollout that was collected last.
        core_state: fp32 [A, K], after that rollout.
    """
    rows = member.rows
    tensors = {
        "start": buffer.whole.start[member.last, rows].clone(),
        "core_state": core_state[rows].clone(),
        "last_action": buffer.actions[member.last, rows].clone(),
        "last_reward": buffer.rewards[member.last, rows].clone(),
        "score": torch.from_numpy(member.score.copy()),
        "length": torch.from_numpy(member.length.copy()),
        "counts": torch.from_numpy(member.counts.copy()),
        "return_carry": member.return_carry.clone(),
    }
    return tensors if member.drift is None else tensors | {"drift": member.drift.clone()}


def restore(member: ActingShard, tensors: dict[str, Tensor], buffer: RolloutBuffer, core_state: Tensor) -> None:
    """Restore the result of `saved`, in place."""
    rows, member.last = member.rows, -1
    buffer.whole.start[-1, rows] = tensors["start"]
    core_state[rows] = tensors["core_state"]
    buffer.actions[-1, rows] = tensors["last_action"]
    buffer.rewards[-1, rows] = tensors["last_reward"]
    member.score[:], member.length[:] = tensors["score"].numpy(), tensors["length"].numpy()
    member.counts[:] = tensors["counts"].numpy() if "counts" in tensors else True  # not in earlier versions
    member.return_carry.copy_(tensors["return_carry"])
    if member.drift is not None:
        member.drift = tensors["drift"].clone()
