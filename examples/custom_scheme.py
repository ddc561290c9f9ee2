"""Your own scheme: collectors take new parameters only every few versions, for slow networks.

lockstep train examples/custom_scheme.py:recipe --layout cpu:a2-l1
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep import recipes
from lockstep.config.settings import SettingsError
from lockstep.core.schedule import Schedule
from lockstep.experiment import Experiment
from lockstep.scheme import Scheme


@dataclass(frozen=True)
class PeriodicSchedule(Schedule):
    """Says which version collects a rollout, from its number alone: so every process comes to the same answer."""

    period: int = 1

    def collects_with(self, rollout: int) -> int:
        newest = max(0, rollout - self.lag + self.period - 1)
        return newest - newest % self.period


@dataclass(frozen=True)
class Periodic(Scheme):
    """The rest of a scheme (shards, lag) is as ever. Every field becomes a flag, such as --scheme.period 8."""

    period: int = 4
    """Versions that collectors skip, plus one. Higher sends less, and learns from older data."""

    @property
    def buffers(self) -> int:
        return super().buffers + self.period - 1  # for collectors may be as many versions further ahead

    def schedule(self, iterations: int) -> Schedule:
        return PeriodicSchedule(self.buffers - 1, iterations, self.shards, period=self.period)

    def validate(self) -> None:
        super().validate()
        if self.period < 1 or self.timing_decides:
            raise SettingsError(f"scheme.period={self.period} must be at least 1, and scheme.lag a number.")


def recipe() -> Experiment:
    """PPO on CartPole that collects four rollouts with each version."""
    experiment = recipes.ppo_cartpole()
    return experiment.replace(scheme=Periodic(**vars(experiment.scheme)))
