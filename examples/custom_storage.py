"""Your own storage: every minibatch from replay also contains the newest step of each environment.

Source: Zhang and Sutton 2017, https://arxiv.org/abs/1712.01275 (combined experience replay).

lockstep train examples/custom_storage.py:recipe --layout processes:2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep import recipes
from lockstep.algorithms.dqn import DQN, DQNConfig
from lockstep.buffers.replay import Replay
from lockstep.config.settings import SettingsError
from lockstep.core.rollout import Rollout
from lockstep.experiment import Experiment


class CombinedReplay(Replay, reads_on_gpu=True):
    """One shard's steps. What is not said here (inserting, gathering minibatches, checkpoints) is as in Replay. A GPU
    may have its observations, since `draw` reads none."""

    def draw(
        self, items: int, generator: np.random.Generator, newest: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        times, environments, probability = super().draw(items, generator, newest)
        last, count = self._newest(), min(self.size, items)
        valid = self._valid[last % self.steps, :count].numpy()  # not the step that a reset takes
        times[:count] = np.where(valid, last, times[:count])
        environments[:count] = np.where(valid, np.arange(count), environments[:count])
        return times, environments, probability


@dataclass(frozen=True)
class CombinedConfig(DQNConfig):
    name = "dqn-combined"

    def validate(self, envs_per_shard: int, *, recurrent: bool) -> None:
        super().validate(envs_per_shard, recurrent=recurrent)
        if self.replay.prioritized:
            raise SettingsError("algorithm.replay.prioritized goes by weights that this storage does not have.")

    def build(self) -> CombinedDQN:
        return CombinedDQN(self)


class CombinedDQN(DQN):
    def memory(self, experiment: Experiment, rollout: Rollout) -> Replay:
        return CombinedReplay(experiment, rollout)


def recipe() -> Experiment:
    """DQN with combined experience replay on CartPole."""
    experiment = recipes.dqn_cartpole()
    return experiment.replace(algorithm=CombinedConfig(**vars(experiment.algorithm)))
