"""R2D2 in portable arithmetic: one kernel computes the gradients of all slots' sequences.

Shape legend: as lockstep.kernels.sequence_learning.
"""

from __future__ import annotations

import numpy as np

from lockstep.agent import Agent
from lockstep.algorithms.r2d2 import R2D2Config
from lockstep.buffers.replay_batches import ReplayBatches
from lockstep.core import transitions
from lockstep.distributed.tree import TreeSum
from lockstep.kernels.sequence_learning import Sequences, Settings, sequence_gradients
from lockstep.learners.off_policy_kernels import ReplayLearner
from lockstep.models.layer_tables import core_of_q, inputs_of, observed, q_network, rows_of
from lockstep.models.q import QModel


class SequenceLearner(ReplayLearner):
    """Learns the values of sequences' actions."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        model, config = agent.model, agent.experiment.algorithm
        assert isinstance(model, QModel) and isinstance(config, R2D2Config)
        super().__init__(agent, slots, tree)
        loss = config.rescaling, config.priority_max, config.huber_delta
        self._settings = Settings(config.double, config.burn_in, *loss)
        self._model, self._network = model, q_network(model, agent.flat)
        self._core = core_of_q(model, agent.flat)
        self._used = np.zeros((2, self._parameters.size), np.float32)
        self._sequences = np.empty((len(slots), 0, inputs_of(self._encoder)), np.float32)
        """Memory of observations, which is used again."""

    def _items(self, step: int) -> Sequences:
        assert isinstance(self.batches, ReplayBatches)
        batches = [self.batches.prefetched(slot, step)[0].batch for slot in self._slots]
        if self._sequences.shape[1] != batches[0].start.numel():
            slots, _, numbers = self._sequences.shape
            self._sequences = np.empty((slots, batches[0].start.numel(), numbers), np.float32)
        parts = [self._read(batch, out) for batch, out in zip(batches, self._sequences, strict=True)]
        together = Sequences(self._sequences, *map(np.stack, zip(*(part[1:] for part in parts), strict=True)))
        return together._replace(weight=together.weight.ravel(), noise=together.noise.ravel())

    def _read(self, batch: transitions.Sequences, out: np.ndarray) -> Sequences:
        """A slot's part of Sequences, without their first axis. out: where to write observations."""
        extra = self._model.extra(batch.start, batch.prev_action, batch.prev_reward)
        return Sequences(
            obs=observed(self._encoder, batch.obs, whole=True, out=out),
            extra=np.zeros((batch.start.numel(), 0), np.float32) if extra is None else rows_of(extra),
            start=batch.start.reshape(-1).numpy(),
            state=batch.state.numpy(),
            action=batch.action.reshape(-1).numpy(),
            reward=batch.reward.reshape(-1).numpy(),
            discount=batch.discount.reshape(-1).numpy(),
            ahead=batch.ahead.reshape(-1).numpy(),
            valid=batch.valid.reshape(-1).numpy(),
            weight=batch.weight.numpy(),
            noise=np.zeros(0, np.float32) if batch.noise is None else batch.noise.numpy(),
        )

    def _call(
        self, items: Sequences, hyper: dict[str, float], joined: bool, out: np.ndarray, priority: np.ndarray
    ) -> None:
        parts = self._network, self._core, self._parameters, self._target
        sequence_gradients(*parts, self._settings, items, joined, self._used, out, priority)
