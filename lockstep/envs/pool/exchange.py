"""The shared memory through which a collector and the processes of its pool exchange a step."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces

from lockstep.core.arrays import ArrayTuple
from lockstep.distributed.shared_memory import Arena, SharedMemory
from lockstep.envs.base import allocate_observation
from lockstep.models.action_spaces import action_parts


class Exchange(ArrayTuple):
    """Shared numpy arrays through which the collector and the processes exchange a step of B environments."""

    obs: Any
    """The observations that ShardEnv writes."""
    action: dict[str, Any]
    """[B, ...], by component."""
    reward: Any
    """float32 [B]; the next three are bool [B]: see StepResult."""
    terminated: Any
    truncated: Any
    first: Any
    replayed: Any
    """int64 [B]: steps replayed so far, counted in the first row of each block."""
    metrics: Any
    """float64 [B, M]; None without metrics."""


def exchange_of(
    memory: SharedMemory,
    begin: int,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    num_envs: int,
    metrics: int,
) -> tuple[Exchange, int]:
    """The arrays of one shard, which begin at byte `begin`, and the byte after them. metrics: M."""

    def allocate(arena: Arena) -> tuple[Exchange, int]:
        arena.zeros((begin,), torch.uint8)
        exchange = Exchange(
            obs=allocate_observation(observation_space, (num_envs,), arena),
            action={
                str(i): allocate_observation(part, (num_envs,), arena)
                for i, part in enumerate(action_parts(action_space))
            },
            reward=arena.zeros((num_envs,)),
            terminated=arena.zeros((num_envs,), torch.bool),
            truncated=arena.zeros((num_envs,), torch.bool),
            first=arena.zeros((num_envs,), torch.bool),
            replayed=arena.zeros((num_envs,), torch.int64),
            metrics=arena.zeros((num_envs, metrics), torch.float64) if metrics else None,
        )
        return exchange, arena.size

    exchange, end = memory.map(allocate)
    return exchange.to_numpy(), end
