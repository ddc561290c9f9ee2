"""PPO in portable arithmetic: one kernel computes the gradients of all slots."""

from __future__ import annotations

import numpy as np

from lockstep.agent import Agent
from lockstep.algorithms.ppo import PPOConfig
from lockstep.buffers.ppo_batches import PPOBatches
from lockstep.distributed.tree import TreeSum
from lockstep.kernels.ppo import ppo_gradients
from lockstep.learners.kernel_learner import KernelLearner
from lockstep.models.kernel_policy import KernelCategorical, KernelGaussian, NetworkTable
from lockstep.models.policy import StandardModel


class PPOLearner(KernelLearner):
    """Learns by PPO."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        config, model = agent.experiment.algorithm, agent.model
        assert isinstance(config, PPOConfig) and isinstance(model, StandardModel)
        assert isinstance(model.distribution, (KernelCategorical, KernelGaussian))
        self._value_clip, self._kind = config.value_clip, model.distribution.kind
        assert isinstance(self.batches, PPOBatches)
        self._minibatches = self.batches
        self._network = NetworkTable.of(model, agent.flat).with_parameters(self._parameters)

    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray, *, joined: bool = False) -> None:
        batches = self._minibatches
        numbers = hyper["clip"], self._value_clip, hyper["value_coef"], hyper["entropy_coef"]
        scale, of_loss = (tuple(map(np.float32, each)) for each in (batches.scales[step], numbers))
        ppo_gradients(self._network, self._kind, batches.items, batches.index[step], scale, of_loss, joined, out)
