"""Checks that the numbers of environments are finite, and that action masks allow at least one action.

Shape legend: T time, A rows of an acting batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from lockstep.collectors.stepping import ActingShard
from lockstep.envs.finite import FiniteCheck, all_finite, forbids_all, wrong_numbers
from lockstep.models.action_spaces import choices_of
from lockstep.models.observations import ACTION_MASK


@dataclass(frozen=True)
class Played:
    """The first T steps of a rollout, as environments returned them."""

    obs: dict[str, np.ndarray]
    """The entries of floating-point type, [T+1, A, ...] (lockstep.envs.finite.floats)."""
    action: np.ndarray
    """[T, A, ...]"""
    reward: np.ndarray
    """[T, A], not clipped."""
    valid: np.ndarray
    """bool [T, A]"""
    ended: np.ndarray
    """bool [T, A]: where episodes ended. A lost life does not end one."""

    @property
    def acted(self) -> bool:
        """Whether all actions are finite."""
        return self.action.dtype.kind != "f" or all_finite(self.action)

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite. One check of all steps costs a hundredth of checking every step."""
        return self.acted and all(map(all_finite, (self.reward, *(x[1:] for x in self.obs.values()))))


class RolloutCheck:
    """Reports the first number that is not finite, with its environment and step.

    Args:
        check: stops the run there, or warns once.
        rollout: the steps of a whole rollout.
        action_space: the environments' action space.
    """

    def __init__(self, check: FiniteCheck, rollout: int, action_space: gymnasium.Space[Any]) -> None:
        self._check, self._rollout = check, rollout
        self._choices = np.array(choices_of(action_space), np.int64)

    def start(self, obs_t: dict[str, np.ndarray], member: ActingShard, when: str) -> None:
        """Check a shard's observations [B, ...] after a reset."""
        for j, what in wrong_numbers(obs_t, None):
            if not self._check.found:
                self._check.report(member.shard * member.num_envs + j, what, when)

    def rollout(self, played: Played, members: Iterable[ActingShard], lap: int) -> None:
        """Check the results of these shards' environments in a rollout.

        Raises:
            SettingsError: an action mask forbade all actions.
            NotFinite: a number is not finite, and the run should stop.
        """
        self._check_masks(played, members, lap)
        if self._check.found or played.finite:
            return
        for t in range(1, len(played.reward) + 1):
            for member in members:
                self._step(t, played, member, lap)
                if self._check.found:
                    return
        if not played.acted:
            self._check.report_action()

    def _step(self, t: int, played: Played, member: ActingShard, lap: int) -> None:
        """Check the results of a shard's environments for a_{t-1}."""
        if 0 <= member.last < t:
            return
        obs_t = {name: x[t, member.rows] for name, x in played.obs.items()}
        for j, what in wrong_numbers(obs_t, played.reward[t - 1, member.rows]):
            if not np.isfinite(played.action[t - 1, member.rows.start + j]).all():
                continue  # the environment received an action that was not finite
            self._check.report(member.shard * member.num_envs + j, what, self._when(t, played, member, j, lap))
            return

    def _check_masks(self, played: Played, members: Iterable[ActingShard], lap: int) -> None:
        """Raise SettingsError if a mask forbade all choices of an action or of one of its components."""
        if ACTION_MASK not in played.obs or not len(self._choices):
            return
        steps, rows = played.valid.shape
        mask = played.obs[ACTION_MASK][:steps].reshape(steps, rows, -1)
        for t, row in np.argwhere(played.valid & forbids_all(mask, self._choices)).tolist():
            for member in members:
                if member.rows.start <= row < member.rows.stop and not 0 <= member.last <= t:
                    j = row - member.rows.start
                    when = self._when(t, played, member, j, lap)
                    self._check.report_mask(member.shard * member.num_envs + j, when)

    def _when(self, t: int, played: Played, member: ActingShard, j: int, lap: int) -> str:
        """Describe when a shard's environment j returned observation t of a rollout."""
        row = member.rows.start + j
        ends = np.flatnonzero(played.ended[: max(t - 1, 0), row])
        begun = int(ends[-1]) + 1 if len(ends) else 0
        step = int(played.valid[begun:t, row].sum()) + (0 if len(ends) else int(member.length[j]))
        going = played.valid[t - 1, row] if t else step
        when = f"in step {step} of its episode" if going else "at the start of an episode"
        return f"{when}, which is its step {(lap + member.offset) * self._rollout + t:,} of the run"
