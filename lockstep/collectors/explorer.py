"""Exploration while acting: the random numbers of an acting batch's rollouts, and how they determine actions.

Shape legend: T time, A rows of an acting batch, B environments of a shard, N noise numbers, P parameters of a
distribution, X numbers of exploration.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent
from lockstep.algorithms.offpolicy import drifting
from lockstep.collectors.stepping import ActingShard
from lockstep.config.settings import SettingsError
from lockstep.core.rng import stream
from lockstep.models.arithmetic import arithmetic
from lockstep.models.base import Exploring
from lockstep.models.gaussian import standard_normal

Choose = Callable[[Tensor, Tensor], Tensor]
"""Makes actions [A, *action_shape] from the policy's parameters [A, P] and noise [A, N]."""


class Explorer:
    """Draws the noise of each rollout, and explores as the algorithm says. Only computations, and not draws, run in the
    model's arithmetic, since its operations may take more time.

    Args:
        members: the shards of the acting batch.
        size: A, the rows of the acting batch.
    """

    def __init__(self, agent: Agent, members: list[ActingShard], size: int) -> None:
        self._experiment, self._algorithm, self._device = agent.experiment, agent.algorithm, agent.device
        self._model, distribution = agent.model, agent.model.distribution
        self._exploring = distribution if isinstance(distribution, Exploring) else None
        steps, numbers = agent.experiment.algorithm.rollout, distribution.noise_size
        self.noise = torch.zeros(steps, size, numbers, pin_memory=agent.device.type != "cpu")
        """fp32 [T, A, N] in the host's memory, uniform in [0, 1]: rewritten before each rollout."""
        self._noise = self.noise.numpy()
        self._sample: Choose = distribution.sample
        self.choose = self._sample
        """Chooses this rollout's actions. Functions that call different kernels are unequal."""
        self._numbers: Tensor | None = None
        """fp32 [A, X]: how each environment explores. CUDA graphs read it, so it stays at its place in memory."""
        self._theta = agent.algorithm.noise_theta
        if self._theta < 1:
            for member in members:
                member.drift = self._first_drift(member)

    def begin(self, member: ActingShard, rollout: int) -> None:
        """Set how a shard explores in a rollout, and draw its noise."""
        self._explore(member, rollout)
        steps, _, numbers = self._noise.shape
        shape = steps, member.num_envs, numbers
        drawn = stream(self._experiment.seed, "action", member.shard, rollout).random(shape, np.float32)
        if member.drift is not None and self.choose != self._uniform:
            with arithmetic(self._model):
                drifted, member.drift = drifting(torch.from_numpy(drawn), member.drift, self._theta)
            drawn = drifted.numpy()
        self._noise[:, member.rows] = drawn

    def _explore(self, member: ActingShard, rollout: int) -> None:
        experiment, size = self._experiment, member.num_envs
        samples = rollout * experiment.samples_per_iteration
        environments = range(member.shard * size, (member.shard + 1) * size)
        progress = min(1.0, samples / experiment.total_steps)
        with arithmetic(self._model):
            how = self._algorithm.exploration(progress, samples, environments, experiment.env.num_envs)
        if how is None:
            self.choose = self._sample  # also after rollouts that explored
            return
        if self._exploring is None:
            raise SettingsError(
                f"{type(self._algorithm).__name__}.exploration says how to explore, but "
                f"{type(self._model.distribution).__name__} has no methods explore and uniform. Write them, or return "
                "None, which samples the policy."
            )
        if how.numbers.dim() != 2 or len(how.numbers) != size:
            raise SettingsError(
                f"{type(self._algorithm).__name__}.exploration returned numbers of shape {list(how.numbers.shape)}. "
                f"They must be [B, X], with one row for each of the {size} environments."
            )
        if self._numbers is None:
            self._numbers = torch.zeros(self._noise.shape[1], how.numbers.shape[1], device=self._device)
        self._numbers[member.rows] = how.numbers.to(self._device)
        self.choose = self._uniform if how.random else self._by_numbers

    def _uniform(self, policy: Tensor, noise: Tensor) -> Tensor:
        assert self._exploring is not None
        return self._exploring.uniform(policy, noise)

    def _by_numbers(self, policy: Tensor, noise: Tensor) -> Tensor:
        assert self._exploring is not None and self._numbers is not None
        return self._exploring.explore(policy, noise, self._numbers)

    def _first_drift(self, member: ActingShard) -> Tensor:
        """The initial state of drifting noise: fp32 [B, N], standard normal."""
        draw = stream(self._experiment.seed, "drift", member.shard)
        shape = member.num_envs, self._noise.shape[2]
        if self._model.portable_operations:
            with arithmetic(self._model):
                return standard_normal(torch.from_numpy(draw.random(shape, np.float32)))
        return torch.from_numpy(draw.standard_normal(shape, np.float32))
