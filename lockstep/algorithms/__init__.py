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
from lockstep.algorithms.r2d2 import R2D2, R2D2Config

__all__ = [
    "A2C",
    "APPO",
    "DQN",
    "IMPALA",
    "PPO",
    "R2D2",
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
    "R2D2Config",
    "Targets",
]
