"""A learner in portable arithmetic: one kernel computes the gradients of all its slots, another one applies them.

Shape legend: S slots of this learner, P parameters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.algorithms.ppo import PPOConfig
from lockstep.buffers.portable import PortableBatches
from lockstep.distributed.tree import TreeSum
from lockstep.kernels.ppo import ppo_gradients
from lockstep.learners.learner import Learner
from lockstep.models.policy import StandardModel
from lockstep.models.portable import Network, PortableCategorical, PortableGaussian
from lockstep.system.output import tell

_NOTICEABLE = 5.0
"""Seconds of a first call from which it is explained."""


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
        self._compiled = False
        self._shape = len(slots), self._parameters.size + agent.flat.tail

    def _slices(self, step: int, hyper: dict[str, float]) -> Iterator[tuple[int, Tensor]]:
        network, numbers = self._network, (hyper["clip"], self._value_clip, hyper["value_coef"], hyper["entropy_coef"])
        mean, scale = self._minibatches.scales[step]
        gradients, begin = np.empty(self._shape, np.float32), time.perf_counter()
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
        if not self._compiled:
            self._tell_of_compiling(time.perf_counter() - begin)
        for slot, gradient in zip(self._slots, gradients, strict=True):
            yield slot, torch.from_numpy(gradient)

    def _tell_of_compiling(self, seconds: float) -> None:
        """Say what the first call was spent on, unless the kernels came from the cache."""
        self._compiled = True
        if seconds > _NOTICEABLE and self._tree.group.rank == 0:
            tell(f"Kernels were compiled in {seconds:.0f} s. Later runs load them from a cache.", sys.stderr)
