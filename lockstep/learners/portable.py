"""A learner in portable arithmetic: one kernel computes the gradients of all its slots, another one applies them.

Shape legend: S slots of this learner, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.algorithms.ppo import PPOConfig
from lockstep.buffers.portable import PortableBatches
from lockstep.distributed.tree import TreeSum, complete
from lockstep.kernels.ppo import ppo_gradients
from lockstep.kernels.sums import add_up
from lockstep.learners.learner import Learner
from lockstep.models.policy import StandardModel
from lockstep.models.portable import Network, PortableCategorical, PortableGaussian


class PortableLearner(Learner):
    """Learns by PPO. Batch slots, the tree and everything around a gradient are Learner's."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum, *, alive: Callable[[], None] = lambda: None) -> None:
        super().__init__(agent, slots, tree, alive=alive)
        config, model = agent.experiment.algorithm, agent.model
        assert isinstance(config, PPOConfig) and isinstance(model, StandardModel)
        assert isinstance(model.distribution, (PortableCategorical, PortableGaussian))
        self._value_clip, self._kind = config.value_clip, model.distribution.kind
        assert isinstance(self.batches, PortableBatches)
        self._minibatches = self.batches
        self._network = Network.of(model, agent.flat)
        self._parameters = agent.flat.vector.detach().numpy()
        self._out = np.empty((len(slots), self._parameters.size + agent.flat.tail), np.float32)
        self._subtree = type(self.reduction) is TreeSum and complete(slots)
        """Whether a kernel may add up the gradients of all slots."""

    def _push(self, step: int, hyper: dict[str, float], digests: dict[int, str]) -> None:
        if step == 0 or not self._subtree:
            super()._push(step, hyper, digests)
            return
        gradients = self._gradients(step, hyper)
        add_up(gradients)
        self.reduction.push(self._slots.start, torch.from_numpy(gradients[0]), len(gradients))
        self._alive()

    def _slices(self, step: int, hyper: dict[str, float]) -> Iterator[tuple[int, Tensor]]:
        for slot, gradient in zip(self._slots, self._gradients(step, hyper), strict=True):
            yield slot, torch.from_numpy(gradient)

    def _gradients(self, step: int, hyper: dict[str, float]) -> np.ndarray:
        """float32 [S, P + counts and sums of metrics]"""
        network, numbers = self._network, (hyper["clip"], self._value_clip, hyper["value_coef"], hyper["entropy_coef"])
        mean, scale = self._minibatches.scales[step]
        # Memory that was just used is faster than fresh one. A gradient that waits for its turn needs it for longer.
        gradients = np.empty_like(self._out) if self._lag else self._out
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
            gradients,
        )
        return gradients
