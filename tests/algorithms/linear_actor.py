"""The smallest model that has everything losses need, in float64, and rollout slices for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms import Batch, OnPolicy
from lockstep.models import ModelOutput, PolicyModel

FEATURES, ACTIONS = 3, 4


class Choice:
    """Categorical distribution over ACTIONS logits."""

    num_params = ACTIONS
    noise_size = 1
    action_shape: tuple[int, ...] = ()
    action_dtype = torch.int64

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        return (torch.softmax(params, -1).cumsum(-1) < noise).sum(-1).clamp(max=ACTIONS - 1)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        return torch.log_softmax(params, -1).gather(-1, action[..., None])[..., 0]

    def entropy(self, params: Tensor) -> Tensor:
        log_p = torch.log_softmax(params, -1)
        return -(log_p.exp() * log_p).sum(-1)

    def to_env(self, action: np.ndarray) -> Any:
        return action


class LinearActor(PolicyModel):
    """Logits and value, linear in the observation."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())
        """[ACTIONS + 1, FEATURES], the value's row last."""
        self.distribution = Choice()
        self.state_size = 0

    def forward(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        out = obs @ self.weight.T
        return ModelOutput(out[..., :ACTIONS], out[..., ACTIONS], obs), state

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        raise AssertionError("losses do not touch statistics")

    def for_acting(self) -> PolicyModel:
        raise AssertionError("losses do not act")


def make_model(seed: int = 0) -> LinearActor:
    return LinearActor(torch.from_numpy(np.random.default_rng(seed).normal(size=(ACTIONS + 1, FEATURES))))


def make_batch(algorithm: OnPolicy[Any], seed: int = 1, steps: int = 6, envs: int = 4) -> Batch:
    """Random slices in which episodes end by termination, truncation and lost lives, with reset steps."""
    rng = np.random.default_rng(seed)
    inputs = steps + algorithm.bootstrap_inputs

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape))

    terminated, truncated = np.zeros((2, steps, envs), bool)
    valid = np.ones((steps, envs), bool)
    terminated[1, 0] = truncated[2, 1] = terminated[3, 2] = truncated[steps - 1, 2] = True
    valid[2, 0] = valid[3, 1] = False  # at [4, 2] only a life was lost
    return Batch(
        obs=normal(inputs, envs, FEATURES),
        start=torch.zeros(inputs, envs, dtype=torch.bool),
        prev_action=None,
        prev_reward=None,
        state=torch.zeros(envs, 0, dtype=torch.float64),
        action=torch.from_numpy(rng.integers(ACTIONS, size=(steps, envs))),
        reward=normal(steps, envs),
        log_prob=torch.from_numpy(np.log(rng.uniform(0.1, 0.9, size=(steps, envs)))),
        value=normal(steps, envs),
        terminated=torch.from_numpy(terminated),
        truncated=torch.from_numpy(truncated),
        valid=torch.from_numpy(valid),
        advantage=normal(steps, envs) if algorithm.needs_targets else None,
        value_target=normal(steps, envs) if algorithm.needs_targets else None,
    )
