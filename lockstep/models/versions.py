"""Versions of what acts, and those that are still needed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.core.schedule import Schedule
from lockstep.models.normalize import Normalizers


@dataclass(frozen=True)
class Version:
    """What acts: the state after some number of iterations."""

    number: int
    parameters: Tensor
    """fp32 [N], flat."""
    normalizers: Normalizers
    """What observations and rewards of its rollouts are normalised with."""


class Versions:
    """The versions that some coming rollout is still to be collected with, or learned with the statistics of."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._held: dict[int, Version] = {}

    def __getitem__(self, number: int) -> Version:
        return self._held[number]

    def publish(self, version: Version) -> None:
        """Add a version and forget those that no rollout from there on needs."""
        self._held[version.number] = version
        oldest = self._schedule.collects_with(version.number)
        self._held = {number: held for number, held in self._held.items() if number >= oldest}

    def held(self) -> dict[int, Version]:
        """All held versions by number, oldest first."""
        return dict(sorted(self._held.items()))
