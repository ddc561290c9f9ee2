"""The augmentation of images in lockstep.algorithms.augmentation, in one pass.

Shape legend: n images of C channels, H rows and W columns.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.math import ndtri, round
from lockstep.kernels.policies import within

_ZERO, _ONE, _STRONGEST, _BRIGHTEST = map(np.float32, (0, 1, 2, 255))


@compiled
def _brighten(row: np.ndarray, factor: np.float32, out: np.ndarray) -> None:
    """Whole grey levels of pixels that are multiplied by a factor."""
    for x in range(len(out)):
        out[x] = min(max(round(np.float32(row[x]) * factor), _ZERO), _BRIGHTEST)


@compiled
def augment(images: np.ndarray, draws: np.ndarray, pad: int, intensity: np.float32, out: np.ndarray) -> None:
    """Write shifted and brightened images: uint8 [n, C, H, W], uniform numbers [n, 3] -> float32 [n, C, H, W].
    Arguments and bits are those of lockstep.algorithms.augmentation.augment in portable arithmetic."""
    n, channels, height, width = images.shape
    for i in range(n):
        down = min(int(draws[i, 0] * np.float32(2 * pad + 1)), 2 * pad) - pad
        right = min(int(draws[i, 1] * np.float32(2 * pad + 1)), 2 * pad) - pad
        right = min(max(right, 1 - width), width - 1)  # further away, only copies of the border are seen, too
        factor = _ONE + intensity * min(max(ndtri(within(draws[i, 2])), -_STRONGEST), _STRONGEST)
        first, last = max(0, -right), min(width, width - right)  # columns between repeated borders
        for c in range(channels):
            for y in range(height):
                row, to = images[i, c, min(max(y + down, 0), height - 1)], out[i, c, y]
                _brighten(row[first + right : last + right], factor, to[first:last])
                to[:first] = to[first]
                to[last:] = to[last - 1]
