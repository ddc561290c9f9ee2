"""Steps of environments whose observations, rewards and ends are tensors on a GPU.

Shape legend: B environments.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class DeviceStep(NamedTuple):
    """As StepResult, with tensors on a GPU and without lost lives and metrics."""

    obs: Any
    """[B, ...], or a dict of these."""
    reward: Tensor
    """fp32 [B]"""
    terminated: Tensor
    truncated: Tensor
    first: Tensor


class DeviceSteps(Protocol):
    """Steps B environments with tensors on a GPU, without waiting for it."""

    def advance(self, actions: Tensor) -> DeviceStep:
        """Play one step. Environments whose episode has ended begin the next one instead.

        Args:
            actions: [B, ...] of the action space.
        """
        ...

    def memory(self) -> list[Tensor]:
        """All memory that a step changes. Its addresses do not change."""
        ...
