"""Replay of steps with those that followed them, for losses that predict observations.

Shape legend: C steps of the ring, J steps of an item's future, n items of a slice.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.buffers.replay import Replay
from lockstep.core.rollout import Rollout
from lockstep.core.transitions import Drawn, Future
from lockstep.experiment import Experiment
from lockstep.models.observations import PLAIN


class FutureReplay(Replay, reads_on_gpu=True):
    """One shard's steps. Each item has a future of J steps, which are stored already, since J is at most n_step.

    Args:
        experiment: gives the settings.
        rollout: an example of the rollouts to be inserted.
        steps: J.
    """

    def __init__(self, experiment: Experiment, rollout: Rollout, steps: int) -> None:
        super().__init__(experiment, rollout)
        self._future = steps
        self.item_bytes += steps * self.item_bytes // 2

    def items(self, drawn: Drawn) -> Any:
        """As Replay.items, with futures."""
        environment = drawn.environment.expand(self._future, -1)
        at = (drawn.time + torch.arange(self._future, device=drawn.time.device).unsqueeze(1)) % self.steps  # [J, n]
        after, kept = ((at + 1) % self.steps).flatten(), self._kept()
        obs = {
            name: ring.take(after, environment.flatten()).unflatten(0, at.shape) for name, ring in self._rings.items()
        }
        ended = kept["terminated"][at, environment] | kept["truncated"][at, environment]
        future = Future(
            obs=obs.get(PLAIN, obs),
            action=kept["action"][at, environment],
            valid=ended.cumsum(0) == ended,  # no earlier step ended the episode
        )
        return super().items(drawn).replace(future=future)
