"""Acting with torch on the host: the policy is evaluated step by step, and log-probabilities once at the end.

Shape legend: T time, A rows of an acting batch, P parameters of a distribution.
"""

from __future__ import annotations

import torch

from lockstep.agent import Agent
from lockstep.collectors.acting import ActingBatch, SteppingActor
from lockstep.config.user_code import is_users
from lockstep.models.arithmetic import arithmetic
from lockstep.models.capture import Inference
from lockstep.models.distributions import Distribution
from lockstep.system.generators import no_draws

_CHOICE_DREW = (
    "Make actions from the argument noise alone, which is uniform in [0, 1]: for example, (logits - "
    "(-noise.log()).log()).argmax(-1) draws a category."
)


class TorchActor(SteppingActor):
    """Evaluates the policy with Inference in every step. The explorer makes actions from its output and noise."""

    def __init__(self, batch: ActingBatch, agent: Agent) -> None:
        super().__init__(batch)
        self._model, self._distribution = agent.model, agent.model.distribution
        self._knows_chances = not isinstance(self._distribution, Distribution) or self._distribution.knows_chances
        self._policy = torch.zeros(batch.steps, batch.group.size, self._distribution.num_params)
        """fp32 [T, A, P]"""
        self._draws_nothing = not is_users(self._distribution)
        """Whether the distribution is known to draw no random numbers."""

    def act(self, t: int, inference: Inference) -> None:
        batch, rollout, explorer = self.batch, self.batch.open.whole, self.batch.explorer
        output, batch.core_state = inference.evaluate(batch.inputs(slice(t, t + 1)))
        policy = output.policy[0]
        if self._draws_nothing:
            action = explorer.choose(policy, explorer.noise[t])
        else:
            with no_draws(type(self._distribution).__name__, policy.device, _CHOICE_DREW):
                action = explorer.choose(policy, explorer.noise[t])
            self._draws_nothing = True
        self._policy[t], rollout.action[t] = policy, action
        rollout.value[t] = output.value[0]
        batch.send(rollout.action[t])

    def finish(self, inference: Inference) -> None:
        batch, rollout = self.batch, self.batch.open.whole
        if batch.bootstraps and batch.going:
            rollout.value[-1] = inference.evaluate(batch.inputs(slice(-1, None)))[0].value[0]
        if batch.preempted:
            batch.core_state = batch.core_state.clone()  # inference may have returned memory that it keeps
            batch.pad(self._policy)
        if self._knows_chances:
            with arithmetic(self._model):  # that of inference may replace fewer operations
                rollout.log_prob.copy_(self._distribution.log_prob(self._policy, rollout.action))
        if rollout.policy is not None:
            rollout.policy.copy_(self._policy)
