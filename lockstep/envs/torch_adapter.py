"""The adapter `torch`: environments whose tensors are on the policy's device."""

from __future__ import annotations

import torch

from lockstep.config.user_code import load_object
from lockstep.envs.base import Adapter, ShardEnv
from lockstep.envs.construct import PREFIX, construct_batch, is_callable
from lockstep.envs.episodes import Seeds
from lockstep.envs.settings import EnvConfig
from lockstep.envs.torch_env import TorchEnv
from lockstep.envs.torch_shard import TorchShard
from lockstep.system.output import reserve_streams


class Torch(Adapter):
    """Users' subclasses of TorchEnv."""

    decorrelates = True
    limits_episodes = True
    devices = True
    own_seeds = True
    repeat_advice = (
        "Draw random numbers with lockstep.envs.torch_env.uniform from the seeds alone, not with torch.rand; store "
        "everything that an episode remembers in the state; and compute row by row, without sums or means over "
        "environments."
    )

    def ids(self) -> list[str]:
        return []

    def find(self, env_id: str) -> str | None:
        return env_id if is_torch(env_id) else None

    def has_levels(self, env_id: str) -> bool:
        del env_id
        return True

    def make(
        self,
        config: EnvConfig,
        *,
        seeds: Seeds,
        num_envs: int,
        threads: int = 1,
        render: bool = False,
        device: str = "cpu",
    ) -> ShardEnv:
        del threads, render
        place = torch.device(device)
        env = construct_batch(config, num_envs, device=place)
        shard = TorchShard(env, config, seeds=seeds, num_envs=num_envs, device=place)
        reserve_streams()  # a constructor may have closed them
        return shard


def is_torch(env_id: str) -> bool:
    """Whether an id names a subclass of TorchEnv."""
    if env_id.startswith(PREFIX) or not is_callable(env_id):
        return False
    found = load_object(env_id)
    return isinstance(found, type) and issubclass(found, TorchEnv)
