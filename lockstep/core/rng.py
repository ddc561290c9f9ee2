"""Counter-based random numbers. A stream is a pure function of (seed, purpose, indices)."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence


class _Key(ISeedSequence):
    """Gives Philox its key. With the argument `key`, Philox would draw a seed from the system first, which takes longer
    than everything else."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        words = np.frombuffer(self._key, np.dtype(dtype).newbyteorder("<"))
        assert len(words) == n_words
        return words.astype(dtype)


def _key(seed: int, purpose: str, indices: tuple[int, ...]) -> bytes:
    text = f"lockstep/{seed}/{purpose}/" + "/".join(map(str, indices))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def stream(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """A generator for one purpose and place, such as `stream(1, "action", shard, rollout)`."""
    return np.random.Generator(np.random.Philox(_Key(_key(seed, purpose, indices))))  # type: ignore[reportArgumentType]


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 31-bit seed for a library that takes an integer."""
    return int.from_bytes(_key(seed, purpose, indices), "little") & 0x7FFF_FFFF
