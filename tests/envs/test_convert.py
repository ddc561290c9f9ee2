"""Observations of every space in the form that models take."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lockstep.config.settings import SettingsError
from lockstep.envs.convert import ObservationWriter

IMAGE = np.arange(2 * 5 * 6 * 3, dtype=np.uint8).reshape(2, 5, 6, 3)


@pytest.mark.parametrize(
    ("space", "batch", "expected"),
    [
        (spaces.Box(-1, 1, (2,), np.float64), np.array([[0.1, 0.2]]), np.array([[0.1, 0.2]], np.float32)),
        (spaces.Box(-9, 9, (), np.float64), np.array([3.0, 4.0]), np.array([[3], [4]], np.float32)),
        (spaces.Box(0, 255, (3,), np.uint8), np.array([[1, 2, 255]], np.uint8), np.array([[1, 2, 255]], np.float32)),
        (spaces.Box(0, 255, (5, 6, 3), np.uint8), IMAGE, IMAGE.transpose(0, 3, 1, 2)),
        (spaces.Box(0, 255, (4, 5, 6), np.uint8), np.ones((1, 4, 5, 6), np.uint8), np.ones((1, 4, 5, 6), np.uint8)),
        (spaces.Box(0, 255, (5, 6), np.uint8), IMAGE[..., 0], IMAGE[..., 0][:, None]),
        (
            spaces.Box(0, 255, (2, 5, 6, 3), np.uint8),
            IMAGE[None],
            np.concatenate([IMAGE[0].transpose(2, 0, 1), IMAGE[1].transpose(2, 0, 1)])[None],
        ),
        (spaces.Discrete(3, start=4), np.array([4, 6]), np.array([[1, 0, 0], [0, 0, 1]], np.float32)),
        (spaces.MultiDiscrete([2, 3]), np.array([[1, 0]]), np.array([[0, 1, 1, 0, 0]], np.float32)),
        (spaces.MultiBinary(3), np.array([[1, 0, 1]], np.int8), np.array([[1, 0, 1]], np.float32)),
    ],
    ids=lambda value: str(value) if isinstance(value, spaces.Space) else "",
)
def test_conversions(space: spaces.Space, batch: np.ndarray, expected: np.ndarray) -> None:
    writer = ObservationWriter(space)
    for listed in (False, True):
        out = np.full((len(batch), *writer.space.shape), 77, writer.space.dtype)  # type: ignore[misc]
        writer.write_list(list(batch), out) if listed else writer.write(batch, out)
        assert np.array_equal(out, expected) and out.dtype == expected.dtype
    assert writer.space.contains(out[0])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 1, (2, 2, 3), np.uint8),
        spaces.Box(0, 1, (2, 2, 3), np.int8),
        spaces.MultiBinary((2, 2, 3)),
        spaces.MultiDiscrete(np.full((2, 2, 3), 2)),
    ],
)
def test_an_action_mask_is_no_image_and_keeps_its_order(space: spaces.Space) -> None:
    writer = ObservationWriter(spaces.Dict({"action_mask": space, "seen": spaces.Discrete(2)}))
    mask = (np.arange(12).reshape(2, 2, 3) % 5 == 1).astype(np.int8)
    out = {key: np.zeros((1, *part.shape), part.dtype) for key, part in writer.space.items()}  # type: ignore[union-attr]
    writer.write_list([{"action_mask": mask, "seen": 1}], out)
    assert np.flatnonzero(out["action_mask"]).tolist() == [1, 6, 11]


def test_nested_spaces_become_one_flat_dict() -> None:
    inner = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (1,), np.float32)})
    writer = ObservationWriter(spaces.Tuple((inner, spaces.Box(0, 1, (2,), np.float32))))
    assert isinstance(writer.space, spaces.Dict)
    assert {key: space.shape for key, space in writer.space.items()} == {"0.a": (2,), "0.b": (1,), "1": (2,)}
    out = {key: np.zeros((2, *space.shape), np.float32) for key, space in writer.space.items()}  # type: ignore[misc]
    single = ({"a": 1, "b": np.array([0.5], np.float32)}, np.array([0.1, 0.2], np.float32))
    writer.write_list([single, single], out)
    assert np.array_equal(out["0.a"], [[0, 1], [0, 1]]) and np.array_equal(out["0.b"], [[0.5], [0.5]])
    assert np.array_equal(out["1"], np.array([[0.1, 0.2]] * 2, np.float32))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((7, 7, 20), (20, 7, 7)),
        ((4, 4, 16), (16, 4, 4)),
        ((4, 3, 64, 64), (12, 64, 64)),
        ((4, 84, 84, 1), (4, 84, 84)),
        ((84, 84, 12), (12, 84, 84)),
        ((64, 64, 2), (2, 64, 64)),
        ((64, 48, 9), (9, 64, 48)),
        ((32, 10, 8), (32, 10, 8)),
        ((210, 160, 3), (3, 210, 160)),
        ((12, 84, 84), (12, 84, 84)),
        ((12, 64, 48), (12, 64, 48)),
        ((4, 84, 84), (4, 84, 84)),
        ((10, 10, 10), (10, 10, 10)),
    ],
)
def test_channels_are_found(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert ObservationWriter(spaces.Box(0, 255, shape, np.uint8)).space.shape == expected


def test_observations_of_another_shape_than_declared_are_refused() -> None:
    writer = ObservationWriter(spaces.Dict({"map": spaces.Box(0, 255, (3, 6, 4), np.uint8)}))
    out = {"map": np.zeros((1, 3, 6, 4), np.uint8)}
    for found in ((6, 4, 3), (3, 6, 5)):
        with pytest.raises(SettingsError, match=rf"observation 'map' .* shape \({found[0]}, .* says \(3, 6, 4\)"):
            writer.write_list([{"map": np.zeros(found, np.uint8)}], out)
        with pytest.raises(SettingsError, match="observation 'map'"):
            writer.write({"map": np.zeros((1, *found), np.uint8)}, out)
    scalar = ObservationWriter(spaces.Box(-1, 1, (2,), np.float32))
    scalar.write_list([np.ones((2, 1), np.float32)], np.zeros((1, 2), np.float32))  # an axis of one is no matter


def test_entries_of_one_name_are_refused() -> None:
    inner = spaces.Dict({"b": spaces.Discrete(2)})
    with pytest.raises(SettingsError, match=r"would be called 'a\.b'"):
        ObservationWriter(spaces.Dict({"a": inner, "a.b": spaces.Discrete(3)}))


@pytest.mark.parametrize(
    ("space", "batch", "told"),
    [
        (spaces.Discrete(3, start=4), np.array([4, 7]), r"is 7, .* Discrete\(3, start=4\) does not contain"),
        (spaces.MultiDiscrete([2, 3]), np.array([[1, 2], [2, 0]]), r"is \[2 0\], .* does not contain"),
    ],
)
def test_a_number_that_the_space_lacks_is_refused(space: gymnasium.Space, batch: np.ndarray, told: str) -> None:
    """Written as zeros it would be an observation like any other."""
    writer = ObservationWriter(space)
    out = np.zeros((2, *writer.space.shape), np.float32)  # type: ignore[misc]
    with pytest.raises(SettingsError, match=told):
        writer.write(batch, out)
    with pytest.raises(SettingsError, match=told):
        writer.write_list(list(batch), out)


DICT = spaces.Dict({"image": spaces.Box(0, 255, (4, 4, 3), np.uint8), "vector": spaces.Box(-1, 1, (2,), np.float32)})
GOOD = {"image": np.zeros((4, 4, 3), np.uint8), "vector": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({**GOOD, "vector": np.zeros(3)}, r"'vector' of the environment has the shape \(3,\).*says \(2,\)"),
        ({**GOOD, "image": np.zeros((4, 4), np.uint8)}, r"'image' .* has the shape \(4, 4\).*says \(4, 4, 3\)"),
        ({"image": GOOD["image"]}, "'vector' of the environment is missing: there are image"),
        (None, "'image' of the environment is missing: there is None"),
        ({**GOOD, "image": np.zeros((4, 4, 3))}, "'image' of the environment is of type float64.*uint8.*observation 1"),
        ({**GOOD, "vector": [[0.0], [1.0, 2.0]]}, "'vector' of the environment cannot be read .*inhomogeneous"),
        ({**GOOD, "vector": [0.0, "x"]}, "'vector' of the environment is of type <U.*float32.*observation 1"),
    ],
)
def test_one_observation_unlike_its_space_is_explained(bad: Any, words: str) -> None:
    writer = ObservationWriter(DICT)
    assert isinstance(writer.space, spaces.Dict)
    out = {key: np.zeros((2, *space.shape), space.dtype) for key, space in writer.space.items()}  # type: ignore[misc]
    writer.write_list([GOOD, GOOD], out)
    with pytest.raises(SettingsError, match=words):
        writer.write_list([GOOD, bad], out)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "subtracted"),
    [
        (1.7e9, 1.7e9 + 100, np.float64, 1.7e9 + 50),
        (1_700_000_000, 1_700_000_100, np.int64, 1.7e9 + 50),
        (-(10**6), -(10**6) + 2, np.float64, -(10**6) + 1),
        (0, 1.7e9, np.float64, 0),
        (-np.inf, np.inf, np.float64, 0),
        (1.7e9, np.inf, np.float64, 0),
        (100, 101, np.float64, 0),
        (70_000, 70_010, np.float32, 0),
    ],
)
def test_numbers_far_from_0_within_close_bounds_are_written_from_the_middle(
    low: float, high: float, dtype: Any, subtracted: float
) -> None:
    entry = spaces.Box(low, high, (2,), dtype)
    writer, out = ObservationWriter(entry), np.zeros((1, 2), np.float32)
    begin = 70_000 if np.isinf(low) else low
    seen = np.array([begin, begin + 60], dtype)
    writer.write_list([seen], out)
    np.testing.assert_array_equal(out[0], (seen - subtracted).astype(np.float32))
    writer.write(seen[None], out)
    np.testing.assert_array_equal(out[0], (seen - subtracted).astype(np.float32))


def test_only_those_numbers_move_that_need_to_and_goals_never_do() -> None:
    tight = spaces.Box(np.array([1.7e9, 0]), np.array([1.7e9 + 2, 1]), dtype=np.float64)
    writer = ObservationWriter(spaces.Dict(clock=tight, desired_goal=tight))
    out = {name: np.zeros((1, 2), np.float32) for name in ("clock", "desired_goal")}
    x = np.array([1.7e9 + 2, 0.5])
    writer.write_list([{"clock": x, "desired_goal": x}], out)
    assert out["clock"].tolist() == [[1, 0.5]]
    assert out["desired_goal"].tolist() == [[float(np.float32(1.7e9)), 0.5]]
