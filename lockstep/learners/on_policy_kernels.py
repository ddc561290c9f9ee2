"""A2C, IMPALA, APPO, PQN and recurrent PPO in portable arithmetic: kernels with the bits of torch's replaced
operations.

Shape legend: S slots of this learner, T steps, R rows of observations, T or T+1, C columns of a rollout, n of them in a
slice, G gradient steps, D numbers of an observation, A numbers of an action, K numbers of a core's state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lockstep.agent import Agent
from lockstep.algorithms.kernel_table import LossKernels, ValueKernels
from lockstep.algorithms.onpolicy import Batch, OnPolicy, OnPolicyConfig
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.on_policy import FreshBatches, Minibatches
from lockstep.distributed.tree import TreeSum
from lockstep.kernels.on_policy import gradients_of
from lockstep.kernels.value_learning import value_gradients
from lockstep.learners.kernels import KernelLearner
from lockstep.models.arithmetic import portable_operations
from lockstep.models.kernel_policy import KernelCategorical, KernelGaussian, Network
from lockstep.models.layer_tables import encoder_of, observed, q_network
from lockstep.models.policy import StandardModel
from lockstep.models.q import QModel


class _Items(NamedTuple):
    """The rollouts of all slots. Without sequences, a rollout is one step of T * B columns."""

    observations: np.ndarray
    """Normalized, or whole pixels: float32 [S, R, C, D]."""
    actions: np.ndarray
    """float32 [S, T, C, A]; A is 0 if actions are discrete."""
    choices: np.ndarray
    """Discrete actions: int64 [S, T, C]."""
    numbers: np.ndarray
    """float32 [S, K, T, C]"""
    flags: np.ndarray
    """bool [S, F, T, C]"""
    strided: np.ndarray
    """bool [S]: whose vectors lie between those of other shards, which decides how torch adds up the first layer."""
    extras: np.ndarray
    """The previous actions and rewards as a core sees them: float32 [S, R, C, E]."""
    starts: np.ndarray
    """Where episodes start: bool [S, R, C]."""
    states: np.ndarray
    """States of cores before the first step: float32 [S, C, K]."""


class RolloutLearner(KernelLearner):
    """Learns from fresh rollouts by a loss that has kernels. It reads what these name."""

    _extra_features = 0
    """E"""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum, *, alive: Callable[[], None] = lambda: None) -> None:
        super().__init__(agent, slots, tree, alive=alive)
        config, model, algorithm = agent.experiment.algorithm, agent.model, agent.algorithm
        assert isinstance(config, OnPolicyConfig)
        assert isinstance(algorithm, OnPolicy) and isinstance(self.batches, FreshBatches)
        assert isinstance(agent.kernels, (LossKernels, ValueKernels))
        self._config, self._model, self._fresh = config, model, self.batches
        self._standardizes = algorithm.normalize_advantages
        self._sequences = config.sequences or model.state_size > 0
        self._encoder, self._numbers, self._flags = encoder_of(model), agent.kernels.numbers, agent.kernels.flags
        self._items = self._memory(agent, algorithm.bootstrap_inputs)
        self._index = np.zeros((0, 0, 0), np.int64)
        """int64 [G, S, n]: the columns of each gradient step."""
        self._moments: Tensor | None = None
        """float64 [G, 2]: the mean and deviation of each minibatch's advantages, if they are standardized."""

    def _memory(self, agent: Agent, bootstraps: bool) -> _Items:
        config, discrete = self._config, not self._model.distribution.action_shape
        environments = agent.experiment.envs_per_shard
        steps, columns = (config.rollout, environments) if self._sequences else (1, config.rollout * environments)
        assert agent.observation_space.shape is not None
        features, slots = int(np.prod(agent.observation_space.shape)), len(self._slots)
        size = 0 if discrete else self._model.distribution.action_shape[0]
        return _Items(
            np.zeros((slots, steps + bootstraps, columns, features), np.float32),
            np.zeros((slots, steps, columns, size), np.float32),
            np.zeros((slots, steps, columns), np.int64),
            np.zeros((slots, len(self._numbers), steps, columns), np.float32),
            np.zeros((slots, len(self._flags) + 1, steps, columns), np.bool_),
            np.zeros(slots, np.bool_),
            np.zeros((slots, steps + bootstraps, columns, self._extra_features), np.float32),
            np.zeros((slots, steps + bootstraps, columns), np.bool_),
            np.zeros((slots, columns, self._model.state_size), np.float32),
        )

    def begin(self, iteration: int, rollouts: dict[int, list[CollectedRollout]], hyper: dict[str, float]) -> int:
        # Torch's operations are exact here, except for sums over advantages.
        with portable_operations() if self._standardizes else contextlib.nullcontext():
            steps = super().begin(iteration, rollouts, hyper)
        every = np.arange(self._items.choices.shape[2])[None].repeat(steps, 0)
        plans = []
        for place, slot in enumerate(self._slots):
            of_slot = self._fresh.minibatches(slot)
            assert of_slot is not None
            self._fresh.normalizers(slot).apply(self._model)
            self._take(place, of_slot)
            plans.append(every if of_slot.items is None else of_slot.items.numpy())
            self._moments = of_slot.moments  # alike for all slots
        self._index = np.ascontiguousarray(np.stack(plans, 1))
        return steps

    def _extra(self, whole: Batch) -> Tensor | None:
        """The previous actions and rewards of a slot's rollout as a core sees them."""
        return None

    def _take(self, place: int, of_slot: Minibatches) -> None:
        """Write a slot's rollout into its items."""
        to, encoder = _Items(*(x[place, ...] for x in self._items)), self._encoder
        to.observations[...] = observed(encoder, of_slot.whole.obs, whole=True).reshape(to.observations.shape)
        whole = of_slot.items is None and not (encoder.layout.images or encoder.normalize)  # torch copies other slices
        to.strided[...] = whole and not encoder.layout.vector(of_slot.whole.obs).is_contiguous()
        to.starts[...] = of_slot.whole.start.numpy().reshape(to.starts.shape)
        if (extra := self._extra(of_slot.whole)) is not None:
            to.extras[...] = extra.numpy()
        if self._model.state_size:
            to.states[...] = of_slot.whole.state.numpy()
        held = to.actions if self._model.distribution.action_shape else to.choices
        held[...] = of_slot.whole.action.numpy().reshape(held.shape)
        for name, x in zip(self._numbers, to.numbers, strict=True):
            x[...] = getattr(of_slot.whole, name).numpy().reshape(x.shape)
        for name, x in zip((*self._flags, "valid"), to.flags, strict=True):
            x[...] = getattr(of_slot.whole, name).numpy().reshape(x.shape)


