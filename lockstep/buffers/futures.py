"""Replay of steps with those that followed them, for losses that predict observations.

Shape legend: C steps of the ring, J steps of an item's future, n items of a slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.buffers.replay import Replay
from lockstep.core.rollout import Rollout
from lockstep.core.transitions import Future
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
        self._ahead = torch.arange(steps).unsqueeze(1)
        """int64 [J, 1]: how far ahead each step is."""
        self.item_bytes += steps * self.item_bytes // 2

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        self._ahead = self._ahead.to(device)

    def _future(self, time: Tensor, environment: Tensor, ahead: Tensor) -> Future:
        at = (time + self._ahead) % self.steps  # [J, n]
        after, environment = (at + 1) % self.steps, environment.expand_as(at)
        obs = {
            name: ring.take(after.flatten(), environment.flatten()).unflatten(0, at.shape)
            for name, ring in self._rings.items()
        }
        return Future(
            obs=obs.get(PLAIN, obs),
            action=self._kept()["action"][at, environment],
            valid=self._ahead < ahead,
        )
