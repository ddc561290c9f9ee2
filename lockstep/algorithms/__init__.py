"""Algorithms. Each has one file, with its settings and its loss."""

from lockstep.algorithms.a2c import A2C, A2CConfig
from lockstep.algorithms.appo import APPO, APPOConfig
from lockstep.algorithms.base import Algorithm, AlgorithmConfig, LossOutput, OptimizerConfig, ParameterGroup
from lockstep.algorithms.crossq import CrossQ, CrossQConfig
from lockstep.algorithms.ddpg import DDPG, DDPGConfig
from lockstep.algorithms.dqn import DQN, DQNConfig
from lockstep.algorithms.drq import DrQ, DrQConfig
from lockstep.algorithms.impala import IMPALA, IMPALAConfig
from lockstep.algorithms.mpc import MPC, MPCConfig
from lockstep.algorithms.mpo import MPO, MPOConfig
from lockstep.algorithms.onpolicy import Batch, OnPolicy, OnPolicyConfig, Targets
from lockstep.algorithms.ppo import PPO, PPOConfig
from lockstep.algorithms.pqn import PQN, PQNConfig
from lockstep.algorithms.r2d2 import R2D2, R2D2Config
from lockstep.algorithms.sac import SAC, SACConfig
from lockstep.algorithms.spr import SPR, SPRConfig
from lockstep.algorithms.td3 import TD3, TD3Config

__all__ = [
    "A2C",
    "APPO",
    "DDPG",
    "DQN",
    "IMPALA",
    "MPC",
    "MPO",
    "PPO",
    "PQN",
    "R2D2",
    "SAC",
    "SPR",
    "TD3",
    "A2CConfig",
    "APPOConfig",
    "Algorithm",
    "AlgorithmConfig",
    "Batch",
    "CrossQ",
    "CrossQConfig",
    "DDPGConfig",
    "DQNConfig",
    "DrQ",
    "DrQConfig",
    "IMPALAConfig",
    "LossOutput",
    "MPCConfig",
    "MPOConfig",
    "OnPolicy",
    "OnPolicyConfig",
    "OptimizerConfig",
    "PPOConfig",
    "PQNConfig",
    "ParameterGroup",
    "R2D2Config",
    "SACConfig",
    "SPRConfig",
    "TD3Config",
    "Targets",
]
