"""Learners of DQN, SAC, TD3 and DDPG in portable arithmetic: one kernel computes the gradient of a slice.

Shape legend: P parameters, n items of a slice, D numbers of an observation, A of an action.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.algorithms.ddpg import DDPGConfig
from lockstep.algorithms.dqn import DQNConfig
from lockstep.algorithms.sac import SACConfig
from lockstep.algorithms.td3 import TD3Config
from lockstep.buffers.batches import CollectedRollout, Slice
from lockstep.distributed.tree import TreeSum
from lockstep.kernels.actor_critic import SAC_SUMS, TD3_SUMS, sac_gradient, td3_gradient
from lockstep.kernels.q_learning import DQN_SUMS, dqn_gradient
from lockstep.learners.learner import Learner, LearningReport
from lockstep.models.actor_critic import ActorCritic
from lockstep.models.continuous import Deterministic, SquashedGaussian
from lockstep.models.encoders import ObservationEncoder
from lockstep.models.layer_tables import knows, mlp_layers, observed, q_layers
from lockstep.models.q import QModel
from lockstep.portable.numbers import portable_numbers


class ReplayLearner(Learner):
    """Learns from replayed transitions. Only the gradient of a slice differs from Learner.

    Args:
        encoder: makes observations into what the kernel's layers see.
        sums: how many metrics the kernel adds up.
    """

    def __init__(
        self,
        agent: Agent,
        slots: range,
        tree: TreeSum,
        alive: Callable[[], None],
        encoder: ObservationEncoder,
        sums: int,
    ) -> None:
        super().__init__(agent, slots, tree, alive=alive)
        self._encoder, self._sums = encoder, sums
        self._parameters, self._target = (vector.numpy() for vector in agent.vectors)

    def learn(self, iteration: int, rollouts: dict[int, list[CollectedRollout]]) -> LearningReport:
        """As Learner.learn. Torch's operations around the kernels are exact, so they need not be replaced."""
        with portable_numbers():
            return self._learn(iteration, rollouts)

    def _gradient(self, slot: int, part: Slice, hyper: dict[str, float]) -> Tensor:
        batch, normalizers = part
        if normalizers is not self._applied:
            normalizers.apply(self._agent.model)
            self._applied = normalizers
        n = batch.action.shape[1]
        obs, next_obs = (observed(self._encoder, x) for x in (batch.obs, batch.next_obs))
        items = [_array(x, n) for x in (batch.reward, batch.discount)]
        out = torch.zeros(self._parameters.size + self._agent.flat.tail)
        priority = torch.empty(n)
        given = (obs, _array(batch.action, *batch.action.shape[1:]), *items, next_obs, _array(batch.weight, n))
        self._call(given, batch.noise, hyper, out.numpy(), priority.numpy())
        self.batches.learned(slot, priority)
        if self._algorithm.weighted:  # one number per slot, so that the sum holds each slot's largest weight
            out[self._parameters.size + 1 + self._sums + slot] = batch.weight.max()
        return out

    @abstractmethod
    def _call(
        self, items: tuple[np.ndarray, ...], noise: Tensor | None, hyper: dict[str, float], out: Any, priority: Any
    ) -> None:
        """Call the kernel.

        Args:
            items: observations, actions, rewards, discounts, next observations and weights of n items.
            noise: of the slice.
            out, priority: what it writes: float32 [P + 1 + sums] and [n].
        """


class QLearner(ReplayLearner):
    """Learns action values by DQN."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum, *, alive: Callable[[], None] = lambda: None) -> None:
        model, config = agent.model, agent.experiment.algorithm
        assert isinstance(model, QModel) and isinstance(config, DQNConfig)
        encoder = model.trunk.encoder
        assert isinstance(encoder, ObservationEncoder)
        super().__init__(agent, slots, tree, alive, encoder, DQN_SUMS)
        self._layers, self._double = q_layers(model, agent.flat), config.double

    def _call(
        self, items: tuple[np.ndarray, ...], noise: Tensor | None, hyper: dict[str, float], out: Any, priority: Any
    ) -> None:
        dqn_gradient(self._layers, self._parameters, self._target, self._double, *items, out, priority)


class ActorCriticLearner(ReplayLearner):
    """Learns a policy and critics by SAC, TD3 or DDPG."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum, *, alive: Callable[[], None] = lambda: None) -> None:
        model = agent.model
        assert isinstance(model, ActorCritic)
        encoder = model.actor.encoder
        assert isinstance(encoder, ObservationEncoder)
        sums = SAC_SUMS if isinstance(agent.experiment.algorithm, SACConfig) else TD3_SUMS
        super().__init__(agent, slots, tree, alive, encoder, sums)
        self._critics = len(model.critics.layers.weights[0])
        self._policy = mlp_layers(model.actor.layers, "actor.layers", agent.flat)
        self._of_critics = mlp_layers(model.critics.layers, "critics.layers", agent.flat)

    def _call(
        self, items: tuple[np.ndarray, ...], noise: Tensor | None, hyper: dict[str, float], out: Any, priority: Any
    ) -> None:
        config, action = self._agent.experiment.algorithm, items[1]
        networks = (self._policy, self._of_critics, self._critics, self._parameters, self._target)
        if isinstance(config, SACConfig):
            assert noise is not None
            entropy = self._algorithm.target_entropy(self._agent.model)  # type: ignore[attr-defined]
            place = self._agent.flat.offset("variables.log_temperature")
            drawn = _array(noise, 2, *action.shape)
            sac_gradient(*networks, place, np.float32(entropy), *items, drawn, out, priority)
            return
        assert isinstance(config, DDPGConfig)
        smoothing = (config.smoothing_std, config.smoothing_clip) if isinstance(config, TD3Config) else (0.0, 0.0)
        period = config.policy_period if isinstance(config, TD3Config) else 1
        drawn = action[:0] if noise is None else _array(noise, *action.shape)
        moves = hyper["update"] % period == 0
        td3_gradient(*networks, *map(np.float32, smoothing), period, moves, *items, drawn, out, priority)


def learner_with_kernels(agent: Agent) -> type[QLearner] | type[ActorCriticLearner] | None:
    """The learner that can compute all of an agent's losses: DQN on vectors or small images; SAC, TD3 and DDPG as they
    are, on vectors. None: torch's operations do."""
    space, model = agent.observation_space, agent.model
    if not agent.experiment.has_kernels or not isinstance(space, gymnasium.spaces.Box):
        return None
    if isinstance(model, QModel):
        encoder = model.trunk.encoder
        return QLearner if isinstance(encoder, ObservationEncoder) and knows(encoder) else None
    if not isinstance(model, ActorCritic) or not isinstance(model.distribution, (SquashedGaussian, Deterministic)):
        return None
    encoder = model.actor.encoder
    vectors = isinstance(encoder, ObservationEncoder) and not encoder.layout.images
    return ActorCriticLearner if vectors else None


def _array(x: Tensor, *shape: int) -> np.ndarray:
    """A contiguous array of this shape."""
    return np.ascontiguousarray(x.numpy()).reshape(shape)
