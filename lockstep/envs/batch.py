"""The interface of batched environments: one object steps many copies of a task at once, with arrays or tensors.

Shape legend: B copies, which lockstep calls environments; n of them begin an episode.
"""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium
import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))


class BatchEnv(Protocol):
    """B environments in one object. Any class with these attributes will do; it need not inherit from this one.

    `--env.id file.py:Name` calls Name(num_envs=B, …) with `env.options` as further arguments. Results are numpy arrays
    or torch tensors on the CPU, nested as the space is. If `reset` returns tensors, actions are tensors, too.

    lockstep decides when an episode begins and from which seed. So `step` need not reset anything. It may continue an
    ended episode: results of such an environment are ignored until `reset` has begun its next episode.

    Further methods are optional. With `get_state() -> {name: array [B, ...]}` and `set_state(state)`, checkpoints
    contain the state, and resuming replays nothing. With `set_options(options)` as well, a curriculum can change
    options. They apply to episodes that `reset` begins from now on, so the state must contain the options of running
    episodes. `render(index)` returns a picture of one environment, [H, W, 3], and `close()` releases resources.
    """

    num_envs: int
    observation_space: gymnasium.Space[Any]
    """Of a single environment."""
    action_space: gymnasium.Space[Any]
    """Of a single environment."""

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Any:
        """Begin an episode in some environments, and leave the others as they are.

        Args:
            rows: int64 [n], their indices in ascending order.
            seeds: int64 [n], their seeds, from 0 to 2**31 - 1. They determine all randomness of the episodes.

        Returns:
            Their first observations, [n, ...].
        """
        ...

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Play one step in all environments.

        Args:
            actions: [B, ...]; a tuple or a dict of these if the space is a Tuple or a Dict.

        Returns:
            Observations [B, ...], rewards [B], terminated bool [B], truncated bool [B], and final observations. The
            last are None unless the simulator resets environments by itself. Then they are the last observations
            [B, ...] of environments that have ended; other rows are ignored. A sixth value may follow for env.metrics:
            a dict of numbers [B].
        """
        ...


def uniform(
    seeds: np.ndarray, count: int, low: float = 0.0, high: float = 1.0, *, draw: int | np.ndarray = 0
) -> np.ndarray:
    """Random numbers for a batch, without a generator for each environment: float64 [n, count], from low to below high.

    Row i depends on seeds[i] and draw alone, so an environment does not influence the others. The generator is
    SplitMix64 (Steele, Lea and Flood 2014).

    Args:
        seeds: whole numbers [n].
        count: numbers for each seed.
        draw: a number that distinguishes the draws of an episode, such as that of its step: one for all rows, or [n].
    """
    keys = _mixed(np.asarray(seeds).astype(np.uint64)) + np.asarray(draw).astype(np.uint64) * _STEP
    bits = _mixed(_mixed(keys)[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _STEP)
    return low + (high - low) * ((bits >> np.uint64(11)) * 2.0**-53)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mix the bits of each uint64, so that each bit of the result depends on all of them."""
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> np.uint64(31))
