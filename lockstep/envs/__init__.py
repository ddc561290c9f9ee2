"""Environments: their common interface (ShardEnv), adapters of libraries, and the choice between adapters."""

from lockstep.envs.adapters import register_adapter
from lockstep.envs.base import Adapter, Observation, ShardEnv, StepResult, allocate_observation
from lockstep.envs.episodes import Seeds
from lockstep.envs.factory import (
    adapter_of,
    asked_metrics,
    atari_game,
    check_matches,
    first_seeds,
    list_envs,
    make,
    resolve,
    spaces,
    whole_matches,
)
from lockstep.envs.settings import EnvConfig

__all__ = [
    "Adapter",
    "EnvConfig",
    "Observation",
    "Seeds",
    "ShardEnv",
    "StepResult",
    "adapter_of",
    "allocate_observation",
    "asked_metrics",
    "atari_game",
    "check_matches",
    "first_seeds",
    "list_envs",
    "make",
    "register_adapter",
    "resolve",
    "spaces",
    "whole_matches",
]
