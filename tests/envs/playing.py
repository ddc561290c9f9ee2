"""Playing environments in tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces

from lockstep.config.user_code import look_for_files_in
from lockstep.envs import ShardEnv, StepResult


@contextlib.contextmanager
def user_file(factory: pytest.TempPathFactory, name: str, text: str) -> Iterator[None]:
    """A file of a user's, found from wherever environments are made."""
    folder = factory.mktemp("user")
    (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_USER_FILES", "")  # so that it is restored afterwards
        look_for_files_in(str(folder))
        yield


class Moment(NamedTuple):
    obs: dict[str, np.ndarray]
    step: StepResult


def buffers(env: ShardEnv) -> Any:
    def zeros(space: Any) -> np.ndarray:
        return np.zeros((env.num_envs, *space.shape), space.dtype)

    if isinstance(env.observation_space, spaces.Dict):
        return {key: zeros(space) for key, space in env.observation_space.spaces.items()}
    return zeros(env.observation_space)


def snapshot(out: Any) -> dict[str, np.ndarray]:
    return {key: value.copy() for key, value in out.items()} if isinstance(out, dict) else {"": out.copy()}


def random_actions(env: ShardEnv, steps: int, seed: int = 0) -> list[Any]:
    """Batches [B, ...] of random actions; environment j's depend on seed and j alone."""
    columns = []
    for j in range(env.num_envs):
        env.action_space.seed(1000 * seed + j)
        columns.append([env.action_space.sample() for _ in range(steps)])
    rows = zip(*columns)
    if isinstance(env.action_space, spaces.Tuple):
        return [tuple(np.stack(part) for part in zip(*row)) for row in rows]
    return [np.stack(row) for row in rows]


def reset(env: ShardEnv) -> dict[str, np.ndarray]:
    out = buffers(env)
    env.reset(out)
    return snapshot(out)


def play(env: ShardEnv, actions: list[Any]) -> list[Moment]:
    out = buffers(env)
    moments = []
    for action in actions:
        env.send(action)
        step = env.recv(out)
        moments.append(Moment(snapshot(out), StepResult(*(part.copy() for part in step if part is not None))))
    return moments


def assert_same(a: list[Moment], b: list[Moment], columns: slice = slice(None)) -> None:
    """All of b equals the given environments of a, bit for bit."""
    assert len(a) == len(b)
    for t, (x, y) in enumerate(zip(a, b)):
        for name, left, right in zip(StepResult._fields, x.step[:5], y.step[:5]):
            assert np.array_equal(left[columns], right), f"{name} differs at step {t}"
        for key in x.obs:
            assert np.array_equal(x.obs[key][columns], y.obs[key]), f"observation {key!r} differs at step {t}"


def equal(a: list[Moment], b: list[Moment]) -> bool:
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True


def play_legally(env: ShardEnv, steps: int, first: int = 0) -> tuple[list[Any], list[Moment]]:
    """Random actions that the masks allow, and what they lead to; environment j's depend on its global index."""
    out = buffers(env)
    env.reset(out)
    draws = [np.random.default_rng(first + j) for j in range(env.num_envs)]
    actions, moments = [], []
    for _ in range(steps):
        allowed = out["action_mask"] if isinstance(out, dict) else np.ones((env.num_envs, env.action_space.n))  # type: ignore[attr-defined]
        actions.append(np.array([draw.choice(np.flatnonzero(row)) for draw, row in zip(draws, allowed)]))
        env.send(actions[-1])
        step = env.recv(out)
        moments.append(Moment(snapshot(out), type(step)(*(part.copy() for part in step[:5]))))
    return actions, moments
