"""Minibatches of on-policy algorithms for kernels in portable arithmetic.

Arrays hold the rollouts of all of a learner's slots. Kernels read the items of a slice by their indices.

Shape legend: S slots of this learner, T time, B environments of a shard, N = T * B items of a rollout, n of them in a
slice, G gradient steps, D numbers of an observation, A numbers of an action.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from lockstep.agent import Agent
from lockstep.algorithms.ppo import PPOConfig
from lockstep.buffers.batches import CollectedRollout
from lockstep.buffers.on_policy import FreshBatches
from lockstep.core.arrays import map_structure
from lockstep.distributed.tree import TreeSum
from lockstep.kernels import returns
from lockstep.models.layer_tables import encoder_of, observed
from lockstep.models.policy import StandardModel


class Items(NamedTuple):
    """The rollouts of all slots, item by item."""

    observations: np.ndarray
    """Normalized observations, or scaled pixels: float32 [S, N, D]."""
    actions: np.ndarray
    """float32 [S, N, A]; A is 0 if actions are discrete."""
    choices: np.ndarray
    """Discrete actions: int64 [S, N]."""
    log_probs: np.ndarray
    """Log-probabilities under the collecting version: float32 [S, N]."""
    values: np.ndarray
    """Values of the collecting version: float32 [S, N]."""
    advantages: np.ndarray
    """float32 [S, N]"""
    targets: np.ndarray
    """Value targets: float32 [S, N]."""
    valid: np.ndarray
    """bool [S, N]"""


class PPOBatches(FreshBatches):
    """Epochs of minibatches over the rollouts in a learner's slots, as indices."""

    def __init__(self, agent: Agent, slots: range, tree: TreeSum) -> None:
        super().__init__(agent, slots, tree)
        config, model = agent.experiment.algorithm, agent.model
        assert isinstance(config, PPOConfig) and isinstance(model, StandardModel)
        self._model, self._encoder, self._lambda = model, encoder_of(model), config.gae_lambda
        self._discrete = not model.distribution.action_shape
        size = 0 if self._discrete else model.distribution.action_shape[0]
        features = spaces.flatdim(agent.observation_space)
        shape = (len(slots), self._config.rollout, agent.experiment.envs_per_shard)
        count = shape[1] * shape[2]

        def numbers(*more: int) -> np.ndarray:
            return np.zeros((len(slots), count, *more), np.float32)

        self.items = Items(
            numbers(features),
            numbers(size),
            np.zeros((len(slots), count), np.int64),
            numbers(),
            numbers(),
            numbers(),
            numbers(),
            np.zeros((len(slots), count), np.bool_),
        )
        by_step = [x.reshape(*shape, *x.shape[2:]) for x in self.items]
        self._of_slots = [Items(*(x[place] for x in by_step)) for place in range(len(slots))]
        """The same memory by slot, [T, B, ...]."""
        self.index = np.tile(np.arange(count), (self._config.epochs, len(slots), 1))
        """int64 [G, S, n]: the items of each gradient step. Without minibatches, every step has all items."""
        self.scales: list[tuple[float, float]] = []
        """For each gradient step: a number to subtract from advantages, and a number to divide the difference by."""

    def begin(self, iteration: int, rollouts: dict[int, list[CollectedRollout]], hyper: dict[str, float]) -> int:
        for place, slot in enumerate(self._slots):
            (only,) = rollouts[slot]
            self._take(place, only, hyper)
        steps = self._config.epochs * self._config.minibatches
        if self._config.minibatches > 1:
            plans = [self._plan(slot, iteration) for slot in self._slots]
            orders = [plan.numpy().reshape(steps, -1) for plan in plans if plan is not None]
            self.index = np.ascontiguousarray(np.stack(orders, 1))
        self.scales = self._standardizing() if self._algorithm.normalize_advantages else [(0.0, 1.0)] * steps
        return steps

    def _take(self, place: int, collected: CollectedRollout, hyper: dict[str, float]) -> None:
        """Write a slot's rollout into its items."""
        rollout, normalizers = collected.rollout, collected.normalizers
        normalizers.apply(self._model)
        steps = len(rollout.reward)
        to, value = self._of_slots[place], rollout.value.contiguous().numpy()
        obs = map_structure(lambda leaf: leaf[:steps], rollout.obs)
        observed(self._encoder, obs, out=to.observations)
        if self._discrete:
            to.choices[...] = rollout.action.numpy()
        else:
            to.actions[...] = rollout.action.numpy()
        to.log_probs[...] = rollout.log_prob.numpy()
        to.values[...] = value[:steps]
        to.valid[...] = rollout.valid.numpy()
        reward = normalizers.scale_rewards(rollout.reward)
        r_t, terminated, truncated = (x.contiguous().numpy() for x in (reward, rollout.terminated, rollout.truncated))
        returns.gae(r_t, value, terminated, truncated, hyper["discount"], self._lambda, to.advantages, to.targets)

    def _standardizing(self) -> list[tuple[float, float]]:
        sums = {}
        for place, slot in enumerate(self._slots):
            found = np.empty((len(self.index), 3))
            index = np.ascontiguousarray(self.index[:, place])
            returns.slice_sums(self.items.advantages[place], self.items.valid[place], index, found)
            sums[slot] = torch.from_numpy(found)
        return [(mean, deviation + 1e-8) for mean, deviation in self._global_moments(sums)]
