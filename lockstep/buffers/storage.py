"""Chooses the storage that a shard replays from: the algorithm's own, or the one that its settings require."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lockstep.algorithms.offpolicy import OffPolicy
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
    steps = algorithm.config.sequence_steps
    return Replay(experiment, rollout) if steps is None else SequenceReplay(experiment, rollout, *steps)
