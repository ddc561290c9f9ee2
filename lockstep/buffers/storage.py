"""Chooses the storage that a shard replays from: the algorithm's own, or the one that its settings require."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lockstep.algorithms.offpolicy import OffPolicy
from lockstep.buffers.futures import FutureReplay
from lockstep.buffers.replay import Replay
from lockstep.buffers.sequences import SequenceReplay
from lockstep.core.rollout import Rollout
from lockstep.experiment import Experiment


@runtime_checkable
class BringsStorage(Protocol):
    """An off-policy algorithm with its own storage."""

    def memory(self, experiment: Experiment, rollout: Rollout) -> Replay:
        """The storage of one shard.

        Args:
            experiment: gives the settings.
            rollout: an example of the rollouts to be inserted.
        """
        ...


def storage_for(algorithm: OffPolicy[Any], experiment: Experiment, rollout: Rollout) -> Replay:
    """The storage of one shard. The arguments are those of BringsStorage.memory."""
    if isinstance(algorithm, BringsStorage):
        return algorithm.memory(experiment, rollout)
    config = algorithm.config
    if config.sequence_steps is not None:
        return SequenceReplay(experiment, rollout, *config.sequence_steps)
    return (
        FutureReplay(experiment, rollout, config.future_steps) if config.future_steps else Replay(experiment, rollout)
    )
