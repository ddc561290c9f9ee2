"""Environments: one protocol (ShardEnv), three libraries behind it, and the choice between them."""

from lockstep.envs.base import EnvConfig, Observation, ShardEnv, StepResult, allocate_observation
from lockstep.envs.registry import (
    atari_game,
    check_matches,
    first_seeds,
    list_envs,
    make,
    resolve,
    spaces,
    whole_matches,
)

__all__ = [
    "EnvConfig",
    "Observation",
    "ShardEnv",
    "StepResult",
    "allocate_observation",
    "atari_game",
    "check_matches",
    "first_seeds",
    "list_envs",
    "make",
    "resolve",
    "spaces",
    "whole_matches",
]
