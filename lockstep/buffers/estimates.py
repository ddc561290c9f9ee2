"""What the acting model estimated at each step. New items get their first priorities from it.

Shape legend: C steps of the ring, T steps of a rollout, B environments of a shard, M steps that an item learns
from, n items.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.buffers.arrivals import write
from lockstep.core.rollout import Rollout


class Estimates:
    """Action values under the versions that acted, in a ring over time like that of Replay.

    Args:
        steps: C.
        size: B.
    """

    def __init__(self, steps: int, size: int) -> None:
        self.taken = torch.zeros(steps, size)
        """fp32 [C, B]: the value of a_t in obs_t."""
        self.best = torch.zeros(steps, size)
        """fp32 [C, B]: the value of the best action in obs_t, also of the observation after the newest step."""

    def write(self, place: int, rollout: Rollout) -> None:
        """Store those of a rollout's T + 1 observations, the first one at this place."""
        assert rollout.policy is not None, "the policy's parameters are action values, which rollouts must keep"
        taken = rollout.policy.gather(-1, rollout.action.long().unsqueeze(-1)).squeeze(-1)
        write(self.taken.numpy(), place, taken.numpy())
        write(self.best.numpy(), place, rollout.value.numpy())

    def at(self, times: np.ndarray, later: np.ndarray, environments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values of the actions at some steps, and those of the best actions at later ones: fp32 [M, n] each. The
        arguments are [M, n], too."""
        steps = len(self.best)
        return self.taken.numpy()[times % steps, environments], self.best.numpy()[later % steps, environments]

    def by_step(self) -> dict[str, Tensor]:
        """Both tensors, by name."""
        return {"taken": self.taken, "best": self.best}
