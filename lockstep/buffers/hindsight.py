"""Hindsight experience replay (Andrychowicz et al. 2017, https://arxiv.org/abs/1707.01495), strategy "future".

Shape legend: B environments of a shard, n items of a slice.
"""

from __future__ import annotations

import numpy as np
import torch

from lockstep.buffers.replay import Replay
from lockstep.core.transitions import Transitions
from lockstep.envs.goals import ACHIEVED, DESIRED, Goals


class Hindsight:
    """Replaces the goals of items of one shard's replay by goals that were reached later in the episode. An episode
    that missed its own goal still shows how to reach these.

    Args:
        replay: holds the items.
        goals: computes the rewards for the new goals.
        later: k: of k + 1 items, k get another goal.
        discount: γ.
    """

    def __init__(self, replay: Replay, goals: Goals, later: int, discount: float) -> None:
        self._replay, self._goals, self._share, self._discount = replay, goals, later / (later + 1), discount
        self._first, self._ends = 0, np.zeros((0, replay.size), np.int64)

    def record_ends(self) -> None:
        """Record where the episodes in replay end now."""
        self._first, self._ends = self._replay.episode_ends()

    def relabel(
        self,
        batch: Transitions,
        times: np.ndarray,
        environments: np.ndarray,
        chance: np.ndarray,
        place: np.ndarray,
    ) -> Transitions:
        """The items, single steps, with new goals, rewards and discounts.

        Args:
            batch: the items as stored in replay.
            times: the numbers of their steps [n].
            environments: their environments [n].
            chance: [n], uniform in [0, 1), decides which items get another goal.
            place: [n], uniform in [0, 1), decides which goal an item gets.
        """
        chosen = torch.from_numpy(chance < self._share)
        left = self._ends[times - self._first, environments] - times  # steps of the episode after this one
        later = times + 1 + (place * (left + 1)).astype(np.int64)
        wanted = batch.obs[DESIRED][0]
        reached = self._replay.observed(ACHIEVED, later, environments).to(wanted.dtype)
        goal = torch.where(chosen.view(-1, *[1] * (wanted.ndim - 1)), reached, wanted)
        achieved = batch.next_obs[ACHIEVED][0].numpy()
        reward = torch.from_numpy(self._goals.reward(achieved, goal.numpy()))
        ended = self._goals.terminated(achieved, goal.numpy(), wanted.numpy(), batch.discount[0].numpy() == 0)
        return batch.replace(
            obs={**batch.obs, DESIRED: goal.unsqueeze(0)},
            next_obs={**batch.next_obs, DESIRED: goal.unsqueeze(0)},
            reward=torch.where(chosen, reward, batch.reward),
            discount=torch.where(chosen, self._discount * ~torch.from_numpy(ended.copy()), batch.discount),
        )
