"""Environments that ignore the policy's actions and take random ones, to measure speed without its influence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lockstep.config.settings import SettingsError
from lockstep.core.rng import stream
from lockstep.envs.base import Observation, ShardEnv, StepResult
from lockstep.models.action_spaces import action_parts, composite
from lockstep.models.gaussian import bounded

_CHUNK = 256
"""The number of steps whose actions are drawn at once."""


class RandomActions(ShardEnv):
    """A shard's environments with uniformly random actions instead of the policy's.

    The speed of an environment depends on the policy: a better one makes some environments slower. Random actions make
    throughputs comparable before anything is learned (Petrenko et al. 2020, arXiv:2006.11751, appendix A.1.2).
    """

    def __init__(self, env: ShardEnv, seed: int, first_index: int) -> None:
        observation = env.observation_space
        if isinstance(observation, spaces.Dict) and "action_mask" in observation.spaces:
            raise SettingsError(
                "Random actions (env.random_actions, or bench --tasks) would include those that this environment "
                "forbids at some steps (its observation has an action_mask). Use --env.no-random-actions, or "
                "leave --tasks out."
            )
        self._env, self._seed, self._first_index = env, seed, first_index
        self.num_envs, self.frames_per_step = env.num_envs, env.frames_per_step
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._steps = 0
        self._drawn: tuple[np.ndarray, ...] = ()
        """Actions of the current chunk, [_CHUNK, B, ...], one array for each part of the action space."""

    def reset(self, out: Observation) -> None:
        self._steps = 0
        self._env.reset(out)

    def send(self, action: Any) -> None:
        del action
        t = self._steps % _CHUNK
        if t == 0 or not self._drawn:
            self._draw(self._steps // _CHUNK)
        self._steps += 1
        parts = tuple(part[t] for part in self._drawn)
        self._env.send(parts if composite(self.action_space) else parts[0])  # type: ignore[arg-type]

    def recv(self, out: Observation) -> StepResult:
        return self._env.recv(out)

    def offer(self, options: dict[str, Any]) -> None:
        self._env.offer(options)

    def reseed_due(self) -> bool:
        return self._env.reseed_due()

    def reseed(self, out: Observation) -> None:
        self._env.reseed(out)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {**self._env.state_dict(), "random_actions": np.array(self._steps)}

    def load_state_dict(
        self, state: dict[str, np.ndarray], out: Observation, heartbeat: Callable[[], None] = lambda: None
    ) -> int:
        state = dict(state)
        self._steps, self._drawn = int(state.pop("random_actions")), ()
        return self._env.load_state_dict(state, out, heartbeat)

    def render(self, index: int = 0) -> np.ndarray:
        return self._env.render(index)

    def close(self) -> None:
        self._env.close()

    def _draw(self, chunk: int) -> None:
        streams = [stream(self._seed, "random action", self._first_index + j, chunk) for j in range(self.num_envs)]
        self._drawn = tuple(
            np.stack([_sample(part, draw) for draw in streams], 1) for part in action_parts(self.action_space)
        )


def _sample(space: gymnasium.Space[Any], draw: np.random.Generator) -> np.ndarray:
    """One environment's actions, [_CHUNK, *action]; unbounded numbers are standard normal."""
    if isinstance(space, spaces.Discrete):
        return draw.integers(0, space.n, _CHUNK) + space.start
    if isinstance(space, spaces.MultiDiscrete):
        return (draw.integers(0, space.nvec, (_CHUNK, *space.shape)) + space.start).astype(space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return draw.integers(0, 2, (_CHUNK, *space.shape)).astype(space.dtype)
    assert isinstance(space, spaces.Box)
    if bounded(space):
        return draw.uniform(space.low, space.high, (_CHUNK, *space.shape)).astype(space.dtype)
    normal = draw.standard_normal((_CHUNK, *space.shape))
    return np.clip(normal, space.low, space.high).astype(space.dtype)
