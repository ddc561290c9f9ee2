"""The base class of environments in torch: functions of a state whose tensors are on the policy's device.

Shape legend: B environments.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from torch import Tensor

State = dict[str, Tensor]
"""Tensors [B, ...] by name."""
_STEP = 0x9E3779B97F4A7C15
_MIX = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


class TorchEnv:
    """B environments as three functions of one state, a dict of tensors [B, ...]. On a GPU, a rollout stays there.

    `--env.id file.py:Name` calls Name(num_envs=B, device=…) with `env.options` as further arguments. The state contains
    everything that an environment remembers; attributes only contain constants. lockstep holds the state, decides when
    an episode begins and from which seed, and saves the state in checkpoints, so resuming replays nothing.

    The functions return new tensors and do not change their arguments. They compute row by row, with torch.where
    instead of `if`, and must not wait for the GPU: no item(), tolist(), nonzero(), x[mask] or `if` on a tensor, and no
    torch.tensor() of numbers, which belongs in the constructor. Then a step can be part of a CUDA graph. They run
    without gradients.

    An optional method `render(state, index)` returns a picture of one environment, uint8 [H, W, 3].
    """

    observation_space: gymnasium.Space[Any]
    """Of a single environment: a Box of float32 numbers or of uint8 pictures [C, H, W], or a Dict of these."""
    action_space: gymnasium.Space[Any]
    """Of a single environment: Discrete, MultiDiscrete, MultiBinary, or a Box of floats."""

    num_envs = 0
    """B, which __init__ sets."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.num_envs, self.device = num_envs, device

    def reset(self, seeds: Tensor) -> State:
        """The state of all environments at the start of an episode.

        lockstep calls it at every step and uses the rows of environments whose episode begins.

        Args:
            seeds: int64 [B], from 0 to 2**31 - 1. A seed determines all randomness of its episode. `uniform` draws
                random numbers; draw 0, its default, is for reset.
        """
        raise NotImplementedError

    def step(self, state: State, actions: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
        """Play one step in all environments. Results of environments that had ended before are discarded.

        Args:
            state: the state that reset or the last step returned. For random numbers, keep the seeds in it.
            actions: [B, ...], of the type that the space declares. The function may change them.

        Returns:
            The next state, rewards [B], terminated bool [B] and truncated bool [B].
        """
        raise NotImplementedError

    def observe(self, state: State) -> Any:
        """The observations of a state, [B, ...]; a dict of these if the space is a Dict."""
        raise NotImplementedError


def uniform(seeds: Tensor, count: int, low: float = 0.0, high: float = 1.0, *, draw: int | Tensor = 0) -> Tensor:
    """Random numbers from seeds alone: fp32 [B, count], on the device of the seeds, from low to below high. Unless low
    is 0, rounding may reach high.

    Row i depends only on seeds[i] and draw. The numbers are those of lockstep.envs.batch.uniform (SplitMix64; Steele,
    Lea and Flood 2014), cut to 24 bits.

    Args:
        seeds: int64 [B].
        count: numbers for each seed.
        draw: a number that distinguishes the draws of an episode: one for all rows, or int64 [B]. If reset draws with
            0, step needs other numbers, such as state["steps"] + 1.
    """
    keys = mixed(seeds) + (draw * signed(_STEP) if isinstance(draw, Tensor) else signed(draw * _STEP))
    places = torch.arange(1, count + 1, device=seeds.device)
    bits = mixed(mixed(keys).unsqueeze(-1) + places * signed(_STEP))
    return low + (high - low) * (_shifted(bits, 40).float() * 2.0**-24)


def episode_seeds(keys: Tensor, episode: Tensor) -> Tensor:
    """int64 [B], from 0 to 2**31 - 1: the seed of an episode.

    Args:
        keys: int64 [B], one for each environment.
        episode: int64 [B], the number of the episode.
    """
    return mixed(keys + episode * signed(_STEP)) & (2**31 - 1)


def mixed(x: Tensor) -> Tensor:
    """Mix the bits of each int64, so that each bit of the result depends on all of them."""
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * signed(factor)
    return x ^ _shifted(x, 31)


def signed(x: int) -> int:
    """An unsigned 64-bit number as int64 with the same bits."""
    return (x + 2**63) % 2**64 - 2**63


def _shifted(x: Tensor, count: int) -> Tensor:
    """int64 shifted right, with zeros from the left."""
    return (x >> count) & (2 ** (64 - count) - 1)
