"""Writing into rings of steps, which may lie on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.buffers.slabs import all_sent


class Arrivals:
    """What is to be written into tensors of one device. What comes from the host goes to a GPU in one copy.

    Args:
        device: where the tensors lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._coming: list[tuple[Tensor, int, Tensor]] = []

    def write(self, ring: Tensor, place: int, values: Tensor) -> None:
        """Write values [T, ...] at successive places of a ring [C, ...], from this one on; on a GPU, not before
        arrive."""
        if values.device == self._device:
            write(ring, place, values)
        else:
            self._coming.append((ring, place, values))

    def arrive(self) -> None:
        """Write all that comes from the host, which does not wait for it."""
        if self._coming:
            _, values = all_sent([values for _, _, values in self._coming], self._device)
            for (ring, place, _), there in zip(self._coming, values, strict=True):
                write(ring, place, there)
        self._coming.clear()


def write(ring: Any, place: int, values: Any) -> None:
    """ring[place:] = values at successive places [T] of the ring, by plain copies: tensors of one device, or arrays,
    whose small copies take a tenth of the time."""
    before_end = min(len(values), len(ring) - place)
    ring[place : place + before_end] = values[:before_end]
    if before_end < len(values):
        ring[: len(values) - before_end] = values[before_end:]
