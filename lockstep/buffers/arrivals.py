"""Writing into rings of steps, on the host or on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.buffers.slabs import all_sent


class Arrivals:
    """Writes into tensors of one device. All values from the host are sent to a GPU in one copy.

    Args:
        device: the device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._coming: list[tuple[Tensor, int, Tensor]] = []

    def write(self, ring: Tensor, place: int, values: Tensor) -> None:
        """Write values [T, ...] to successive places of a ring [C, ...], from this one on. Values that a GPU gets from
        the host are written by `arrive`."""
        if values.device == self._device:
            write(ring, place, values)
        else:
            self._coming.append((ring, place, values))

    def arrive(self) -> None:
        """Write all values that come from the host, without waiting for the GPU."""
        if self._coming:
            _, values = all_sent([values for _, _, values in self._coming], self._device)
            for (ring, place, _), value in zip(self._coming, values, strict=True):
                write(ring, place, value)
        self._coming.clear()


def write(ring: Any, place: int, values: Any) -> None:
    """Write values [T, ...] to successive places of a ring by plain copies. Both are tensors of one device or arrays,
    whose small copies take a tenth of the time."""
    before_end = min(len(values), len(ring) - place)
    ring[place : place + before_end] = values[:before_end]
    if before_end < len(values):
        ring[: len(values) - before_end] = values[before_end:]
