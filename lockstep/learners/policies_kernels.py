"""Several policies in portable arithmetic: each learns by the kernels of one policy, from the columns of its agents.

Shape legend: S slots of this learner, C columns of a rollout, n of them in a policy's part of a slice, P parameters,
M metrics of a policy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import PoliciesKernels
from lockstep.algorithms.several import prefix_of
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.on_policy import Minibatches
from lockstep.distributed.tree import TreeSum
from lockstep.learners.learner import LearningReport
from lockstep.learners.on_policy_kernels import Gradients, Items, Reader, RolloutLearner
from lockstep.models.parameters import Part
from lockstep.models.policies import POLICY, Policies, PoliciesSpace
from lockstep.models.policy import StandardModel


class PoliciesLearner(RolloutLearner):
    """Learns several policies. Their slices have different sizes, so each call of a kernel computes one of them."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum, *, alive: Callable[[], None] = lambda: None) -> None:
        super().__init__(agent, slots, tree, alive=alive)
        kernels, model, space = agent.kernels, agent.model, agent.observation_space
        assert isinstance(kernels, PoliciesKernels) and isinstance(model, Policies) and isinstance(space, PoliciesSpace)
        self._subtree, self._space = False, space
        self._models, self._parts = dict[str, StandardModel](), dict[str, Part]()
        self._readers, self._gradients_by = dict[str, Reader](), dict[str, Gradients]()
        for name, part in space.parts.items():
            own = model[name]
            assert isinstance(own, StandardModel)
            self._models[name], self._parts[name] = own, Part(agent.flat, prefix_of(name))
            self._readers[name] = Reader(agent, kernels.loss, own, part.observation_space, len(slots))
            self._gradients_by[name] = Gradients(own, kernels.loss, agent.experiment.algorithm, self._parts[name])
        metrics = len(agent.algorithm.metric_names) // len(self._parts)
        self._samples = range(metrics - 1, metrics * len(self._parts), metrics)
        """Where each policy's number of samples is among the metrics, behind its other metrics: see
        lockstep.algorithms.several."""
        self._players = [np.zeros(0, np.int64) for _ in slots]
        """Of each slot, int64 [C]: the number of the policy that plays each column."""

    def learn(self, iteration: int, rollouts: dict[int, list[CollectedRollout]]) -> LearningReport:
        """As Learner.learn. Torch's operations around the kernels are exact, so they need not be replaced."""
        return self._learn(iteration, rollouts)

    def _take(self, place: int, of_slot: Minibatches) -> int:
        whole = of_slot.whole
        sequences = next(iter(self._readers.values())).sequences
        players = whole.obs[POLICY][: len(whole.reward), :, 0]
        self._players[place] = (players[0] if sequences else players.reshape(-1)).long().numpy()
        for name, reader in self._readers.items():
            model, action = self._models[name], whole.prev_action
            if action is not None and not model.distribution.action_shape:
                action = action.clamp(max=model.distribution.num_params - 1)  # in the columns of other policies
            own = whole.replace(
                obs=self._space.own(name, whole.obs), state=whole.state[:, : model.state_size], prev_action=action
            )
            reader.take(place, own, copied=True)
        return len(self._players[place])

    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray, *, joined: bool = False) -> None:
        size, metrics = self._parameters.size, self._samples.step
        for place, row in enumerate(out):
            row[size:] = 0
            players, index = self._players[place], self._index[step, place]
            for number, (name, part) in enumerate(self._parts.items()):
                mine = index[players[index] == number]
                found = np.zeros((1, part.span.stop - part.span.start + metrics), np.float32)
                if len(mine):  # a small slice may have none
                    items = Items(*(x[place : place + 1] for x in self._readers[name].items))
                    moments = None
                    if self._moments is not None:
                        moments = self._moments[step, 2 * number : 2 * number + 2].tolist()
                    own = self._parameters[part.span]
                    self._gradients_by[name](own, items, mine[None], moments, hyper, False, found)
                row[part.span], (samples, *sums) = found[0, :-metrics], found[0, -metrics:]
                end = size + 1 + self._samples[number]
                row[size] += samples
                row[end] = samples
                row[end + 1 - metrics : end] = sums
