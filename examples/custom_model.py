"""Your own model: a residual network over vector observations, trained with PPO.

lockstep train examples/custom_model.py:recipe --layout processes:2
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from lockstep import recipes
from lockstep.experiment import Experiment
from lockstep.models import ModelConfig, ModelOutput, PolicyModel, make_distribution
from lockstep.models.layers import reproducible_initialization


class ResidualModel(PolicyModel):
    """Residual blocks, then one linear head for the policy and one for the value."""

    state_size = 0
    mean: Tensor
    std: Tensor

    def __init__(self, observation_size: int, action_space: gymnasium.Space[Any], width: int, blocks: int) -> None:
        super().__init__()
        self.distribution = make_distribution(action_space)
        self.register_buffer("mean", torch.zeros(observation_size))
        self.register_buffer("std", torch.ones(observation_size))
        self.first = nn.Linear(observation_size, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)
        )
        self.policy_head = nn.Linear(width, self.distribution.num_params)
        self.value_head = nn.Linear(width, 1)
        nn.init.orthogonal_(self.policy_head.weight, 0.01)
        nn.init.zeros_(self.policy_head.bias)

    def forward(
        self,
        obs: Tensor,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        """obs [T, B, D]. Each row is computed from that row alone: what else a call holds must not matter."""
        features = self.first((obs - self.mean) / self.std)
        for block in self.blocks:
            features = features + block(features)
        return ModelOutput(self.policy_head(features), self.value_head(features).squeeze(-1)), state

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        self.mean.copy_(mean)
        self.std.copy_(std)

    def for_acting(self) -> ResidualModel:
        return copy.deepcopy(self).requires_grad_(False)


@dataclass(frozen=True)
class ResidualConfig(ModelConfig):
    """Every field becomes a flag, such as --model.width 128, with its docstring as help."""

    width: int = 64
    """Features of each block. More fit harder functions and cost more."""
    blocks: int = 2
    """Residual blocks. More fit harder functions, learn less stably and cost more."""

    def build(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        seed: int,
        **precision_and_normalization: Any,
    ) -> ResidualModel:
        assert observation_space.shape is not None and len(observation_space.shape) == 1
        with reproducible_initialization(seed):
            return ResidualModel(observation_space.shape[0], action_space, self.width, self.blocks)


def recipe() -> Experiment:
    """PPO with the residual model on CartPole."""
    return recipes.ppo_cartpole().replace(model=ResidualConfig())
