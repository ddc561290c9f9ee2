"""The adapter `compiled`: environments that Numba compiles."""

from __future__ import annotations

from lockstep.config.settings import Names
from lockstep.config.user_code import load_object
from lockstep.envs.base import Adapter, ShardEnv
from lockstep.envs.compiled import CompiledEnv
from lockstep.envs.construct import PREFIX, is_callable
from lockstep.envs.episodes import Seeds
from lockstep.envs.multiagent.policies import metrics_by_policy
from lockstep.envs.settings import EnvConfig

_BUILT_IN = {
    "Acrobot-v1": "lockstep.envs.classic:Acrobot",
    "CartPole-v1": "lockstep.envs.classic:CartPole",
    "MountainCar-v0": "lockstep.envs.classic:MountainCar",
    "MountainCarContinuous-v0": "lockstep.envs.classic:MountainCarContinuous",
    "Pendulum-v1": "lockstep.envs.classic:Pendulum",
    **{
        f"MinAtar/{game}-{version}": f"lockstep.envs.compiled_minatar:{game}{kind}"
        for game in ("Asterix", "Breakout", "Freeway", "SpaceInvaders")
        for version, kind in (("v0", ""), ("v1", "Minimal"))
    },
    **{f"MinAtar/Seaquest-{version}": "lockstep.envs.compiled_seaquest:Seaquest" for version in ("v0", "v1")},
    "mpe/simple_spread_v2": "lockstep.envs.compiled_mpe:FormerSpread",
    "mpe/simple_spread_v3": "lockstep.envs.compiled_mpe:SimpleSpread",
    "mpe/simple_speaker_listener_v3": "lockstep.envs.compiled_mpe:FormerSpeakerListener",
    "mpe/simple_speaker_listener_v4": "lockstep.envs.compiled_mpe:SimpleSpeakerListener",
}


class Compiled(Adapter):
    """gymnasium's classic control, MinAtar, particle worlds of MPE, and subclasses of CompiledEnv."""

    decorrelates = True
    limits_episodes = True
    repeat_advice = (
        "Take all randomness from lockstep.kernels.random, as in uniform(state, 0.0, 1.0), not from random or "
        "np.random, and let reset set every field of the state."
    )

    def ids(self) -> list[str]:
        return list(_BUILT_IN)

    def find(self, env_id: str) -> str | None:
        if env_id.startswith(PREFIX):
            return None
        return super().find(env_id) if not is_callable(env_id) or class_of(env_id) is None else env_id

    def has_levels(self, env_id: str) -> bool:
        del env_id
        return True

    def central_states(self, env_id: str) -> tuple[str, ...]:
        cls = class_of(env_id)
        return ("observations",) if cls is not None and cls.agents else ()

    def several_policies(self, env_id: str) -> bool:
        return bool(self.central_states(env_id))

    def own_metrics(self, config: EnvConfig) -> Names:
        cls = class_of(config.id)
        return metrics_by_policy(config, list(cls.agents)) if cls is not None else ()

    def group_size(self, config: EnvConfig) -> int:
        cls = class_of(config.id)
        return max(1, len(cls.agents)) if cls is not None else 1

    def make(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> ShardEnv:
        from lockstep.envs.compiled_shard import CompiledShard  # imports Numba, which takes a second

        del threads, render
        cls = class_of(config.id)
        assert cls is not None
        return CompiledShard(cls, config, seeds=seeds, num_envs=num_envs)


def class_of(env_id: str) -> type[CompiledEnv] | None:
    """The class that an id names; None if it is another object."""
    found = load_object(_BUILT_IN.get(env_id, env_id))
    return found if isinstance(found, type) and issubclass(found, CompiledEnv) else None
