"""Steps of environments whose observations, rewards and ends are tensors on a GPU.

Shape legend: B environments.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class DeviceStep(NamedTuple):
    """As StepResult, with tensors on a GPU; no environment loses lives, and none reports metrics."""

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
        """Play one step, or begin the episode of those that have ended.

        Args:
            actions: [B, ...] of the action space.
        """
        ...

    def memory(self) -> list[Tensor]:
        """Everything that a step changes. It stays at its place."""
        ...
