"""Learners whose kernels compute gradients in portable arithmetic.

Shape legend: S slots of this learner, P parameters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch

from lockstep.agent import Agent
from lockstep.core.digests import fast_digest
from lockstep.distributed.tree import TreeSum, complete
from lockstep.kernels.sums import add_up
from lockstep.learners.learner import Learner


class KernelLearner(Learner):
    """A learner that writes the gradients of all its slots into one array, where a kernel adds them up. Everything
    around a gradient is Learner's."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum, *, alive: Callable[[], None] = lambda: None) -> None:
        super().__init__(agent, slots, tree, alive=alive)
        self._parameters = agent.flat.vector.detach().numpy()
        self._out = np.zeros((len(slots), self._parameters.size + agent.flat.tail), np.float32)
        plain = type(self.reduction) is TreeSum
        self._subtree = plain and complete(slots)
        """Whether a kernel may add up the gradients of all slots."""
        self._reuses = plain and not self._lag
        """Whether nothing keeps a gradient until the next one: another reduction may, and delayed gradients do."""

    def _push(self, step: int, hyper: dict[str, float], digests: dict[int, str]) -> None:
        out = self._out if self._reuses else np.zeros_like(self._out)  # memory that was just used is faster
        self.compute(step, hyper, out)
        self._alive()
        if step > 0 and self._subtree:
            add_up(out)
            self.reduction.push_sum(self._slots.start, torch.from_numpy(out[0]), len(out))
            return
        for slot, numbers in zip(self._slots, out, strict=True):
            gradient = torch.from_numpy(numbers)
            if step == 0:
                digests[slot] = fast_digest(gradient)
            self.reduction.push(slot, gradient)

    @abstractmethod
    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray) -> None:
        """Write each slot's gradient, followed by counts and sums of metrics: float32 [S, P + tail]."""
