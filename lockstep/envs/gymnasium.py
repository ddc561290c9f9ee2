"""The adapter `gymnasium`: gymnasium's environments, PettingZoo's, and users' callables, stepped by Python."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import gymnasium

import lockstep.envs.minatar
import lockstep.envs.tasks  # noqa: F401 - like minatar, it registers environments
from lockstep.config.settings import Names
from lockstep.config.user_code import import_module, load_object
from lockstep.envs.base import Adapter
from lockstep.envs.compiled import CompiledEnv
from lockstep.envs.construct import PREFIX, construct, is_callable, needs_library
from lockstep.envs.doom.matches import canonical_id
from lockstep.envs.episodes import Seeds
from lockstep.envs.gymnasium_shard import GymShard
from lockstep.envs.multiagent.pettingzoo import MatchShard, agents_of, names_of
from lockstep.envs.multiagent.policies import metrics_by_policy
from lockstep.envs.settings import EnvConfig
from lockstep.envs.torch_env import TorchEnv
from lockstep.system.output import reserve_streams


class Gymnasium(Adapter):
    """Environments in a Python loop, in the collecting process or in its child processes."""

    processes = True
    decorrelates = True
    limits_episodes = True

    def ids(self) -> list[str]:
        found = [env_id for env_id in gymnasium.registry if not env_id.startswith("GymV")]
        if importlib.util.find_spec("pettingzoo"):
            import pettingzoo

            found += [PREFIX + name for name in sorted({*pettingzoo.aec_registry, *pettingzoo.parallel_registry})]
        return found

    def find(self, env_id: str) -> str | None:
        if is_callable(env_id):
            found = load_object(env_id.removeprefix(PREFIX))
            return None if isinstance(found, type) and issubclass(found, (CompiledEnv, TorchEnv)) else env_id
        env_id = canonical_id(env_id)
        if env_id.startswith(PREFIX) and not importlib.util.find_spec("pettingzoo"):
            raise needs_library(f"env.id={env_id}", ModuleNotFoundError("No module named 'pettingzoo'"))
        if env_id.startswith("MinAtar/") and not importlib.util.find_spec("minatar"):
            return None  # lockstep registers these ids, and without the library only the adapter compiled serves them
        if env_id.startswith("ALE/") and importlib.util.find_spec("ale_py"):
            importlib.import_module("ale_py")  # registers these ids
        if env_id in gymnasium.registry or env_id in self.ids():
            return env_id
        module, _, name = env_id.rpartition(":")
        if not module:
            return None
        try:
            import_module(module)  # gymnasium's "module:id" names the module that registers the id
        except ModuleNotFoundError as error:
            raise needs_library(f"env.id={env_id}", error) from error
        return env_id if name in gymnasium.registry else None

    def has_levels(self, env_id: str) -> bool:
        del env_id
        return True

    def reports(self, env_id: str) -> bool:
        del env_id
        return True

    def own_metrics(self, config: EnvConfig) -> Names:
        return metrics_by_policy(config, names_of(config)) if config.several_policies else ()

    def changes_options(self, env_id: str) -> bool:
        return not env_id.startswith(PREFIX)

    def central_states(self, env_id: str) -> tuple[str, ...]:
        return ("observations", "state") if env_id.startswith(PREFIX) else ()

    def several_policies(self, env_id: str) -> bool:
        return env_id.startswith(PREFIX)

    def opponents(self, env_id: str) -> bool:
        return env_id.startswith(PREFIX)

    def group_size(self, config: EnvConfig) -> int:
        return max(1, agents_of(config))

    def single(self, config: EnvConfig) -> gymnasium.Env[Any, Any]:
        return construct(config)

    def make(
        self, config: EnvConfig, *, seeds: Seeds, num_envs: int, threads: int = 1, render: bool = False
    ) -> GymShard:
        del threads
        kind = MatchShard if agents_of(config) else GymShard
        shard = kind(config, seeds=seeds, num_envs=num_envs, render=render)
        reserve_streams()  # a constructor may have closed them
        return shard
