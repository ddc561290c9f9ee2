"""Learners whose kernels compute gradients in portable arithmetic.

Shape legend: S slots of this learner, P parameters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.distributed.tree import TreeSum, complete
from lockstep.learners.learner import Learner
from lockstep.learners.optimizer import PortableOptimizer


class KernelLearner(Learner):
    """A learner that writes the gradients of all its slots into one array, where a kernel adds them up. Learner does
    everything else."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        self._parameters = agent.flat.vector.detach().numpy()
        self._out = np.zeros((len(slots), self._parameters.size + agent.flat.tail), np.float32)
        plain = type(self.reduction) is TreeSum
        self._subtree = plain and complete(slots)
        """Whether a kernel may add up the gradients of all slots."""
        self._reuses = plain and not self._lag
        """Whether a gradient's memory is free when the next one is computed. Another reduction may keep the gradient,
        and delayed gradients are kept."""
        algorithm, optimizer = self._algorithm, self.optimizer
        assert isinstance(optimizer, PortableOptimizer)
        self.optimizer: PortableOptimizer = optimizer
        self._fuses = not (algorithm.reads_steps or algorithm.counted or self._lag)
        """Whether a gradient is the sum over all slots, perhaps divided by one number, and is applied before the next
        one is computed."""

    def _push(self, step: int, hyper: dict[str, float], digests: dict[int, str]) -> None:
        if step == 0 or not self._subtree:  # the first step needs every slot's gradient, for its digest
            super()._push(step, hyper, digests)
            return
        out = self._computed(step, hyper, joined=True)
        self.reduction.push_sum(self._slots.start, torch.from_numpy(out[0]), len(out))
        self.heartbeat()

    def _slices(self, step: int, hyper: dict[str, float]) -> Iterator[tuple[int, Tensor]]:
        for slot, gradient in zip(self._slots, self._computed(step, hyper, joined=False), strict=True):
            yield slot, torch.from_numpy(gradient)

    def _computed(self, step: int, hyper: dict[str, float], *, joined: bool) -> np.ndarray:
        out = self._out if self._reuses else np.zeros_like(self._out)  # memory that was just used is faster
        self.compute(step, hyper, out, joined=joined)
        return out

    def _apply_fused(
        self, total: Tensor, iteration: int, number: int, hyper: dict[str, float], sums: Tensor
    ) -> float | None:
        """Apply a global gradient with few operations around the optimizer's kernel, and return its norm; None if that
        kernel does not cover it."""
        if not self._fuses:
            return None
        groups = self._algorithm.groups(number, hyper)
        if not self.optimizer.joins(groups):
            return None
        numbers, added = total.numpy(), sums.numpy()
        tail = numbers[self._parameters.size :]
        divisor = self._divisor(tail)
        added += tail[: len(added)]
        norm = self.optimizer.step_of_sum(numbers, groups, divisor)
        self._update_target(number)
        return norm

    def repeated(self, step: int, hyper: dict[str, float], out: np.ndarray) -> Callable[[], None]:
        """For measurements: a call that computes the gradient of one step of the iteration, as compute does, from the
        same items every time, for all slots together if possible."""
        return lambda: self.compute(step, hyper, out, joined=self._subtree)

    @abstractmethod
    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray, *, joined: bool = False) -> None:
        """Write each slot's gradient, followed by counts and sums of metrics: float32 [S, P + tail].

        Args:
            joined: write the tree's sum over all slots to out[0] instead, which takes less time. The other rows are
                overwritten.
        """
