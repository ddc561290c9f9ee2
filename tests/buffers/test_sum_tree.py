from __future__ import annotations

import numpy as np
import pytest

from lockstep.buffers.sum_tree import SumTree


def scan(priorities: np.ndarray, wanted: float) -> int:
    """The slow way: add up from the left."""
    total = 0.0
    for item, priority in enumerate(priorities):
        total += priority
        if wanted < total:
            return item
    raise AssertionError("beyond the total")


def test_by_hand() -> None:
    tree = SumTree(5)
    tree.set(np.array([0, 1, 2, 4]), np.array([1.0, 0.0, 2.0, 4.0]))
    assert tree.total == 7.0
    assert tree.find(np.array([0.0, 0.99, 1.0, 2.99, 3.0, 6.99])).tolist() == [0, 0, 2, 2, 4, 4]
    tree.set(np.array([2, 3, 2]), np.array([9.0, 1.0, 3.0]))
    assert tree[np.array([2, 3])].tolist() == [3.0, 1.0]
    assert tree.total == 9.0


@pytest.mark.parametrize("size", [1, 2, 3, 64, 100])
def test_against_a_scan_over_many_random_operations(size: int) -> None:
    draw, tree, priorities = np.random.default_rng(size), SumTree(size), np.zeros(size)
    for _ in range(4_000):
        items = draw.integers(0, size, draw.integers(1, 5))
        # Whole numbers have exact sums, so that both ways must agree on every border.
        values = draw.integers(0, 4, len(items)).astype(float)
        tree.set(items, values)
        priorities[items] = values
        assert tree.total == priorities.sum()
        if tree.total:
            wanted = float(draw.integers(0, int(tree.total)))
            assert tree.find(np.array([wanted]))[0] == scan(priorities, wanted)


def test_items_of_priority_zero_are_never_found() -> None:
    draw, tree = np.random.default_rng(1), SumTree(1000)
    priorities = draw.random(1000) * (draw.random(1000) < 0.05)
    tree.set(np.arange(1000), priorities)
    sums = np.append(draw.random(50_000) * tree.total, np.nextafter(tree.total, 0))
    assert (priorities[tree.find(sums)] > 0).all()


def test_frequencies_are_the_priorities() -> None:
    draw, tree = np.random.default_rng(2), SumTree(6)
    priorities = np.array([1.0, 5.0, 0.0, 2.0, 0.5, 1.5])
    tree.set(np.arange(6), priorities)
    counts = np.bincount(tree.find(draw.random(100_000) * tree.total), minlength=6)
    np.testing.assert_allclose(counts / 100_000, priorities / priorities.sum(), atol=0.005)


def test_sums_depend_on_the_present_priorities_alone() -> None:
    draw, first, second = np.random.default_rng(3), SumTree(500), SumTree(500)
    final = draw.random(500)
    for _ in range(200):
        first.set(draw.integers(0, 500, 40), draw.random(40))
    for items in np.array_split(draw.permutation(500), 7):
        first.set(items, final[items])
    second.set(np.arange(500), final)
    # Items are found alike however close to the sum at which the next one begins: all inner sums are equal.
    sums = (final.cumsum()[:-1, None] + np.arange(-50, 51) * np.spacing(final.sum())).reshape(-1)
    assert first.total == second.total and np.array_equal(first.find(sums), second.find(sums))


@pytest.mark.parametrize("size", [7, 300, 5000])
def test_sums_have_the_bits_of_numpy(size: int) -> None:
    tree, level = SumTree(size), np.random.default_rng(size).random(size)
    tree.set(np.arange(size), level)
    while len(level) > 1:
        level = np.append(level, np.zeros(-len(level) % 16)).reshape(-1, 16).sum(1)
    assert tree.total == level[0]
