"""What a policy does in a step in one compiled call, or all of a rollout, with the same bits as step by step.

It needs a model that evaluates and samples with compiled functions (PolicyModel.kernels). A rollout also needs
environments whose step is a compiled function (ShardEnv.kernel).

Shape legend: T time, A rows of an acting batch, B environments of a shard, N noise numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lockstep.envs.base import ShardEnv, StepResult
from lockstep.kernels.bound import Bound, PolicyKernels
from lockstep.models.base import PolicyModel


class CompiledActing:
    """Chooses actions for some rows of an acting batch.

    Args:
        policy: the functions of the model.
        env: their environments.
        rows: which rows.
    """

    def __init__(self, policy: PolicyKernels, env: ShardEnv, rows: slice) -> None:
        from lockstep.kernels.rollout import acting_kernel  # which needs Numba

        self._act, self._policy, self._first = acting_kernel(policy), policy, rows.start
        self._shape, self._dtype = (env.num_envs, *(env.action_space.shape or ())), env.action_space.dtype

    @staticmethod
    def of(model: PolicyModel, env: ShardEnv, rows: slice) -> CompiledActing | None:
        """None if the model computes something in Python."""
        policy = model.kernels()
        return None if policy is None else CompiledActing(policy, env, rows)

    def act(self, t: int, noise: np.ndarray, obs: np.ndarray, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Write a_t, its log-probabilities and values; arguments as for ShardRollout.play. Returns what environments
        receive."""
        sent = np.empty(self._shape, self._dtype)  # not used again, since an environment may keep its action
        self._act(
            self._policy.evaluate.arguments,
            t,
            self._first,
            self._policy.actions.limits,
            sent,
            noise,
            (self._policy.extra, fields["state"], fields["start"]),
            obs,
            fields["actions"],
            fields["rewards"],
            fields["log_prob"],
            fields["value"],
        )
        return sent


class ShardRollout:
    """Plays the rollouts of one shard.

    Args:
        policy, step: the functions of the model and of the environments.
        env: the environments.
        rows: theirs in the acting batch.
    """

    def __init__(self, policy: PolicyKernels, step: Bound, env: ShardEnv, rows: slice) -> None:
        from lockstep.kernels.rollout import rollout_kernel  # which needs Numba

        self._play, self._policy, self._step, self._rows = rollout_kernel(policy, step), policy, step, rows
        space = env.action_space
        self._sent = np.zeros((env.num_envs, *(space.shape or ())), space.dtype)

    @staticmethod
    def of(model: PolicyModel, env: ShardEnv, rows: slice) -> ShardRollout | None:
        """None if the model or the environments compute something in Python at every step."""
        policy, step = model.kernels(), env.kernel()
        return None if policy is None or step is None else ShardRollout(policy, step, env, rows)

    def play(
        self, noise: np.ndarray, obs: np.ndarray, fields: Mapping[str, np.ndarray], *, bootstrap: bool, clip: bool
    ) -> StepResult:
        """Write all steps of a rollout.

        Args:
            noise: float32 [T, A, N].
            obs: [T+1, A, ...], of which the first is given.
            fields: arrays of the acting batch: start, actions and rewards, of which the first is given, and log_prob
                and value. All are written. And the state of cores, float32 [A, K], which is replaced by that after the
                last step.
            bootstrap: whether the last observation is evaluated, too.
            clip: whether the model sees rewards within -1 and 1.

        Returns:
            A StepResult of all steps, [T, B].
        """
        shape = len(noise), len(self._sent)
        reward, ends = np.empty(shape, np.float32), np.empty((shape[0], 3, shape[1]), np.bool_)
        self._play(
            self._policy.evaluate.arguments,
            self._step.arguments,
            self._rows.start,
            bootstrap,
            np.float32(1 if clip else np.inf),
            self._policy.actions.limits,
            self._sent,
            noise,
            (self._policy.extra, fields["state"], fields["start"]),
            obs,
            fields["actions"],
            fields["rewards"],
            fields["log_prob"],
            fields["value"],
            reward,
            ends,
        )
        return StepResult(reward, ends[:, 0], ends[:, 1], ends[:, 2], np.zeros(shape, np.bool_))
