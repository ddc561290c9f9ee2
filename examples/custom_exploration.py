"""Your own exploration: DQN chooses actions by the softmax of their values, at a temperature, instead of by ε.

Source: Sutton and Barto 2018, http://incompleteideas.net/book/the-book-2nd.html, exercise 2.9 and section 2.8 (the
softmax, or Boltzmann, distribution).

lockstep train examples/custom_exploration.py:recipe --layout processes:2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gymnasium import spaces
from torch import Tensor

from lockstep import recipes
from lockstep.algorithms.base import Exploration
from lockstep.algorithms.dqn import DQN, DQNConfig
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.models import QModelConfig
from lockstep.models.distributions import EpsilonGreedy


class Boltzmann(EpsilonGreedy):
    """Draws actions from softmax(q / temperature) while it explores. Evaluations act as DQN does."""

    exact = False  # logarithms may round differently on another CPU

    def __init__(self, space: spaces.Discrete, *, masked: bool = False) -> None:
        super().__init__(space, masked=masked)
        self.noise_size = max(self.n, super().noise_size)

    def explore(self, params: Tensor, noise: Tensor, numbers: Tensor) -> Tensor:
        """Action values [..., A], noise in (0, 1) [..., N], temperatures [..., 1] -> actions [...], by the Gumbel-max
        trick. Values of forbidden actions are so low that they are never drawn."""
        noise = noise[..., : self.n].clamp(1e-7, 1 - 1e-7)
        return (params / numbers - torch.log(-torch.log(noise))).argmax(-1)


@dataclass(frozen=True)
class BoltzmannModelConfig(QModelConfig):
    def build_distribution(self, action_space: spaces.Discrete, *, masked: bool) -> Boltzmann:
        return Boltzmann(action_space, masked=masked)


@dataclass(frozen=True)
class BoltzmannConfig(DQNConfig):
    name = "dqn-boltzmann"

    temperature: float = 0.1
    """In units of returns. Higher explores more; lower follows the values more closely."""

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        super().validate(envs_per_shard, recurrent=recurrent)
        if not self.temperature > 0:
            raise SettingsError(f"algorithm.temperature={self.temperature} must be above 0, for example 0.1.")

    def build(self) -> BoltzmannDQN:
        return BoltzmannDQN(self)


class BoltzmannDQN(DQN[BoltzmannConfig]):
    def exploration(self, progress: float, samples: int, environments: range, num_envs: int) -> Exploration:
        warm = samples < self.config.warmup  # random actions until learning begins
        return Exploration(warm, torch.full((len(environments), 1), self.config.temperature))


def recipe() -> Experiment:
    """DQN on CartPole that explores by the softmax of its values."""
    experiment = recipes.dqn_cartpole()
    algorithm = BoltzmannConfig(**vars(experiment.algorithm))
    return experiment.replace(algorithm=algorithm, model=BoltzmannModelConfig(**vars(experiment.model)))
