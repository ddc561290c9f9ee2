"""The random numbers of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lockstep.kernels import random


@njit
def draw(states: Any, uniform: Any, integer: Any, normal: Any) -> None:
    state = states[0]
    for i in range(len(uniform)):
        uniform[i] = random.uniform(state, -2.0, 3.0)
        integer[i] = random.integer(state, 7)
        normal[i] = random.normal(state)


@njit
def derived(key: Any, count: Any) -> Any:
    return random.derive(key, count)


def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    states = np.zeros(1, [("random", np.uint64)])
    states["random"] = seed
    out = np.empty(count), np.empty(count, np.int64), np.empty(count)
    draw(states, *out)
    return out


def test_the_generator_is_splitmix64() -> None:
    @njit
    def first(states: Any) -> Any:
        return random.bits(states[0]), random.bits(states[0])

    states = np.zeros(1, [("random", np.uint64)])
    states["random"] = 1234567
    assert first(states) == (6457827717110365317, 3203168211198807973)


def test_distributions_are_as_they_say() -> None:
    uniform, integer, normal = drawn(5, 200_000)
    assert uniform.min() >= -2 and uniform.max() < 3
    assert abs(uniform.mean() - 0.5) < 0.02 and abs(uniform.std() - 5 / 12**0.5) < 0.02
    counts = np.bincount(integer, minlength=7)
    assert len(counts) == 7 and abs(counts / 200_000 - 1 / 7).max() < 0.004
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 1) < 0.01
    assert abs((np.abs(normal) < 1.96).mean() - 0.95) < 0.003
    assert abs(np.corrcoef([uniform, integer, normal]) - np.eye(3)).max() < 0.01


def test_seeds_decide_and_differ() -> None:
    assert all(np.array_equal(a, b) for a, b in zip(drawn(1, 50), drawn(1, 50), strict=True))
    assert not np.array_equal(drawn(1, 50)[0], drawn(2, 50)[0])
    seeds = {derived(np.uint64(key), count) for key in range(50) for count in range(50)}
    assert len(seeds) == 2_500
