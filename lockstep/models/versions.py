"""Versions: the states with which collectors act."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.core.schedule import Schedule
from lockstep.models.normalize import Normalizers


@dataclass(frozen=True)
class Version:
    """The state after some number of iterations, for collectors."""

    number: int
    parameters: Tensor
    """fp32 [N], flat."""
    normalizers: Normalizers
    """The statistics that normalize observations and rewards of its rollouts."""
    options: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """float64 [K]: the options of environments whose episodes begin in its rollouts, if a curriculum changes them."""
    lasts: bool = True
    """Whether the parameters do not change while the version is used. Otherwise they must be copied before acting,
    since later versions overwrite their memory."""


class Versions:
    """The versions that later rollouts still need, for collecting or for their statistics."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._held: dict[int, Version] = {}

    def __getitem__(self, number: int) -> Version:
        return self._held[number]

    def publish(self, version: Version) -> None:
        """Add a version, and remove those that no later rollout needs."""
        self._held[version.number] = version
        oldest = self._schedule.collects_with(version.number)
        self._held = {number: held for number, held in self._held.items() if number >= oldest}

    def held(self) -> dict[int, Version]:
        """All held versions by number, oldest first."""
        return dict(sorted(self._held.items()))
