"""Batches: the interface between a learner and its source of minibatches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lockstep.core.rollout import Rollout, RolloutInfo
from lockstep.models.normalize import Normalizers
from lockstep.run.checkpoint import Checkpoint


@dataclass(frozen=True)
class CollectedRollout:
    """A rollout in one of the S batch slots of an iteration. If timing decides and the algorithm replays, a slot takes
    any number of its shard's rollouts."""

    info: RolloutInfo
    rollout: Rollout
    normalizers: Normalizers
    """The statistics of the version that began the rollout."""
    on_device: Rollout | None = None
    """The same rollout on the GPU that played it, valid as long as `rollout`. None: no GPU holds it."""


class Slice(NamedTuple):
    """A slot's part of a minibatch."""

    batch: Any
    """The argument of the algorithm's loss."""
    normalizers: Normalizers
    """The statistics that the model normalizes it with."""


class Batches(Protocol):
    """A source of minibatches for the block of batch slots of one learner."""

    def begin(self, iteration: int, rollouts: dict[int, list[CollectedRollout]], hyper: dict[str, float]) -> int:
        """Take an iteration's rollouts by batch slot, and return the number of its gradient steps."""
        ...

    def slice(self, slot: int, step: int) -> Slice:
        """A slot's part of one gradient step's minibatch. Calls for one slot are in the order of steps. Calls for one
        step are in the order of slots, unless gradients are asynchronous."""
        ...

    def learned(self, slot: int, priorities: Tensor | None) -> None:
        """Take the priorities [n] that the loss returned for the items of the slot's last slice."""
        ...

    def save(self, slot: int, directory: Path, iteration: int) -> list[dict[str, Any]]:
        """Write a slot's state into a checkpoint. Returns a record of each part for run.checkpoint.finish."""
        ...

    def restore(self, slot: int, saved: Checkpoint) -> None:
        """Restore the state that `save` wrote, if it wrote any."""
        ...
