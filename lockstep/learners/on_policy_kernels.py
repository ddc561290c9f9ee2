"""A2C, IMPALA, APPO, PQN and recurrent PPO in portable arithmetic: kernels with the bits of torch's replaced
operations.

Shape legend: S slots of this learner, T steps, R rows of observations, T or T+1, C columns of a rollout, n of them in a
slice, G gradient steps, D numbers of an observation, A numbers of an action, K numbers of a core's state.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from torch import Tensor

from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import LossKernels, ValueKernels
from lockstep.algorithms.onpolicy import Batch, OnPolicy, OnPolicyConfig
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.on_policy import FreshBatches, Minibatches
from lockstep.distributed.tree import TreeSum
from lockstep.kernels.on_policy import Rollouts, gradients_of
from lockstep.kernels.value_learning import value_gradients
from lockstep.learners.kernel_learner import KernelLearner
from lockstep.models.arithmetic import portable_operations
from lockstep.models.kernel_policy import KernelCategorical, KernelGaussian, NetworkTable
from lockstep.models.layer_tables import encoder_of, observed, q_network
from lockstep.models.parameters import Places
from lockstep.models.policy import StandardModel
from lockstep.models.q import QModel


class Reader:
    """Reads the rollouts of all slots for one model.

    Args:
        agent: the learner's.
        kernels: they say what the loss reads.
        model: one of the agent's.
        observation_space: what the model observes.
        slots: S.
    """

    def __init__(
        self,
        agent: Agent,
        kernels: LossKernels | ValueKernels,
        model: StandardModel | QModel,
        observation_space: gymnasium.Space[Any],
        slots: int,
    ) -> None:
        config, algorithm = agent.experiment.algorithm, agent.algorithm
        assert isinstance(config, OnPolicyConfig) and isinstance(algorithm, OnPolicy)
        self._model, self._encoder = model, encoder_of(model)
        self._numbers, self._flags = kernels.numbers, kernels.flags
        environments = agent.experiment.envs_per_shard
        self.sequences = config.sequences or agent.experiment.model.recurrent
        """Whether a column is an environment. Otherwise it is a single sample."""
        steps, columns = (config.rollout, environments) if self.sequences else (1, config.rollout * environments)
        rows, shape = steps + algorithm.bootstrap_inputs, model.distribution.action_shape
        extra = model.extra_features if isinstance(model, StandardModel) else 0
        self.rollouts = Rollouts(
            np.zeros((slots, rows, columns, spaces.flatdim(observation_space)), np.float32),
            np.zeros((slots, steps, columns, shape[0] if shape else 0), np.float32),
            np.zeros((slots, steps, columns), np.int64),
            np.zeros((slots, len(self._numbers), steps, columns), np.float32),
            np.zeros((slots, len(self._flags) + 1, steps, columns), np.bool_),
            np.zeros(slots, np.bool_),
            np.zeros((slots, rows, columns, extra), np.float32),
            np.zeros((slots, rows, columns), np.bool_),
            np.zeros((slots, columns, model.state_size), np.float32),
        )

    def take(self, place: int, whole: Batch, *, copied: bool) -> None:
        """Write a slot's rollout into its items.

        Args:
            copied: whether torch learns from copies of its columns, which are adjacent.
        """
        to, encoder, model = Rollouts(*(x[place, ...] for x in self.rollouts)), self._encoder, self._model
        observed(encoder, whole.obs, whole=True, out=to.observations)
        cut = not (copied or encoder.layout.images or encoder.normalize)
        to.strided[...] = cut and not encoder.layout.vector(whole.obs).is_contiguous()
        to.starts[...] = whole.start.numpy().reshape(to.starts.shape)
        if isinstance(model, StandardModel):
            extra = model.extra(whole.start, whole.prev_action, whole.prev_reward)
            if extra is not None:
                to.extras[...] = extra.numpy()
        if model.state_size:
            to.states[...] = whole.state.numpy()
        held = to.actions if model.distribution.action_shape else to.choices
        held[...] = whole.action.numpy().reshape(held.shape)
        for name, x in zip(self._numbers, to.numbers, strict=True):
            x[...] = getattr(whole, name).numpy().reshape(x.shape)
        for name, x in zip((*self._flags, "valid"), to.flags, strict=True):
            x[...] = getattr(whole, name).numpy().reshape(x.shape)


class RolloutLearner(KernelLearner):
    """Learns from fresh rollouts by a loss that has kernels."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        assert isinstance(agent.algorithm, OnPolicy) and isinstance(self.batches, FreshBatches)
        self._fresh, self._standardizes = self.batches, agent.algorithm.normalize_advantages
        self._index = np.zeros((0, 0, 0), np.int64)
        """int64 [G, S, n]: the columns of each gradient step."""
        self._moments: Tensor | None = None
        """float64 [G, 2 for each policy]: the mean and deviation of each minibatch's advantages, if they are
        standardized."""

    def begin(self, iteration: int, rollouts: dict[int, list[CollectedRollout]], hyper: dict[str, float]) -> int:
        # Torch's operations are exact here, except for sums over advantages.
        with portable_operations() if self._standardizes else contextlib.nullcontext():
            steps = super().begin(iteration, rollouts, hyper)
        plans = []
        for place, slot in enumerate(self._slots):
            of_slot = self._fresh.minibatches(slot)
            assert of_slot is not None
            self._fresh.normalizers(slot).apply(self._agent.model)
            columns = self._take(place, of_slot)
            every = np.arange(columns)[None].repeat(steps, 0)
            plans.append(every if of_slot.items is None else of_slot.items.numpy())
            self._moments = of_slot.moments  # alike for all slots
        self._index = np.ascontiguousarray(np.stack(plans, 1))
        return steps

    @abstractmethod
    def _take(self, place: int, of_slot: Minibatches) -> int:
        """Read a slot's rollout. Returns how many columns it has."""


