"""Environments: one protocol (ShardEnv), three libraries behind it, and the choice between them."""

from lockstep.envs.base import EnvConfig, Observation, ShardEnv, StepResult, allocate_observation
from lockstep.envs.registry import list_envs, make, resolve, spaces

__all__ = [
    "EnvConfig",
    "Observation",
    "ShardEnv",
    "StepResult",
    "allocate_observation",
    "list_envs",
    "make",
    "resolve",
    "spaces",
]
