"""The task of custom_env.py as functions that Numba compiles, which makes it many times as fast.

lockstep check-env examples/compiled_env.py:Reach
lockstep train examples/compiled_env.py:recipe
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from lockstep import recipes
from lockstep.envs import EnvConfig
from lockstep.envs.compiled import CompiledEnv
from lockstep.experiment import Experiment
from lockstep.kernels.math import sqrt
from lockstep.kernels.random import uniform


class Reach(CompiledEnv):
    """A point mass in a plane: accelerate it to the origin, and keep it there. The time limit truncates."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    max_episode_steps = 100
    fields: ClassVar = {"position": (float, (2,)), "velocity": (float, (2,))}
    options: ClassVar = {"thrust": 0.05}

    @staticmethod
    def reset(state: Any) -> None:
        for i in range(2):
            state.position[i] = uniform(state, -1.0, 1.0)
            state.velocity[i] = 0.0

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        for i in range(2):
            thrust = state.thrust * min(max(action[i], -1.0), 1.0)
            state.velocity[i] = 0.95 * state.velocity[i] + thrust
            state.position[i] += state.velocity[i]
        distance = sqrt(state.position[0] * state.position[0] + state.position[1] * state.position[1])
        lost = distance > 3.0
        return (-10.0 if lost else -distance / 10), lost

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        for i in range(2):
            out[i] = state.position[i]
            out[2 + i] = state.velocity[i]


def recipe() -> Experiment:
    """PPO with Gaussian actions on the point mass."""
    experiment = recipes.ppo_mujoco()
    return experiment.replace(
        env=EnvConfig.of(Reach, adapter="compiled", num_envs=8),
        algorithm=dataclasses.replace(experiment.algorithm, minibatches=8),
        total_steps=200_000,
    )
