"""PPO whose features must also predict the reward, as in UNREAL (Jaderberg et al. 2016,
https://arxiv.org/abs/1611.05397, section 3.2, there from several frames).

    lockstep train examples/auxiliary_loss.py:recipe --total-steps 20k
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
from torch import Tensor, nn

from lockstep import recipes
from lockstep.algorithms.losses import masked_sum
from lockstep.algorithms.onpolicy import Batch
from lockstep.algorithms.ppo import PPO, PPOConfig
from lockstep.envs import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import ModelOutput, PolicyModel, reproducible_initialization


@dataclass(frozen=True)
class PredictingConfig(PPOConfig):
    """PPO's settings, and one more."""

    name = "ppo-predicting"

    prediction_coef: float = 0.1
    """Weight of the prediction's loss. Higher shapes the features more by it."""

    def build(self) -> Predicting:
        return Predicting(self)


class Predicting(PPO):
    config: PredictingConfig

    def companion(self, observation_space: gymnasium.Space[Any], seed: int) -> nn.Module:
        with reproducible_initialization(seed):
            return nn.Linear(64, 1)

    def auxiliary_loss(self, model: PolicyModel, output: ModelOutput, batch: Batch) -> Tensor:
        predicted_t = model.get_submodule("companion")(output.features).squeeze(-1)
        error_t = predicted_t - batch.reward
        return self.config.prediction_coef * masked_sum(error_t.square(), batch.valid)


def recipe() -> Experiment:
    """PPO with reward prediction on Pendulum."""
    env = EnvConfig(id="Pendulum-v1", num_envs=16)
    return recipes.ppo_cartpole().replace(env=env, algorithm=PredictingConfig(), precision="fp32")
