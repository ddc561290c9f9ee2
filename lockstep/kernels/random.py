"""Random numbers for Numba kernels, with identical bits on every CPU.

The generator is SplitMix64 (Steele, Lea and Flood 2014), which mixes the bits of a counter. The counter is the field
`random` (uint64) of a record, so whoever saves the record saves the generator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.kernels.instructions import scalar
from lockstep.kernels.math import ndtri

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT = np.uint64(30), np.uint64(27), np.uint64(31)
_TO_53, _TO_23, _TO_32 = np.uint64(11), np.uint64(41), np.uint64(32)


@scalar
def mix(x: Any) -> Any:
    """64 bits that depend on all bits of a uint64; another result for every x."""
    x = (x ^ (x >> _SHIFT[0])) * _MIX[0]
    x = (x ^ (x >> _SHIFT[1])) * _MIX[1]
    return x ^ (x >> _SHIFT[2])


@scalar
def derive(key: Any, count: Any) -> Any:
    """A uint64 for each whole number, to begin independent sequences from one key (uint64)."""
    return mix(mix(key) + np.uint64(count) * _STEP)


@scalar
def bits(state: Any) -> Any:
    """The next 64 random bits, uint64."""
    state.random = state.random + _STEP
    return mix(state.random)


@scalar
def uniform(state: Any, low: Any, high: Any) -> Any:
    """The next random float64, at least low and below high."""
    return low + (high - low) * (np.int64(bits(state) >> _TO_53) * 2.0**-53)


@scalar
def integer(state: Any, count: Any) -> Any:
    """The next random whole number from 0 to count - 1, for a count of at most 2**31. Numbers are equally probable to
    within count / 2**32."""
    return (np.int64(bits(state) >> _TO_32) * np.int64(count)) >> 32


@scalar
def normal(state: Any) -> Any:
    """The next random number of a standard normal distribution, a float64 with the precision of float32."""
    p = np.float32(np.int64(bits(state) >> _TO_23)) * np.float32(2.0**-23) + np.float32(2.0**-24)
    return np.float64(ndtri(p))
