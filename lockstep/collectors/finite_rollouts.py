"""Checks that environments return finite numbers, and tells where and when one did not.

Shape legend: T time, A rows of an acting batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.collectors.open_buffer import OpenBuffer
from lockstep.collectors.stepping import ActingShard
from lockstep.envs.finite import FiniteCheck, all_finite, wrong_numbers


class FiniteRollouts:
    """Checks the rollouts of an acting batch.

    Args:
        found: is told of the first number that is not finite.
        members: the shards of the batch.
        rollout: T, the steps of a rollout.
    """

    def __init__(self, found: FiniteCheck, members: Sequence[ActingShard], rollout: int) -> None:
        self._found, self._members, self._rollout = found, members, rollout

    def check_start(self, opened: OpenBuffer, t: int, member: ActingShard, when: str) -> None:
        """Check a shard's observations at step t, which follow a reset."""
        obs = {name: x[t, member.rows] for name, x in opened.floats.items()}
        for j, what in wrong_numbers(obs, None):
            if not self._found.found:
                self._found.report(member.shard * member.num_envs + j, what, when)

    def check(self, opened: OpenBuffer, raw_rewards: np.ndarray, ended: np.ndarray, lap: int) -> None:
        """Check the first steps of a rollout. One check of all steps costs a hundredth of checking every step.

        Args:
            raw_rewards: fp32 [steps, A], for as many steps as are to be checked.
            ended: bool [T, A]: where episodes ended.
        """
        if self._found.found:
            return
        steps = len(raw_rewards)
        action = opened.fields["action"][:steps]
        answers = [raw_rewards, *(x[1 : steps + 1] for x in opened.floats.values())]
        acted = action.dtype.kind != "f" or all_finite(action)
        if acted and all(map(all_finite, answers)):
            return
        for t in range(1, steps + 1):
            for member in self._members:
                self._check_step(opened, raw_rewards, ended, t, member, lap)
                if self._found.found:
                    return
        if not acted:
            self._found.report_action()

    def _check_step(
        self, opened: OpenBuffer, raw_rewards: np.ndarray, ended: np.ndarray, t: int, member: ActingShard, lap: int
    ) -> None:
        """Check what a shard's environments returned for a_{t-1}."""
        if 0 <= member.last < t:
            return
        obs = {name: x[t, member.rows] for name, x in opened.floats.items()}
        for j, what in wrong_numbers(obs, raw_rewards[t - 1, member.rows]):
            row = member.rows.start + j
            if not opened.buffer.whole.action[t - 1, row].isfinite().all():
                continue  # it had an action that was not finite
            valid, ends = opened.fields["valid"], np.flatnonzero(ended[: t - 1, row])
            begun = int(ends[-1]) + 1 if len(ends) else 0
            step = int(valid[begun:t, row].sum()) + (0 if len(ends) else int(member.length[j]))
            when = f"in step {step} of its episode" if valid[t - 1, row] else "at the start of an episode"
            of_run = (lap + member.offset) * self._rollout + t
            environment = member.shard * member.num_envs + j
            self._found.report(environment, what, f"{when}, which is its step {of_run:,} of the run")
            return
