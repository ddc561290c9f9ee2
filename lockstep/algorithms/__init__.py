"""Algorithms: each in one file, its settings and its loss readable top to bottom."""

from lockstep.algorithms.a2c import A2C, A2CConfig
from lockstep.algorithms.appo import APPO, APPOConfig
from lockstep.algorithms.base import (
    Algorithm,
    AlgorithmConfig,
    Batch,
    LossOutput,
    OnPolicy,
    OnPolicyConfig,
    OptimizerConfig,
    Targets,
)
from lockstep.algorithms.dqn import DQN, DQNConfig
from lockstep.algorithms.impala import IMPALA, IMPALAConfig
from lockstep.algorithms.ppo import PPO, PPOConfig

__all__ = [
    "A2C",
    "APPO",
    "DQN",
    "IMPALA",
    "PPO",
    "A2CConfig",
    "APPOConfig",
    "Algorithm",
    "AlgorithmConfig",
    "Batch",
    "DQNConfig",
    "IMPALAConfig",
    "LossOutput",
    "OnPolicy",
    "OnPolicyConfig",
    "OptimizerConfig",
    "PPOConfig",
    "Targets",
]