class LossLearner(RolloutLearner):
    """Learns a policy and a value."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum, *, alive: Callable[[], None] = lambda: None) -> None:
        model, kernels = agent.model, agent.kernels
        assert isinstance(model, StandardModel) and isinstance(kernels, LossKernels)
        assert isinstance(model.distribution, (KernelCategorical, KernelGaussian))
        self._standard, self._extra_features, self._kernel = model, model.extra_features, kernels
        super().__init__(agent, slots, tree, alive=alive)
        self._kind = model.distribution.kind
        self._gradients_of = gradients_of(self._kernel.loss, model.state_size > 0)
        self._network = Network.of(model, agent.flat, whole=True)

    def _extra(self, whole: Batch) -> Tensor | None:
        return self._standard.extra(whole.start, whole.prev_action, whole.prev_reward)

    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray, *, joined: bool = False) -> None:
        network, numbers = self._network, [hyper["value_coef"], *self._kernel.hyper(self._config, hyper)]
        if self._moments is not None:
            mean, deviation = self._moments[step].tolist()
            numbers += [mean, deviation + 1e-8]
        elif "advantage" in self._kernel.numbers:
            numbers += [0.0, 1.0]
        self._gradients_of(
            *(network.layers, self._kind, network.free_std, network.log_stds, self._parameters),
            *self._items,
            self._index[step],
            np.array(numbers, np.float32),
            np.float32(hyper["entropy_coef"]),
            joined,
            out,
        )


class ValueLearner(RolloutLearner):
    """Learns the values of actions."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum, *, alive: Callable[[], None] = lambda: None) -> None:
        super().__init__(agent, slots, tree, alive=alive)
        assert isinstance(agent.model, QModel)
        self._network, self._used = q_network(agent.model, agent.flat), np.zeros_like(self._parameters)

    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray, *, joined: bool = False) -> None:
        items = self._items  # of one step each
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
