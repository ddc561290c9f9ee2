"""Particle worlds of MPE (Lowe et al. 2017, https://arxiv.org/abs/1706.02275) for the adapter `compiled`.

They follow mpe2 step by step with discrete actions, also in float64. Only the exponential of a contact is computed by
lockstep's function, so speeds of agents that touch differ by up to 1e-8.

In mpe2, an agent moves with its velocity before the step, so a force only moves it in the next step. In the original
MPE, and in PettingZoo before version 1.23 (https://github.com/Farama-Foundation/PettingZoo/pull/970), it moves with its
velocity after the step. The classes of former versions do this, because published returns come from them.

Shape legend: N agents.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from lockstep.envs.compiled import CompiledEnv
from lockstep.kernels.cache import part
from lockstep.kernels.instructions import sqrt
from lockstep.kernels.math import softplus
from lockstep.kernels.random import integer, uniform

_STEP, _DAMPING, _CONTACT, _MARGIN, _SENSITIVITY = 0.1, 0.25, 1e2, 1e-3, 5.0
_SPREAD = 3
_WIDE = 0.15 + 0.15
_COLORS = np.array([[0.65, 0.15, 0.15], [0.15, 0.65, 0.15], [0.15, 0.15, 0.65]])


def _vectors(count: int) -> tuple[Any, tuple[int, int]]:
    """The type of a field with this many vectors of two numbers."""
    return np.float64, (count, 2)


def _numbers(count: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (count,), np.float32)


@part
def _place(state: Any, positions: Any) -> None:
    """Draw positions."""
    for i in range(len(positions)):
        for d in range(2):
            positions[i, d] = uniform(state, -1.0, 1.0)


@part
def _push(action: Any, force: Any) -> None:
    """Write the force [2] of an action: none, left, right, down, up."""
    force[0] = force[1] = 0.0
    if action > 0:
        force[(action - 1) // 2] = -_SENSITIVITY if action % 2 else _SENSITIVITY


@part
def _move(positions: Any, velocities: Any) -> None:
    """Move bodies by one step. Arguments are [N, 2] each."""
    for i in range(len(positions)):
        for d in range(2):
            positions[i, d] += velocities[i, d] * _STEP


@part
def _accelerate(velocities: Any, forces: Any) -> None:
    """Change velocities by the forces on bodies of mass 1 during a step. Arguments are [N, 2] each."""
    for i in range(len(velocities)):
        for d in range(2):
            velocities[i, d] = velocities[i, d] * (1 - _DAMPING) + forces[i, d] / 1.0 * _STEP


@part
def _distance(a: Any, b: Any) -> Any:
    """The distance between two positions [2]."""
    x, y = a[0] - b[0], a[1] - b[1]
    return sqrt(x * x + y * y)


@part
def _collide(positions: Any, forces: Any) -> None:
    """Add the contact forces between agents. Arguments are [N, 2] each."""
    for a in range(len(positions)):
        for b in range(a + 1, len(positions)):
            distance = _distance(positions[a], positions[b])
            inside = -(distance - _WIDE) / _MARGIN
            depth = (max(inside, 0.0) + np.float64(softplus(np.float32(-abs(inside))))) * _MARGIN
            for d in range(2):
                force = _CONTACT * (positions[a, d] - positions[b, d]) / distance * depth
                forces[a, d] += force
                forces[b, d] -= force


@part
def _write(out: Any, place: Any, vector: Any, origin: Any) -> Any:
    """Write a vector [2] relative to an origin into out, and return the next place."""
    out[place], out[place + 1] = vector[0] - origin[0], vector[1] - origin[1]
    return place + 2


@part
def _push_apart(state: Any, action: Any) -> None:
    """Write the forces on the agents of simple_spread."""
    for i in range(_SPREAD):
        _push(action[i], state.force[i])
    _collide(state.position, state.force)


@part
def _reward_spread(state: Any) -> None:
    """Write the rewards of simple_spread."""
    common = 0.0
    for k in range(_SPREAD):
        nearest = np.inf
        for i in range(_SPREAD):
            nearest = min(nearest, _distance(state.position[i], state.landmark[k]))
        common -= nearest
    for i in range(_SPREAD):
        own = 0.0
        for j in range(_SPREAD):
            if j != i and _distance(state.position[i], state.position[j]) < _WIDE:
                own -= 1.0
        state.reward[i] = common * (1 - state.local_ratio) + own * state.local_ratio


class SimpleSpread(CompiledEnv):
    """simple_spread_v3: three agents cover three landmarks and avoid collisions."""

    agents = ("agent_0", "agent_1", "agent_2")
    observation_space = _numbers(6 * _SPREAD)
    action_space = spaces.Discrete(5)
    max_episode_steps = 25
    fields: ClassVar = {
        **{name: _vectors(_SPREAD) for name in ("position", "velocity", "landmark", "force")},
        "reward": (np.float64, (_SPREAD,)),
    }
    options: ClassVar = {"local_ratio": 0.5}

    @staticmethod
    def reset(state: Any) -> None:
        _place(state, state.position)
        _place(state, state.landmark)
        state.velocity[:] = 0.0

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        _push_apart(state, action)
        _move(state.position, state.velocity)
        _accelerate(state.velocity, state.force)
        _reward_spread(state)
        return state.reward, False

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[:] = 0  # the last numbers are messages, and these agents send none
        for i in range(_SPREAD):
            out[i, 0], out[i, 1] = state.velocity[i, 0], state.velocity[i, 1]
            out[i, 2], out[i, 3] = state.position[i, 0], state.position[i, 1]
            place = 4
            for k in range(_SPREAD):
                place = _write(out[i], place, state.landmark[k], state.position[i])
            for j in range(_SPREAD):
                if j != i:
                    place = _write(out[i], place, state.position[j], state.position[i])


class FormerSpread(SimpleSpread):
    """simple_spread_v2: a force moves an agent in the same step."""

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        _push_apart(state, action)
        _accelerate(state.velocity, state.force)
        _move(state.position, state.velocity)
        _reward_spread(state)
        return state.reward, False


@part
def _say_and_push(state: Any, action: Any) -> None:
    """Store the speaker's message, and write the force on the listener."""
    state.word = min(action[0], 2)
    _push(action[1], state.force[0])