class OneModelLearner(RolloutLearner):
    """Learns one model by a loss that has kernels."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        kernels, model = agent.kernels, agent.model
        assert isinstance(kernels, (LossKernels, ValueKernels)) and isinstance(model, (StandardModel, QModel))
        self._reader = Reader(agent, kernels, model, agent.observation_space, len(slots))

    def _take(self, place: int, of_slot: Minibatches) -> int:
        self._reader.take(place, of_slot.whole, copied=of_slot.items is not None)
        return self._reader.rollouts.choices.shape[2]


class Gradients:
    """Computes gradients of a policy and a value.

    Args:
        kernels: the loss.
        places: where the model's parameters lie.
    """

    def __init__(self, model: StandardModel, kernels: LossKernels, config: Any, places: Places) -> None:
        assert isinstance(model.distribution, (KernelCategorical, KernelGaussian))
        self._kernels, self._config = kernels, config
        self._gradients_of = gradients_of(kernels.loss, model.state_size > 0)
        self._table, self._kind = NetworkTable.of(model, places, whole=True), model.distribution.kind

    def __call__(
        self,
        parameters: np.ndarray,
        rollouts: Rollouts,
        index: np.ndarray,
        moments: list[float] | None,
        hyper: dict[str, float],
        joined: bool,
        out: np.ndarray,
    ) -> None:
        """Arguments are those of lockstep.kernels.on_policy.

        Args:
            moments: the mean and deviation of advantages, if they are standardized.
        """
        numbers = [hyper["value_coef"], *self._kernels.hyper(self._config, hyper)]
        if moments is not None:
            mean, deviation = moments
            numbers += [mean, deviation + 1e-8]
        elif "advantage" in self._kernels.numbers:
            numbers += [0.0, 1.0]
        self._gradients_of(
            self._table.with_parameters(parameters),
            self._kind,
            tuple(rollouts),
            index,
            np.array(numbers, np.float32),
            np.float32(hyper["entropy_coef"]),
            joined,
            out,
        )


class LossLearner(OneModelLearner):
    """Learns a policy and a value."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        assert isinstance(agent.model, StandardModel) and isinstance(agent.kernels, LossKernels)
        self._gradients_by = Gradients(agent.model, agent.kernels, agent.experiment.algorithm, agent.flat)

    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray, *, joined: bool = False) -> None:
        moments = None if self._moments is None else self._moments[step].tolist()
        self._gradients_by(self._parameters, self._reader.rollouts, self._index[step], moments, hyper, joined, out)


class ValueLearner(OneModelLearner):
    """Learns the values of actions."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        assert isinstance(agent.model, QModel)
        self._network, self._used = q_network(agent.model, agent.flat), np.zeros_like(self._parameters)

    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray, *, joined: bool = False) -> None:
        items = self._reader.rollouts  # of one step each
        value_gradients(
            self._network,
            self._parameters,
            items.observations[:, 0],
            items.choices[:, 0],
            items.numbers[:, 0, 0],
            items.flags[:, 0, 0],
            items.strided,
            self._index[step],
            joined,
            self._used,
            out,
        )
