"""What learners learn from: the interface between storages and the learner."""

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
    """A rollout in one of the S batch slots of an iteration. Where timing decides, a slot with replay takes any number
    of its shard's rollouts."""

    info: RolloutInfo
    rollout: Rollout
    normalizers: Normalizers
    """Statistics of the version that began to collect it."""


class Slice(NamedTuple):
    """A slot's part of a minibatch."""

    batch: Any
    """What the algorithm's loss takes."""
    normalizers: Normalizers
    """What the model normalizes it with."""


class Batches(Protocol):
    """A learner's source of minibatches, for its block of batch slots."""

    def begin(self, iteration: int, rollouts: dict[int, list[CollectedRollout]], hyper: dict[str, float]) -> int:
        """Take an iteration's rollouts, by batch slot; returns the number of gradient steps that follow."""
        ...

    def slice(self, slot: int, step: int) -> Slice:
        """A slot's part of one gradient step's minibatch. A slot's steps are asked for in order; slots, too, within
        one, unless gradients are asynchronous."""
        ...

    def learned(self, slot: int, priorities: Tensor | None) -> None:
        """What the loss thought of the slice that was taken last, [n]: how much there still was to learn from it."""
        ...

    def save(self, slot: int, directory: Path, iteration: int) -> list[dict[str, Any]]:
        """Write what of a slot outlives an iteration into a checkpoint; returns what runtime.checkpoint.finish wants
        to know of each part."""
        ...

    def restore(self, slot: int, saved: Checkpoint) -> None:
        """Restore what save wrote, if it did."""
        ...
