"""Learners of off-policy algorithms in portable arithmetic: one kernel computes the gradients of all slots' slices.

Shape legend: P parameters, S slots, N items of all slots, Z numbers of noise.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from lockstep.agent import Agent
from lockstep.algorithms.dqn import DQNConfig
from lockstep.algorithms.drq import DrQConfig
from lockstep.algorithms.mpo import MPOConfig
from lockstep.algorithms.offpolicy import OffPolicy
from lockstep.algorithms.sac import SAC
from lockstep.algorithms.td3 import TD3Config
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.replay_batches import Prefetched, ReplayBatches
from lockstep.core.transitions import Transitions
from lockstep.distributed.tree import TreeSum
from lockstep.kernels.actor_critic import sac_gradients, td3_gradients
from lockstep.kernels.discrete_sac import discrete_sac_gradients
from lockstep.kernels.images import augment
from lockstep.kernels.mpo import mpo_gradients
from lockstep.kernels.optimizers import follow
from lockstep.kernels.q_learning import dqn_gradients
from lockstep.kernels.replayed import Items
from lockstep.kernels.returns_learning import returns_gradients
from lockstep.learners.kernel_learner import KernelLearner
from lockstep.learners.steps import LearningReport
from lockstep.models.actor_critic import ActorCritic
from lockstep.models.continuous import DiagonalGaussian
from lockstep.models.layer_tables import encoder_of, inputs_of, mlp_layers, observed, q_layers, q_network
from lockstep.models.observations import entry
from lockstep.models.q import QModel
from lockstep.portable.numbers import portable_numbers


def _by_step(parts: Sequence[np.ndarray], steps: int) -> np.ndarray:
    """Items of each slot for several gradient steps, one after the other -> [steps, N, ...]"""
    if steps == len(parts) == 1:
        return np.ascontiguousarray(parts[0])[None]
    return np.concatenate([x.reshape(steps, len(x) // steps, *x.shape[1:]) for x in parts], 1)


class ReplayLearner(KernelLearner):
    """Learns from replayed transitions, or from other items that a subclass reads."""

    _whole: ClassVar[bool] = False
    """Whether the kernel takes pixels as whole numbers: see lockstep.models.layer_tables.observed."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        self._encoder = encoder_of(agent.model)
        self._target = agent.vectors[1].numpy()
        assert isinstance(agent.algorithm, OffPolicy)
        self._following = agent.algorithm.following
        self._seen: tuple[Prefetched, Items] | None = None
        """The items that were read last: of the first slot, and of all slots."""
        self._observations = np.empty((2, 0, 0, inputs_of(self._encoder)), np.float32)
        """Memory of their observations and next observations, [2, steps or more, N, D]. It is used again, since to take
        new memory takes longer than to write it."""

    def learn(self, iteration: int, rollouts: dict[int, list[CollectedRollout]]) -> LearningReport:
        """As Learner.learn. Torch's operations around the kernels are exact, so they need not be replaced."""
        self._agent.normalizers.apply(self._agent.model)
        with portable_numbers():
            return self._learn(iteration, rollouts)

    def compute(self, step: int, hyper: dict[str, float], out: np.ndarray, *, joined: bool = False) -> None:
        self._compute(self._items(step), hyper, out, joined=joined)

    def repeated(self, step: int, hyper: dict[str, float], out: np.ndarray) -> Callable[[], None]:
        items = self._items(step)  # drawn once
        return lambda: self._compute(items, hyper, out, joined=self._subtree)

    def _compute(self, items: Any, hyper: dict[str, float], out: np.ndarray, *, joined: bool) -> None:
        assert isinstance(self.batches, ReplayBatches)
        priority = np.empty(len(items.weight), np.float32)
        self._call(items, hyper, joined, out, priority)
        if not self._algorithm.weighted:
            return
        for slot, numbers in zip(self._slots, priority.reshape(len(out), -1), strict=True):
            self.batches.learned(slot, torch.from_numpy(numbers))
        # One number per slot, so that the sum holds each slot's largest weight.
        largest = out[:, self._parameters.size + self._counts :]
        largest[:] = 0
        for row, (slot, weights) in enumerate(zip(self._slots, items.weight.reshape(len(out), -1), strict=True)):
            largest[0 if joined else row, slot] = weights.max()

    def _update_target(self, step: int) -> None:
        if weight := self._following(step):
            follow(self._target, self._parameters, np.float32(weight))

    def _items(self, step: int) -> Any:
        """All slots' slices of one gradient step's minibatch: Items, or something else with a weight."""
        assert isinstance(self.batches, ReplayBatches)
        (first, index), *others = (self.batches.prefetched(slot, step) for slot in self._slots)
        if self._seen is None or self._seen[0] is not first:
            batches = [items.batch for items in (first, *(items for items, _ in others))]
            self._seen = first, self._joined(batches, len(first.drawn))
        return Items(*(x[index] for x in self._seen[1]))

    def _joined(self, batches: Sequence[Transitions], steps: int) -> Items:
        """The items of all slots for several gradient steps."""
        n = len(batches[0].weight) // steps
        _, most, items, numbers = self._observations.shape
        if steps > most or items != len(batches) * n:
            self._observations = np.empty((2, steps, len(batches) * n, numbers), np.float32)
        observations = self._observations[:, :steps]
        for place, batch in enumerate(batches):
            for which, out in enumerate(observations[:, :, place * n : (place + 1) * n]):
                self._observe(batch, which, out)
        others = ((batch.action, batch.reward, batch.discount) for batch in batches)
        action, reward, discount = (_by_step([x[0].numpy() for x in parts], steps) for parts in zip(*others))
        weight = _by_step([batch.weight.numpy() for batch in batches], steps)
        noise = _by_step([*map(self._noise, batches)], steps)
        return Items(observations[0], action, reward, discount, observations[1], weight, noise)

    def _observe(self, batch: Transitions, which: int, out: np.ndarray) -> None:
        """Write a slot's observations (which is 0) or next observations (1) as layers see them: [steps, n, D]."""
        observed(self._encoder, (batch.obs, batch.next_obs)[which], whole=self._whole, out=out)

    def _noise(self, batch: Transitions) -> np.ndarray:
        """The kernel's random numbers for a slot's items."""
        return np.zeros(0, np.float32) if batch.noise is None else batch.noise.numpy()

    @abstractmethod
    def _call(self, items: Any, hyper: dict[str, float], joined: bool, out: np.ndarray, priority: np.ndarray) -> None:
        """Call the kernel with the items of all slots. It writes out, float32 [S, P + tail], or the sum of
        all slots to out[0] if joined, and priority, float32 [N]."""


