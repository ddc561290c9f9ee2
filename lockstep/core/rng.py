"""Counter-based randomness: a stream is a pure function of (seed, purpose, indices)."""

from __future__ import annotations

import hashlib

import numpy as np


def _key(seed: int, purpose: str, indices: tuple[int, ...]) -> int:
    text = f"lockstep/{seed}/{purpose}/" + "/".join(map(str, indices))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """A generator for one purpose and place, such as `stream(1, "action", shard, rollout)`."""
    return np.random.Generator(np.random.Philox(key=_key(seed, purpose, indices)))


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 31-bit seed for a library that takes an integer."""
    return _key(seed, purpose, indices) & 0x7FFF_FFFF
