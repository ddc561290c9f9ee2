"""The adapter `vector`: objects that step many copies of an environment, from gymnasium.make_vec or from a user."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs.base import Adapter, ShardEnv, load_adapter
from lockstep.envs.batch_shard import BatchShard
from lockstep.envs.closing import closed_on_error
from lockstep.envs.construct import PREFIX, construct_batch, is_callable
from lockstep.envs.episodes import Seeds
from lockstep.envs.settings import EnvConfig
from lockstep.envs.torch_adapter import is_torch
from lockstep.envs.vector_shard import VectorShard
from lockstep.system.output import reserve_streams


class Vector(Adapter):
    """One object for all environments of a shard: gymnasium's VectorEnv, or a BatchEnv with arrays or tensors."""

    decorrelates = True
    limits_episodes = True
    repeat_advice = (
        "In a batch of arrays or tensors, draw random numbers with lockstep.envs.batch.uniform from the seeds that "
        "reset gets, set all that belongs to its rows again in reset, and compute row by row. In a VectorEnv, take all "
        "randomness from self.np_random, which super().reset(seed=seed) seeds."
    )

    def ids(self) -> list[str]:
        return [env_id for env_id, spec in gymnasium.registry.items() if spec.vector_entry_point is not None]

    def find(self, env_id: str) -> str | None:
        return None if env_id.startswith(PREFIX) or is_torch(env_id) else load_adapter("gymnasium").find(env_id)

    def has_levels(self, env_id: str) -> bool:
        del env_id
        return True

    def reports(self, env_id: str) -> bool:
        del env_id
        return True

    def changes_options(self, env_id: str) -> bool:
        if not is_callable(env_id):
            return False
        found = load_object(env_id)
        return all(callable(getattr(found, name, None)) for name in ("get_state", "set_state", "set_options"))

    def make(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> ShardEnv:
        del threads
        env = construct_batch(config, num_envs, render)
        kind = VectorShard if isinstance(env, VectorEnv) else BatchShard
        with closed_on_error([env]):
            _check(env, config, num_envs)
            shard = kind(env, config, seeds=seeds)
        reserve_streams()  # a constructor may have closed them
        return shard


def _check(env: Any, config: EnvConfig, num_envs: int) -> None:
    """Raise SettingsError unless this object can serve as a shard's environments."""
    names = ("observation_space", "action_space")
    if isinstance(env, VectorEnv):
        names = ("single_observation_space", "single_action_space")
    for name in names:
        if not isinstance(getattr(env, name, None), gymnasium.Space):
            raise SettingsError(
                f"The batch of env.id={config.id} has no {name}. Let its constructor set self.{name} to the space of a "
                "single environment."
            )
    found = getattr(env, "num_envs", None)
    if found != num_envs:
        raise SettingsError(
            f"The batch of env.id={config.id} has num_envs={found!r}, but a shard takes {num_envs} here: "
            "env.num_envs / scheme.shards in training, and other numbers in evaluations and checks. Make as many "
            "environments as the argument num_envs says, and set self.num_envs to it."
        )
