"""The adapter `envpool` (extra `envpool`): Atari, MuJoCo, DeepMind Control, Procgen, MiniGrid, Doom, … in C++."""

from __future__ import annotations

from envpool.registration import registry

from lockstep.envs import vizdoom
from lockstep.envs.atari import atari_name
from lockstep.envs.base import Adapter
from lockstep.envs.envpool_shard import EnvPoolShard
from lockstep.envs.episodes import Seeds
from lockstep.envs.settings import EnvConfig

_ATARI, _PROCGEN = "envpool.atari", "envpool.procgen"


class EnvPool(Adapter):
    """EnvPool's environments, and lockstep's Doom scenarios on its engine."""

    threads = joins = True

    def ids(self) -> list[str]:
        others = [env_id for env_id in registry.specs if _family(env_id) != _ATARI]
        return [*self.games(), *others, *vizdoom.ids()]

    def games(self) -> list[str]:
        return [env_id.removesuffix("-v5") for env_id in registry.specs if _family(env_id) == _ATARI]

    def find(self, env_id: str) -> str | None:
        return atari_name(env_id, self.games()) or super().find(env_id)

    def has_levels(self, env_id: str) -> bool:
        return _family(env_id) == _PROCGEN

    def reports(self, env_id: str) -> bool:
        return True

    def needs_egl(self, env_id: str) -> bool:
        return ".mujoco" in _family(env_id)

    def make(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> EnvPoolShard:
        kind = vizdoom.VizdoomShard if config.id.startswith(vizdoom.PREFIX) else EnvPoolShard
        return kind(config, seeds=seeds, num_envs=num_envs, threads=threads, render=render)


def _family(env_id: str) -> str:
    """The module of EnvPool that an id belongs to, such as envpool.atari; "" for other ids."""
    return registry.specs[env_id][0] if env_id in registry.specs else ""
