"""gymnasium's classic control for the adapter `compiled`: the same tasks, with the arithmetic of gymnasium 1.x.

Each step equals gymnasium's except for the rounding of sines and cosines. Initial states come from another generator.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep.envs.compiled import CompiledEnv
from lockstep.kernels.cache import part
from lockstep.kernels.math import cos, sin
from lockstep.kernels.random import uniform

_PI = math.pi
_f = np.float32


def _box(*high: float) -> spaces.Box:
    return spaces.Box(-np.array(high, np.float32), np.array(high, np.float32))


def _picture(env_id: str, state: Any) -> np.ndarray:
    """gymnasium's picture of a state."""
    env: Any = gymnasium.make(env_id, render_mode="rgb_array", disable_env_checker=True).unwrapped
    try:
        env.state, env.last_u = np.array(state), None
        return env.render()
    finally:
        env.close()


_TOTAL_MASS, _POLE_MASS_LENGTH, _HALF_LENGTH, _POLE_MASS = 0.1 + 1.0, 0.1 * 0.5, 0.5, 0.1
_FALLEN = 12 * 2 * math.pi / 360


class CartPole(CompiledEnv):
    """CartPole-v1."""

    observation_space = _box(4.8, np.inf, 2 * _FALLEN, np.inf)
    action_space = spaces.Discrete(2)
    max_episode_steps = 500
    fields: ClassVar = {"x": float, "x_speed": float, "angle": float, "angle_speed": float}
    options: ClassVar = {"sutton_barto_reward": False}

    @staticmethod
    def reset(state: Any) -> None:
        state.x = uniform(state, -0.05, 0.05)
        state.x_speed = uniform(state, -0.05, 0.05)
        state.angle = uniform(state, -0.05, 0.05)
        state.angle_speed = uniform(state, -0.05, 0.05)

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        force = 10.0 if action == 1 else -10.0
        cosine, sine = cos(state.angle), sin(state.angle)
        push = (force + _POLE_MASS_LENGTH * (state.angle_speed * state.angle_speed) * sine) / _TOTAL_MASS
        inertia = _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * (cosine * cosine) / _TOTAL_MASS)
        angle_change = (9.8 * sine - cosine * push) / inertia
        x_change = push - _POLE_MASS_LENGTH * angle_change * cosine / _TOTAL_MASS
        state.x = state.x + 0.02 * state.x_speed
        state.x_speed = state.x_speed + 0.02 * x_change
        state.angle = state.angle + 0.02 * state.angle_speed
        state.angle_speed = state.angle_speed + 0.02 * angle_change
        ended = abs(state.x) > 2.4 or abs(state.angle) > _FALLEN
        if state.sutton_barto_reward:
            return (-1.0 if ended else 0.0), ended
        return 1.0, ended

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[0], out[1], out[2], out[3] = state.x, state.x_speed, state.angle, state.angle_speed

    @staticmethod
    def draw(state: np.ndarray) -> np.ndarray:
        return _picture("CartPole-v1", [state[name] for name in CartPole.fields])


@part
def _accelerations(angle1: Any, angle2: Any, speed1: Any, speed2: Any, torque: Any) -> Any:
    """Accelerations of both joints. Lengths, masses and moments of inertia are 1; centers of mass are at 0.5."""
    cosine2, sine2 = cos(angle2), sin(angle2)
    d1 = 0.25 + (1.0 + 0.25 + 2 * 0.5 * cosine2) + 1.0 + 1.0
    d2 = (0.25 + 0.5 * cosine2) + 1.0
    phi2 = 0.5 * 9.8 * cos(angle1 + angle2 - _PI / 2.0)
    phi1 = -0.5 * (speed2 * speed2) * sine2 - 2 * 0.5 * speed2 * speed1 * sine2
    phi1 = phi1 + (0.5 + 1.0) * 9.8 * cos(angle1 - _PI / 2) + phi2
    change2 = (torque + d2 / d1 * phi1 - 0.5 * (speed1 * speed1) * sine2 - phi2) / (0.25 + 1.0 - d2 * d2 / d1)
    return -(d2 * change2 + phi1) / d1, change2


@part
def _wrap(angle: Any) -> Any:
    while angle > _PI:
        angle = angle - 2 * _PI
    while angle < -_PI:
        angle = angle + 2 * _PI
    return angle


