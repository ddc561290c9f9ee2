"""What environments draw becomes uint8 [H, W, 3], or is refused by shape and type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.config.settings import SettingsError
from lockstep.envs.pictures import as_picture

COLORS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
GREY = COLORS[..., 0]
CLEAR = np.concatenate([COLORS, np.full((5, 7, 1), 255, np.uint8)], -1)


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        (COLORS, COLORS),
        (COLORS / 255, COLORS),
        ((COLORS / 255).astype(np.float32), COLORS),
        (COLORS.astype(np.float64), COLORS),
        (COLORS.astype(np.int64), COLORS),
        (COLORS.astype(np.uint16).tolist(), COLORS),
        ([np.zeros((5, 7, 3), np.uint8), COLORS], COLORS),
        ([np.zeros((9, 9, 3), np.uint8), COLORS], COLORS),
        (np.moveaxis(COLORS, -1, 0), COLORS),
        (GREY, GREY[..., None].repeat(3, -1)),
        (GREY[..., None], GREY[..., None].repeat(3, -1)),
        (GREY > 50, np.where(GREY > 50, 255, 0)[..., None].repeat(3, -1)),
        (CLEAR, COLORS),
        (np.zeros((5, 7, 4), np.uint8), np.full((5, 7, 3), 255)),
        (np.zeros((5, 7, 3)), np.zeros((5, 7, 3))),
    ],
)
def test_pictures_of_every_kind(drawn: Any, expected: np.ndarray) -> None:
    picture = as_picture(drawn)
    assert picture.dtype == np.uint8
    np.testing.assert_array_equal(picture, expected)


def test_half_transparent_colors_mix_with_white() -> None:
    drawn = np.full((2, 2, 4), [100, 0, 255, 51], np.uint8)  # opaque by a fifth
    assert as_picture(drawn)[0, 0].tolist() == [224, 204, 255]


@pytest.mark.parametrize(
    ("drawn", "named"),
    [
        (None, "None"),
        ("+---+", "a str"),
        (np.zeros((5, 7, 2), np.uint8), r"uint8 \[5, 7, 2\]"),
        (np.zeros(5, np.float32), r"float32 \[5\]"),
        (np.zeros((0, 7, 3), np.uint8), r"uint8 \[0, 7, 3\]"),
        (np.zeros((5, 7, 3), np.complex128), r"complex128 \[5, 7, 3\]"),
        (np.full((5, 7, 3), -1.0), r"float64 \[5, 7, 3\] .* -1 to -1"),
        (np.full((5, 7, 3), 300), r"int64 \[5, 7, 3\] .* 300 to 300"),
        (np.full((5, 7, 3), np.nan), "nan"),
        ([[1, 2], [3]], "a list"),
        ([], r"\[0\]"),
    ],
)
def test_what_is_no_picture_is_named(drawn: Any, named: str) -> None:
    with pytest.raises(SettingsError, match=f"{named}.*uint8, or of floats"):
        as_picture(drawn)
