"""Tools for adapters to repeat episodes: the episodes' seeds, and a log of the actions since."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.core.rng import derive_seed, stream


class Seeds:
    """The seeds of one shard's environments. They depend on (seed, purpose, global index, number of seeded resets)."""

    def __init__(self, seed: int, purpose: str, first_index: int) -> None:
        self._seed, self._purpose, self.first_index = seed, purpose, first_index

    def of(self, first_index: int) -> Seeds:
        """The seeds of other environments of the run, for the same purpose."""
        return Seeds(self._seed, self._purpose, first_index)

    def derive(self, index: np.ndarray, count: np.ndarray) -> np.ndarray:
        """One seed for each given environment of the shard, int64.

        Args:
            index: the environments' places in the shard.
            count: the number of earlier seeded resets of each.
        """
        return np.array(
            [
                derive_seed(self._seed, f"env-{self._purpose}", self.first_index + int(j), int(n))
                for j, n in zip(index, count, strict=True)
            ],
            np.int64,
        )

    def stream(self, name: str, index: int, count: int) -> np.random.Generator:
        """A random generator for one environment of the shard, after `count` seeded resets."""
        return stream(self._seed, f"{name}-{self._purpose}", self.first_index + index, count)

    def first_lengths(self, num_envs: int, decorrelate: int) -> np.ndarray:
        """Steps after which the first episode of each environment is cut, int64 [B]; 0 for never."""
        if not decorrelate:
            return np.zeros(num_envs, np.int64)
        return np.array(
            [
                stream(self._seed, f"decorrelate-{self._purpose}", self.first_index + j).integers(1, decorrelate + 1)
                for j in range(num_envs)
            ]
        )


class ActionLog:
    """The actions of a shard's latest steps, from which its environments can be rebuilt."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        """[capacity, B, ...] for each component of the action; the first `_length` steps are filled."""
        self._length = 0

    def append(self, action: tuple[np.ndarray, ...], needed: np.ndarray | None = None) -> None:
        """Add one step.

        Args:
            needed: [B], the number of earlier steps of each environment since its seeded reset; None keeps all steps.
        """
        if not self._parts:
            self._parts = [np.empty((1024, *np.shape(part)), np.asarray(part).dtype) for part in action]
        capacity = len(self._parts[0])
        if self._length == capacity:
            keep = self._length if needed is None else int(needed.max())
            # Doubling keeps the cost of trimming per step constant.
            size = max(1024, 2 * keep)
            for i, part in enumerate(self._parts):
                self._parts[i] = np.empty((size, *part.shape[1:]), part.dtype)
                self._parts[i][:keep] = part[self._length - keep : self._length]
            self._length = keep
        for part, new in zip(self._parts, action, strict=True):
            part[self._length] = new
        self._length += 1

    def clear(self) -> None:
        self._parts, self._length = [], 0

    def last(self, count: int) -> dict[str, np.ndarray]:
        """The last `count` steps as arrays [count, B, ...], one for each component of the action. They are views, which
        remain valid: a step is written once, and a full log continues in new memory."""
        if not count:
            return {}
        return {f"actions.{i}": part[self._length - count : self._length] for i, part in enumerate(self._parts)}

    def load(self, state: dict[str, np.ndarray]) -> list[tuple[np.ndarray, ...]]:
        """Replace the log by the result of `last`; return its steps."""
        self._parts = [state[f"actions.{i}"] for i in range(sum(key.startswith("actions.") for key in state))]
        self._length = len(self._parts[0]) if self._parts else 0
        return list(zip(*self._parts, strict=True))


def episode_state(episode: np.ndarray, steps: np.ndarray, ended: np.ndarray, log: ActionLog) -> dict[str, np.ndarray]:
    """The state of B environments that Python steps, in this process or in others: the number of the episode, its steps
    and whether it has ended, [B] each, and the actions since the longest current episode began."""
    return {"episode": episode.copy(), "steps": steps.copy(), "ended": ended.copy(), **log.last(int(steps.max()))}


def joined(states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray] | None:
    """The state of one shard that consists of consecutive shards, given their states. Arrays without axes apply to all
    environments; others are [B, ...], and actions [T, B, ...]. None if the shards differ in arrays without axes."""
    first, *others = states
    if not others:
        return first
    for name, x in first.items():
        if not x.ndim and any(other[name] != x for other in others):
            return None
    return {
        name: np.concatenate([state[name] for state in states], _axis(name)) if x.ndim else x
        for name, x in first.items()
    }


def part(state: dict[str, np.ndarray], rows: slice) -> dict[str, np.ndarray]:
    """The inverse of joined: the state of the shard with these rows."""
    return {name: x[(slice(None),) * _axis(name) + (rows,)] if x.ndim else x for name, x in state.items()}


def _axis(name: str) -> int:
    """The axis of environments in an array of a state."""
    return 1 if name.startswith("actions.") else 0
