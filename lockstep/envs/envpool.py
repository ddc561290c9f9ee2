"""The adapter `envpool` (extra `envpool`): Atari, MuJoCo, DeepMind Control, Procgen, MiniGrid, Doom, … in C++."""

from __future__ import annotations

from envpool.registration import registry

from lockstep.envs import vizdoom
from lockstep.envs.atari import atari_name
from lockstep.envs.base import Adapter
from lockstep.envs.envpool_shard import ATARI, PROCGEN, EnvPoolShard, family
from lockstep.envs.episodes import Seeds
from lockstep.envs.settings import EnvConfig


class EnvPool(Adapter):
    """EnvPool's environments, and lockstep's Doom scenarios on its engine."""

    threads = joins = True

    def ids(self) -> list[str]:
        others = [env_id for env_id in registry.specs if family(env_id) != ATARI]
        return [*self.games(), *others, *vizdoom.ids()]

    def games(self) -> list[str]:
        return [env_id.removesuffix("-v5") for env_id in registry.specs if family(env_id) == ATARI]

    def find(self, env_id: str) -> str | None:
        return atari_name(env_id, self.games()) or super().find(env_id)

    def has_levels(self, env_id: str) -> bool:
        return family(env_id) == PROCGEN

    def reports(self, env_id: str) -> bool:
        return True

    def needs_egl(self, env_id: str) -> bool:
        return ".mujoco" in family(env_id)

    def make(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> EnvPoolShard:
        kind = vizdoom.VizdoomShard if config.id.startswith(vizdoom.PREFIX) else EnvPoolShard
        return kind(config, seeds=seeds, num_envs=num_envs, threads=threads, render=render)
