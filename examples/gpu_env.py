"""Thousands of copies of CartPole in torch: on a GPU, whole rollouts are collected without the CPU.

lockstep train examples/gpu_env.py:recipe --layout inline,device=0,graphs=1
lockstep train examples/gpu_env.py:recipe --layout inline
"""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lockstep.algorithms import PPOConfig
from lockstep.envs import EnvConfig
from lockstep.envs.torch_env import State, TorchEnv, uniform
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.scheme import Scheme

GRAVITY, CART, POLE, LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02  # LENGTH: half the pole's
FARTHEST, STEEPEST = 2.4, 12 * 2 * math.pi / 360


class CartPole(TorchEnv):
    """Balance a pole on a cart (Barto, Sutton and Anderson 1983), as gymnasium's CartPole-v1 does."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, num_envs: int, device: torch.device, longest: int = 500) -> None:
        super().__init__(num_envs, device)
        self._longest = longest

    def reset(self, seeds: Tensor) -> State:
        return {"body": uniform(seeds, 4, -0.05, 0.05), "steps": torch.zeros_like(seeds)}

    def step(self, state: State, actions: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
        x, velocity, angle, spin = state["body"].unbind(-1)
        force = FORCE * (2 * actions - 1)
        sine, cosine, mass = angle.sin(), angle.cos(), CART + POLE
        push = (force + POLE * LENGTH * spin * spin * sine) / mass
        turning = (GRAVITY * sine - cosine * push) / (LENGTH * (4 / 3 - POLE * cosine * cosine / mass))
        speeding = push - POLE * LENGTH * turning * cosine / mass
        change = torch.stack([velocity, speeding, spin, turning], -1)
        body, steps = state["body"] + SECONDS * change, state["steps"] + 1
        lost = (body[:, 0].abs() > FARTHEST) | (body[:, 2].abs() > STEEPEST)
        return {"body": body, "steps": steps}, torch.ones_like(x), lost, steps >= self._longest

    def observe(self, state: State) -> Tensor:
        return state["body"]


def recipe() -> Experiment:
    """PPO on 4,096 CartPoles in torch."""
    return Experiment(
        env=EnvConfig.of(CartPole, num_envs=4096),
        model=StandardModelConfig(encoder="mlp", separate_value_network=True),
        algorithm=PPOConfig(rollout=32, epochs=4, minibatches=16, learning_rate=3e-3, clip=0.2),
        scheme=Scheme(shards=2, acting_batch=4096),
        total_steps=4_000_000,
        precision="fp32",
    )
