"""The base class of compiled environments: functions of a state that Numba compiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from lockstep.config.settings import SettingsError


class CompiledEnv:
    """An environment as three functions of one state, which Numba compiles.

    `state` is a record with the fields that `fields` and `options` name. It contains everything that an environment
    remembers. It also has `state.random`, the generator for lockstep.kernels.random, and `state.steps`, the steps of
    the episode.

    With `agents`, an environment is a match in which N agents act at once. Each agent is a separate environment of the
    run, and all have these spaces. A match has one state, and it begins and ends for all agents at once.

    The functions may call functions that are decorated with `numba.njit`, and those of lockstep.kernels. For identical
    bits on every CPU, take exp, sin, … from lockstep.kernels.math, not from math or NumPy.
    """

    observation_space: ClassVar[spaces.Box]
    """float32 numbers, or a uint8 image [C, H, W]. With agents, a vector of float32 numbers [D]."""
    action_space: ClassVar[spaces.Space[Any]]
    """Discrete, MultiDiscrete, MultiBinary or Box."""
    agents: ClassVar[tuple[str, ...]] = ()
    """The names of the N agents of a match."""
    fields: ClassVar[Mapping[str, Any]]
    """The type of each field, such as float, np.int32, or (np.uint8, (10, 10)) for an array."""
    options: ClassVar[Mapping[str, bool | int | float]] = {}
    """The options that env.options may set, with their defaults. Each option is a field of the state, too."""
    max_episode_steps: ClassVar[int] = 0
    """Steps after which an episode is truncated; 0 for no limit. env.options may change it."""

    @staticmethod
    def reset(state: Any) -> None:
        """Begin an episode: set all fields but the options."""
        raise NotImplementedError

    @staticmethod
    def step(state: Any, action: Any) -> tuple[Any, Any]:
        """Play a step; return the reward and whether the episode has terminated. The action of a Discrete space is a
        number, and that of other spaces an array.

        With agents, the function gets the actions of all, [N, ...], and returns N rewards as a tuple or an array.
        """
        raise NotImplementedError

    @staticmethod
    def observe(state: Any, out: Any) -> None:
        """Write the observation into out, an array of the observation space; with agents, those of all into out
        [N, D]."""
        raise NotImplementedError

    @staticmethod
    def draw(state: np.ndarray) -> np.ndarray:
        """A picture of a state for videos, uint8 [H, W, 3]. This function is not compiled."""
        raise SettingsError("This environment draws no pictures. Define draw(state) in its class.")
