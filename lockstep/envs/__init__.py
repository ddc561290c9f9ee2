"""Environments: one protocol (ShardEnv), three libraries behind it, and the choice between them."""

from lockstep.envs.base import EnvConfig, Observation, ShardEnv, StepResult
from lockstep.envs.registry import list_envs, make, resolve, spaces

__all__ = ["EnvConfig", "Observation", "ShardEnv", "StepResult", "list_envs", "make", "resolve", "spaces"]
