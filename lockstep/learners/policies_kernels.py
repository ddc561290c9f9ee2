"""Several policies in portable arithmetic: each learns from the columns of its agents, with the kernels of one policy.

Shape legend: C columns of a rollout, M metrics of a policy, the last of which is the number of its samples
(lockstep.algorithms.several).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import PoliciesKernels
from lockstep.algorithms.several import prefix_of
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.on_policy import Minibatches
from lockstep.distributed.tree import TreeSum
from lockstep.kernels.on_policy import Rollouts
from lockstep.learners.on_policy_kernels import Gradients, Reader, RolloutLearner
from lockstep.learners.steps import LearningReport
from lockstep.models.parameters import Part
from lockstep.models.policies import POLICY, Policies, PoliciesSpace
from lockstep.models.policy import StandardModel


class _Policy(NamedTuple):
    """One of the policies: its model, the objects that read its rollouts and compute its gradients, and its
    parameters."""

    model: StandardModel
    reader: Reader
    gradients: Gradients
    part: Part


class PoliciesLearner(RolloutLearner):
    """Learns several policies. Their slices have different sizes, so each call of a kernel computes one of them."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        kernels, models, space = agent.kernels, agent.model, agent.observation_space
        assert isinstance(kernels, PoliciesKernels) and isinstance(models, Policies)
        assert isinstance(space, PoliciesSpace)
        self._subtree, self._space, self._policies = False, space, dict[str, _Policy]()
        for name, of_policy in space.parts.items():
            model, part = models[name], Part(agent.flat, prefix_of(name))
            assert isinstance(model, StandardModel)
            reader = Reader(agent, kernels.loss, model, of_policy.observation_space, len(slots))
            gradients = Gradients(model, kernels.loss, agent.experiment.algorithm, part)
            self._policies[name] = _Policy(model, reader, gradients, part)
        self._each = len(agent.algorithm.metric_names) // len(self._policies)
        """M"""
        self._players = [np.zeros(0, np.int64) for _ in slots]
        """Of each slot, int64 [C]: the number of the policy that plays each column."""

    def learn(self, iteration: int, rollouts: dict[int, list[CollectedRollout]]) -> LearningReport:
        """As Learner.learn. Torch's operations around the kernels are exact, so they need not be replaced."""
        return self._learn(iteration, rollouts)

    def _take(self, place: int, of_slot: Minibatches) -> int:
        whole = of_slot.whole
        sequences = any(policy.reader.sequences for policy in self._policies.values())  # or none
        players = whole.obs[POLICY][: len(whole.reward), :, 0]
        self._players[place] = (players[0] if sequences else players.reshape(-1)).long().numpy()
        for name, policy in self._policies.items():
            model, action = policy.model, whole.prev_action
            if action is not None and not model.distribution.action_shape:
                action = action.clamp(max=model.distribution.num_params - 1)  # in the columns of other policies
            own = whole.replace(
                obs=self._space.own(name, whole.obs), state=whole.state[:, : model.state_size], prev_action=action
            )
            policy.reader.take(place, own, copied=True)
        return len(self._players[place])

    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray, *, joined: bool = False) -> None:
        size, metrics = self._parameters.size, self._each
        for place, row in enumerate(out):
            row[size:] = 0
            players, index = self._players[place], self._index[step, place]
            for number, policy in enumerate(self._policies.values()):
                span, mine = policy.part.span, index[players[index] == number]
                found = np.zeros((1, span.stop - span.start + metrics), np.float32)
                if len(mine):  # a small slice may have none
                    rollouts = Rollouts(*(x[place : place + 1] for x in policy.reader.rollouts))
                    every = None if self._moments is None else self._moments[step].tolist()
                    moments = every and every[2 * number : 2 * number + 2]
                    policy.gradients(self._parameters[span], rollouts, mine[None], moments, hyper, False, found)
                row[span], samples = found[0, :-metrics], found[0, -metrics]
                row[size] += samples
                of_policy = row[size + 1 + number * metrics :][:metrics]
                of_policy[:-1], of_policy[-1] = found[0, 1 - metrics :], samples