@part
def _reward_listener(state: Any) -> Any:
    """The reward of both agents of simple_speaker_listener."""
    x = state.position[0, 0] - state.landmark[state.goal, 0]
    y = state.position[0, 1] - state.landmark[state.goal, 1]
    return -(x * x + y * y)


class SimpleSpeakerListener(CompiledEnv):
    """simple_speaker_listener_v4: one agent tells another which landmark to approach.

    Both have the same spaces, so that one policy can play both. The speaker's three numbers are padded with zeros to
    the listener's eleven, and its actions 2 to 4 are the same message. Two more numbers tell which agent observes.
    """

    agents = ("speaker_0", "listener_0")
    observation_space = _numbers(13)
    action_space = spaces.Discrete(5)
    max_episode_steps = 25
    fields: ClassVar = {
        **{name: _vectors(1) for name in ("position", "velocity", "force")},
        **{"landmark": _vectors(3), "goal": int, "word": int},
    }
    """`word` is the speaker's message, or -1 before the first."""

    @staticmethod
    def reset(state: Any) -> None:
        state.goal, state.word = integer(state, 3), -1
        _place(state, state.position)
        _place(state, state.landmark)
        state.velocity[:] = 0.0

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        _say_and_push(state, action)
        _move(state.position, state.velocity)
        _accelerate(state.velocity, state.force)
        reward = _reward_listener(state)
        return (reward, reward), False

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        out[:] = 0
        for c in range(3):
            out[0, c] = _COLORS[state.goal, c]
        out[1, 0], out[1, 1] = state.velocity[0, 0], state.velocity[0, 1]
        place = 2
        for k in range(3):
            place = _write(out[1], place, state.landmark[k], state.position[0])
        if state.word >= 0:
            out[1, place + state.word] = 1.0
        out[0, 11] = out[1, 12] = 1.0


class FormerSpeakerListener(SimpleSpeakerListener):
    """simple_speaker_listener_v3: a force moves the listener in the same step."""

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        _say_and_push(state, action)
        _accelerate(state.velocity, state.force)
        _move(state.position, state.velocity)
        reward = _reward_listener(state)
        return (reward, reward), False