class Acrobot(CompiledEnv):
    """Acrobot-v1."""

    observation_space = _box(1, 1, 1, 1, 4 * math.pi, 9 * math.pi)
    action_space = spaces.Discrete(3)
    max_episode_steps = 500
    fields: ClassVar = {"angle1": float, "angle2": float, "speed1": float, "speed2": float}

    @staticmethod
    def reset(state: Any) -> None:
        state.angle1 = _f(uniform(state, -0.1, 0.1))
        state.angle2 = _f(uniform(state, -0.1, 0.1))
        state.speed1 = _f(uniform(state, -0.1, 0.1))
        state.speed2 = _f(uniform(state, -0.1, 0.1))

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        torque = action - 1.0
        a, b, c, d = state.angle1, state.angle2, state.speed1, state.speed2
        c1, d1 = _accelerations(a, b, c, d, torque)  # a Runge-Kutta step of 0.2
        a2, b2 = c + 0.1 * c1, d + 0.1 * d1
        c2, d2 = _accelerations(a + 0.1 * c, b + 0.1 * d, a2, b2, torque)
        a3, b3 = c + 0.1 * c2, d + 0.1 * d2
        c3, d3 = _accelerations(a + 0.1 * a2, b + 0.1 * b2, a3, b3, torque)
        a4, b4 = c + 0.2 * c3, d + 0.2 * d3
        c4, d4 = _accelerations(a + 0.2 * a3, b + 0.2 * b3, a4, b4, torque)
        state.angle1 = _wrap(a + 0.2 / 6.0 * (c + 2 * a2 + 2 * a3 + a4))
        state.angle2 = _wrap(b + 0.2 / 6.0 * (d + 2 * b2 + 2 * b3 + b4))
        state.speed1 = min(max(c + 0.2 / 6.0 * (c1 + 2 * c2 + 2 * c3 + c4), -4 * _PI), 4 * _PI)
        state.speed2 = min(max(d + 0.2 / 6.0 * (d1 + 2 * d2 + 2 * d3 + d4), -9 * _PI), 9 * _PI)
        ended = -cos(state.angle1) - cos(state.angle2 + state.angle1) > 1.0
        return (0.0 if ended else -1.0), ended

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[0], out[1] = cos(state.angle1), sin(state.angle1)
        out[2], out[3] = cos(state.angle2), sin(state.angle2)
        out[4], out[5] = state.speed1, state.speed2

    @staticmethod
    def draw(state: np.ndarray) -> np.ndarray:
        return _picture("Acrobot-v1", [state[name] for name in Acrobot.fields])


class MountainCar(CompiledEnv):
    """MountainCar-v0."""

    observation_space = spaces.Box(np.array([-1.2, -0.07], np.float32), np.array([0.6, 0.07], np.float32))
    action_space = spaces.Discrete(3)
    max_episode_steps = 200
    fields: ClassVar = {"position": float, "speed": float}
    options: ClassVar = {"goal_velocity": 0.0}

    @staticmethod
    def reset(state: Any) -> None:
        state.position = uniform(state, -0.6, -0.4)
        state.speed = 0.0

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        speed = state.speed + ((action - 1) * 0.001 + cos(3 * state.position) * -0.0025)
        speed = min(max(speed, -0.07), 0.07)
        state.position = min(max(state.position + speed, -1.2), 0.6)
        state.speed = 0.0 if state.position == -1.2 and speed < 0 else speed
        return -1.0, state.position >= 0.5 and state.speed >= state.goal_velocity

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[0], out[1] = state.position, state.speed

    @staticmethod
    def draw(state: np.ndarray) -> np.ndarray:
        return _picture("MountainCar-v0", [state["position"], state["speed"]])


class MountainCarContinuous(CompiledEnv):
    """MountainCarContinuous-v0. Like gymnasium's, it computes in float32, except the cosine and the reward."""

    observation_space = MountainCar.observation_space
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 999
    fields: ClassVar = {"position": np.float32, "speed": np.float32}
    options: ClassVar = {"goal_velocity": 0.0}

    @staticmethod
    def reset(state: Any) -> None:
        state.position = _f(uniform(state, -0.6, -0.4))
        state.speed = _f(0)

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        force = min(max(action[0], _f(-1)), _f(1))
        slope = _f(0.0025 * cos(np.float64(_f(3) * state.position)))
        speed = state.speed + (force * _f(0.0015) - slope)
        speed = min(max(speed, _f(-0.07)), _f(0.07))
        state.position = min(max(state.position + speed, _f(-1.2)), _f(0.6))
        state.speed = _f(0) if state.position == _f(-1.2) and speed < _f(0) else speed
        ended = state.position >= _f(0.45) and state.speed >= _f(state.goal_velocity)
        given = np.float64(action[0])
        return (100.0 if ended else 0.0) - given * given * 0.1, ended

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[0], out[1] = state.position, state.speed

    @staticmethod
    def draw(state: np.ndarray) -> np.ndarray:
        return _picture("MountainCarContinuous-v0", [state["position"], state["speed"]])


class Pendulum(CompiledEnv):
    """Pendulum-v1."""

    observation_space = _box(1, 1, 8)
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
    max_episode_steps = 200
    fields: ClassVar = {"angle": float, "speed": float}
    options: ClassVar = {"g": 10.0}

    @staticmethod
    def reset(state: Any) -> None:
        state.angle = uniform(state, -_PI, _PI)
        state.speed = uniform(state, -1.0, 1.0)

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        torque = min(max(action[0], _f(-2)), _f(2))
        turned = ((state.angle + _PI) % (2 * _PI)) - _PI
        cost = turned * turned + 0.1 * (state.speed * state.speed) + _f(0.001) * (torque * torque)
        speed = state.speed + (3 * state.g / 2.0 * sin(state.angle) + _f(3) * torque) * 0.05
        state.speed = min(max(speed, -8.0), 8.0)
        state.angle = state.angle + state.speed * 0.05
        return -cost, False

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[0], out[1], out[2] = cos(state.angle), sin(state.angle), state.speed

    @staticmethod
    def draw(state: np.ndarray) -> np.ndarray:
        return _picture("Pendulum-v1", [state["angle"], state["speed"]])
