"""Checks rollouts for numbers of environments that are not finite.

Shape legend: T time, A rows of an acting batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lockstep.collectors.stepping import ActingShard
from lockstep.envs.finite import FiniteCheck, all_finite, wrong_numbers


@dataclass(frozen=True)
class Played:
    """The first T steps of a rollout, as environments returned them."""

    obs: dict[str, np.ndarray]
    """The entries that hold floats, [T+1, A, ...] (lockstep.envs.finite.floats)."""
    action: np.ndarray
    """[T, A, ...]"""
    reward: np.ndarray
    """[T, A], not clipped."""
    valid: np.ndarray
    """bool [T, A]"""
    ended: np.ndarray
    """bool [T, A]: where episodes ended; a lost life does not end one."""

    @property
    def acted(self) -> bool:
        """Whether all actions are finite."""
        return self.action.dtype.kind != "f" or all_finite(self.action)

    @property
    def finite(self) -> bool:
        """Whether all numbers are. One check of all steps costs a hundredth of checking every step."""
        return self.acted and all(map(all_finite, (self.reward, *(x[1:] for x in self.obs.values()))))


class RolloutCheck:
    """Reports the first number that is not finite, with its environment and step.

    Args:
        check: stops the run at it, or warns of it once.
        rollout: the steps of a whole rollout.
    """

    def __init__(self, check: FiniteCheck, rollout: int) -> None:
        self._check, self._rollout = check, rollout

    def start(self, obs_t: dict[str, np.ndarray], member: ActingShard, when: str) -> None:
        """Check a shard's observations [B, ...] that follow a reset."""
        for j, what in wrong_numbers(obs_t, None):
            if not self._check.found:
                self._check.report(member.shard * member.num_envs + j, what, when)

    def rollout(self, played: Played, members: Iterable[ActingShard], lap: int) -> None:
        """Check what the environments of these shards returned in a rollout."""
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
        """Check what a shard's environments returned for a_{t-1}."""
        if 0 <= member.last < t:
            return
        obs_t = {name: x[t, member.rows] for name, x in played.obs.items()}
        for j, what in wrong_numbers(obs_t, played.reward[t - 1, member.rows]):
            row = member.rows.start + j
            if not np.isfinite(played.action[t - 1, row]).all():
                continue  # it had an action that was not finite
            ends = np.flatnonzero(played.ended[: t - 1, row])
            begun = int(ends[-1]) + 1 if len(ends) else 0
            step = int(played.valid[begun:t, row].sum()) + (0 if len(ends) else int(member.length[j]))
            when = f"in step {step} of its episode" if played.valid[t - 1, row] else "at the start of an episode"
            of_run = (lap + member.offset) * self._rollout + t
            environment = member.shard * member.num_envs + j
            self._check.report(environment, what, f"{when}, which is its step {of_run:,} of the run")
            return
