"""Acting with a compiled function: one call for a step, with the same bits as torch on the host.

It needs a model that evaluates and samples with compiled functions (PolicyModel.kernels).

Shape legend: T time, A rows of an acting batch, B environments of a shard, N noise numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.collectors.acting import ActingBatch, SteppingActor
from lockstep.envs.base import ShardEnv
from lockstep.kernels.bound import PolicyKernels
from lockstep.models.capture import Inference


class CompiledActor(SteppingActor):
    """In a step, a compiled function reads observations, writes the policy's outputs into the rollout, and returns the
    actions for the environments."""

    def __init__(self, batch: ActingBatch, policy: PolicyKernels) -> None:
        super().__init__(batch)
        self._kernels = policy
        self._policies = [CompiledPolicy(policy, each.env, each.rows) for each in batch.envs.stepped]
        self._arguments: tuple[Any, ...] = ()
        """The policy's arguments in this rollout."""

    def begin(self) -> None:
        super().begin()
        batch = self.batch
        noise, fields = batch.explorer.noise.numpy(), batch.open.of_kernels(batch.core_state)
        obs = batch.open.joined(0) if batch.open.has_entries else batch.open.obs
        self._arguments = self._kernels.arguments(noise, obs, fields)

    def act(self, t: int, inference: Inference) -> None:
        batch = self.batch
        if batch.open.has_entries:
            batch.open.joined(t)
        for each, policy in zip(batch.envs.stepped, self._policies, strict=True):
            each.env.send(policy.act(t, self._arguments))

    def finish(self, inference: Inference) -> None:
        batch = self.batch
        if batch.bootstraps:
            batch.open.whole.value[-1] = inference.evaluate(batch.inputs(slice(-1, None)))[0].value[0]


class CompiledPolicy:
    """Chooses actions for some rows of an acting batch.

    Args:
        policy: the functions of the model.
        env: the environments of the rows.
        rows: the rows.
    """

    def __init__(self, policy: PolicyKernels, env: ShardEnv, rows: slice) -> None:
        from lockstep.kernels.rollout import acting_kernel  # which needs Numba

        self._act, self._policy, self._first = acting_kernel(policy), policy, rows.start
        self._shape, self._dtype = (env.num_envs, *(env.action_space.shape or ())), env.action_space.dtype

    def act(self, t: int, arguments: tuple[Any, ...]) -> np.ndarray:
        """Write a_t, its log-probabilities and values, given the policy's arguments. Returns the actions for the
        environments."""
        sent = np.empty(self._shape, self._dtype)  # new memory each time, since an environment may keep its action
        self._act(self._policy.evaluate.arguments, arguments, t, self._first, self._policy.actions.limits, sent)
        return sent
