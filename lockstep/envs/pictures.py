"""Converts the results of environments' render to images for videos."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError

_ALLOWED = (
    "Let it return an array [H, W, 3] (or [H, W], [H, W, 1], or [H, W, 4] with transparency) of uint8, or of floats "
    "from 0 to 1."
)
_COUNTS = (1, 3, 4)
"""Channels of a grey image, a color image, and an image with transparency."""
_ROUNDING = 1e-3
"""How far floats may be outside 0 to 1, or numbers outside 0 to 255."""


def as_picture(drawn: Any) -> np.ndarray:
    """Convert the result of an environment's render to uint8 [H, W, 3].

    Floats range from 0 to 1, or to 255 if any is above 1. Channels may come last or first. Transparent pixels are
    blended with white. Of a list of images, the last one is used.

    Raises:
        SettingsError: it is not an image.
    """
    picture = _array(drawn)
    if isinstance(drawn, (list, tuple)) and drawn and not _is_picture(picture):
        picture = _array(drawn[-1])
    if not _is_picture(picture):
        raise SettingsError(f"The environment's render returned {_described(drawn)}. {_ALLOWED}")
    colors = _channels_last(_in_bytes(picture))
    if colors.shape[-1] == 4:
        share = colors[..., 3:] / 255
        colors = np.rint(colors[..., :3] * share + 255 * (1 - share)).astype(np.uint8)
    return colors if colors.shape[-1] == 3 else colors.repeat(3, axis=-1)


def _array(drawn: Any) -> np.ndarray:
    try:
        return np.asarray(drawn)
    except ValueError:  # rows of unequal length
        return np.asarray(None)


def _is_picture(x: np.ndarray) -> bool:
    channels = x.shape[::2] if x.ndim == 3 else _COUNTS  # the last axis, or the first
    return x.dtype.kind in "buif" and x.ndim in (2, 3) and x.size > 0 and any(n in _COUNTS for n in channels)


def _channels_last(picture: np.ndarray) -> np.ndarray:
    """[H, W], [H, W, C] or [C, H, W] -> [H, W, C]"""
    if picture.ndim == 2:
        return picture[..., None]
    return picture if picture.shape[2] in _COUNTS else np.moveaxis(picture, 0, -1)


def _in_bytes(picture: np.ndarray) -> np.ndarray:
    """Convert numbers of any type to uint8."""
    if picture.dtype == np.uint8:
        return picture
    if picture.dtype == np.bool_:
        return picture * np.uint8(255)
    low, high = picture.min(), picture.max()
    unit = picture.dtype.kind == "f" and high <= 1 + _ROUNDING
    if not (low >= -_ROUNDING and high <= 255 + _ROUNDING):  # also if one of them is NaN
        raise SettingsError(
            f"The environment's render returned {picture.dtype} {list(picture.shape)} with numbers from {low:g} to "
            f"{high:g}, which are not colors. {_ALLOWED}"
        )
    return np.rint(np.clip(picture * 255.0 if unit else picture, 0, 255)).astype(np.uint8)


def _described(drawn: Any) -> str:
    """Describe a result that is not an image."""
    if drawn is None:
        return "None, which is not an image"
    array = _array(drawn)
    if array.dtype.kind in "buifc":
        return f"{array.dtype} {list(array.shape)}, which is not an image"
    return f"a {type(drawn).__name__}, which is not an image"
