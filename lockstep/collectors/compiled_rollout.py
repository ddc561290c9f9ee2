"""Playing a whole rollout in one compiled call, with the same bits as step by step.

It needs a model and environments whose steps are compiled functions (PolicyModel.kernels, ShardEnv.kernel), and one
version for all steps.

Shape legend: T time, A rows of an acting batch, B environments of a shard, N noise numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from lockstep.agent import Agent
from lockstep.collectors.acting import ActingBatch
from lockstep.envs.base import ShardEnv, StepResult
from lockstep.kernels.bound import PolicyKernels
from lockstep.models.capture import Inference


class CompiledRolloutActor:
    """Plays all steps of a rollout in one call of a compiled function, which also evaluates the last observation.

    Args:
        heartbeat: called after each call, to tell the supervisor that this process makes progress.
    """

    def __init__(self, batch: ActingBatch, agent: Agent, policy: PolicyKernels, heartbeat: Callable[[], None]) -> None:
        self.batch, self.steps, self._heartbeat = batch, batch.steps, heartbeat
        self._clip = agent.experiment.env.reward_clip
        self._rollouts = [CompiledRollout(policy, each.env, each.rows) for each in batch.envs.stepped]

    def begin(self) -> None:
        self.batch.open.whole.core_state.copy_(self.batch.core_state)

    def act(self, t: int, inference: Inference) -> None:
        batch, rollout, noise = self.batch, self.batch.open, self.batch.explorer.noise.numpy()
        fields = rollout.of_kernels(batch.core_state)
        obs = rollout.joined(0) if rollout.has_entries else rollout.obs
        for each, compiled in zip(batch.envs.stepped, self._rollouts, strict=True):
            played = compiled.play(noise, obs, fields, bootstrap=batch.bootstraps, clip=self._clip)
            batch.take(slice(None), slice(1, None), each.rows, played)
            self._heartbeat()
        if rollout.has_entries:
            rollout.split(slice(1, None))
        batch.received = batch.steps

    def receive(self, t: int) -> None:
        """Nothing: act has written the environments' results."""

    def finish(self, inference: Inference) -> None:
        """Nothing: act has evaluated the last observation."""


class CompiledRollout:
    """Plays the rollouts of environments that one call steps.

    Args:
        policy: the functions of the model.
        env: the environments, whose steps are compiled functions.
        rows: their rows of the acting batch.
    """

    def __init__(self, policy: PolicyKernels, env: ShardEnv, rows: slice) -> None:
        from lockstep.kernels.rollout import rollout_kernel  # which needs Numba

        step = env.kernel()
        assert step is not None
        self._play, self._policy, self._step, self._rows = rollout_kernel(policy, step), policy, step, rows
        self._report = env.report
        space = env.action_space
        self._sent = np.zeros((env.num_envs, *(space.shape or ())), space.dtype)

    def play(
        self, noise: np.ndarray, obs: np.ndarray, fields: Mapping[str, np.ndarray], *, bootstrap: bool, clip: bool
    ) -> StepResult:
        """Write all steps of a rollout.

        Args:
            noise: float32 [T, A, N].
            obs: [T+1, A, ...]. The first is an input, and the others are written.
            fields: arrays of the acting batch: start, actions and rewards, the first of which is an input; log_prob and
                value; and state, float32 [A, K], which becomes the core state after the last step.
            bootstrap: whether the last observation is evaluated, too.
            clip: whether the model sees rewards clipped to [-1, 1].

        Returns:
            A StepResult of all steps, [T, B].
        """
        shape = len(noise), len(self._sent)
        reward, ends = np.empty(shape, np.float32), np.empty((shape[0], 3, shape[1]), np.bool_)
        self._play(
            self._policy.evaluate.arguments,
            self._policy.arguments(noise, obs, fields),
            self._step.arguments,
            self._rows.start,
            bootstrap,
            np.float32(1 if clip else np.inf),
            self._policy.actions.limits,
            self._sent,
            reward,
            ends,
        )
        return self._report(StepResult(reward, ends[:, 0], ends[:, 1], ends[:, 2], np.zeros(shape, np.bool_)))
