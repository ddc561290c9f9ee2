"""PPO in portable arithmetic: one kernel computes the gradients of all slots."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.agent import Agent
from lockstep.algorithms.ppo import PPOConfig
from lockstep.buffers.ppo_batches import PPOBatches
from lockstep.distributed.tree import TreeSum
from lockstep.kernels.ppo import ppo_gradients
from lockstep.learners.kernels import KernelLearner
from lockstep.models.kernel_policy import KernelCategorical, KernelGaussian, Network
from lockstep.models.policy import StandardModel


class PPOLearner(KernelLearner):
    """Learns by PPO."""

    def __init__(
        self, agent: Agent, slots: range, tree: TreeSum, *, heartbeat: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(agent, slots, tree, heartbeat=heartbeat)
        config, model = agent.experiment.algorithm, agent.model
        assert isinstance(config, PPOConfig) and isinstance(model, StandardModel)
        assert isinstance(model.distribution, (KernelCategorical, KernelGaussian))
        self._value_clip, self._kind = config.value_clip, model.distribution.kind
        assert isinstance(self.batches, PPOBatches)
        self._minibatches = self.batches
        self._network = Network.of(model, agent.flat)

    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray, *, joined: bool = False) -> None:
        network, numbers = self._network, (hyper["clip"], self._value_clip, hyper["value_coef"], hyper["entropy_coef"])
        mean, scale = self._minibatches.scales[step]
        ppo_gradients(
            network.layers,
            self._kind,
            network.free_std,
            network.log_stds,
            self._parameters,
            self._minibatches.items,
            self._minibatches.index[step],
            np.float32(mean),
            np.float32(scale),
            tuple(map(np.float32, numbers)),
            joined,
            out,
        )