class QLearner(ReplayLearner):
    """Learns action values by DQN."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        model, config = agent.model, agent.experiment.algorithm
        assert isinstance(model, QModel) and isinstance(config, DQNConfig)
        super().__init__(agent, slots, tree)
        self._layers = q_layers(model, agent.flat)
        self._loss = config.compares(model), np.float32(config.huber_delta)

    def _call(self, items: Items, hyper: dict[str, float], joined: bool, out: np.ndarray, priority: np.ndarray) -> None:
        vectors = self._parameters, self._target
        dqn_gradients(self._layers, *vectors, *self._loss, tuple(items), joined, out, priority)


class ReturnsLearner(ReplayLearner):
    """Learns action values by DQN with noisy layers, dueling streams or distributions of returns."""

    _whole = True

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        model, config = agent.model, agent.experiment.algorithm
        assert isinstance(model, QModel) and isinstance(config, DQNConfig)
        super().__init__(agent, slots, tree)
        self._network = q_network(model, agent.flat)
        samples = (config.samples, config.target_samples) if model.implicit else (0, 0)
        self._loss = config.compares(model), np.float32(config.huber_delta), samples
        self._used = np.zeros((2, self._parameters.size), np.float32)

    def _call(self, items: Items, hyper: dict[str, float], joined: bool, out: np.ndarray, priority: np.ndarray) -> None:
        vectors = self._parameters, self._target
        returns_gradients(self._network, *vectors, *self._loss, tuple(items), joined, self._used, out, priority)


class DrQLearner(ReturnsLearner):
    """Learns from images that DrQ augments."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        config, model = agent.experiment.algorithm, agent.model
        assert isinstance(config, DrQConfig) and isinstance(model, QModel)
        self._config, self._of_layers = config, 2 * model.noise_numbers
        self._slice = config.batch_size // agent.experiment.scheme.shards
        """Items of a slot's slice."""

    def _noise(self, batch: Transitions) -> np.ndarray:
        return self._drawn(batch)[:, : self._of_layers].ravel()

    def _drawn(self, batch: Transitions) -> np.ndarray:
        """Random numbers by gradient step: those of noisy layers, and those of augmentation."""
        assert batch.noise is not None
        return batch.noise.view(len(batch.weight) // self._slice, -1).numpy()

    def _observe(self, batch: Transitions, which: int, out: np.ndarray) -> None:
        images = entry((batch.obs, batch.next_obs)[which], self._encoder.layout.images[0][0])[0].contiguous().numpy()
        draws = self._drawn(batch)[:, self._of_layers :].reshape(len(out), 2, self._slice, -1)[:, which]
        augmented = out.reshape(images.shape) if out.flags.c_contiguous else np.empty(images.shape, np.float32)
        intensity = np.float32(self._config.intensity)
        augment(images, draws.reshape(len(images), -1), self._config.pad, intensity, augmented)
        if not out.flags.c_contiguous:
            out[...] = augmented.reshape(out.shape)


class ActorCriticLearner(ReplayLearner):
    """Learns a policy and critics."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        model = agent.model
        assert isinstance(model, ActorCritic)
        super().__init__(agent, slots, tree)
        self._networks = (
            mlp_layers(model.actor.layers, "actor.layers", agent.flat, (model.policy_columns or [0])[0]),
            mlp_layers(model.critics.layers, "critics.layers", agent.flat),
            len(model.critics.layers.weights[0]),
            self._parameters,
            self._target,
        )


class SACLearner(ActorCriticLearner):
    """Learns by SAC."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        model, algorithm = agent.model, agent.algorithm
        assert isinstance(model, ActorCritic) and isinstance(algorithm, SAC)
        self._temperature = agent.flat.offset("variables.log_temperature")
        self._entropy = np.float32(algorithm.target_entropy(model))

    def _call(self, items: Items, hyper: dict[str, float], joined: bool, out: np.ndarray, priority: np.ndarray) -> None:
        sac_gradients(self._networks, self._temperature, self._entropy, tuple(items), joined, out, priority)


class DiscreteSACLearner(SACLearner):
    """Learns by SAC with discrete actions."""

    def _call(self, items: Items, hyper: dict[str, float], joined: bool, out: np.ndarray, priority: np.ndarray) -> None:
        discrete_sac_gradients(self._networks, self._temperature, self._entropy, tuple(items), joined, out, priority)


class TD3Learner(ActorCriticLearner):
    """Learns by TD3, or by DDPG, which is TD3 without smoothing whose policy moves at every step."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        config = agent.experiment.algorithm
        smoothing, self._period = (0.0, 0.0), 1
        if isinstance(config, TD3Config):
            smoothing, self._period = (config.smoothing_std, config.smoothing_clip), config.policy_period
        self._smoothing = tuple(map(np.float32, smoothing))

    def _call(self, items: Items, hyper: dict[str, float], joined: bool, out: np.ndarray, priority: np.ndarray) -> None:
        period, moves = self._period, hyper["update"] % self._period == 0
        td3_gradients(self._networks, *self._smoothing, period, moves, tuple(items), joined, out, priority)


class MPOLearner(ActorCriticLearner):
    """Learns by MPO."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        config, distribution = agent.experiment.algorithm, agent.model.distribution
        assert isinstance(config, MPOConfig) and isinstance(distribution, DiagonalGaussian)
        names = "temperature", "multiplier_mean", "multiplier_std"
        places = np.array([agent.flat.offset(f"variables.{name}") for name in names], np.int64)
        bounds = config.epsilon, config.epsilon_mean, config.epsilon_std, math.log(config.actions)
        self._settings = np.float32(distribution.log_std), places, np.array(bounds, np.float32)

    def _call(self, items: Items, hyper: dict[str, float], joined: bool, out: np.ndarray, priority: np.ndarray) -> None:
        mpo_gradients(self._networks, *self._settings, tuple(items), joined, out, priority)
