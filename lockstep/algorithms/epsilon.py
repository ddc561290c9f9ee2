"""ε-greedy exploration: the share ε of random actions and its fall over a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from lockstep.config.settings import SettingsError


class EpsilonSettings(Protocol):
    """The settings by which ε falls linearly from start to end over a fraction of the run."""

    @property
    def epsilon_start(self) -> float: ...
    @property
    def epsilon_end(self) -> float: ...
    @property
    def epsilon_fraction(self) -> float: ...


def check_epsilon(config: EpsilonSettings) -> None:
    """Raise SettingsError for values out of range."""
    for setting in ("epsilon_start", "epsilon_end", "epsilon_fraction"):
        if not 0 <= getattr(config, setting) <= 1:
            raise SettingsError(f"algorithm.{setting}={getattr(config, setting)} must be between 0 and 1.")


def falling_epsilon(config: EpsilonSettings, progress: float) -> float:
    """ε after a share `progress` of total_steps."""
    share = min(1.0, progress / config.epsilon_fraction) if config.epsilon_fraction else 1.0
    if share == 1.0:
        return config.epsilon_end
    return config.epsilon_start + share * (config.epsilon_end - config.epsilon_start)


def acting_epsilon(
    config: EpsilonSettings, annealings: Mapping[str, Callable[[int], float]], progress: float, samples: int
) -> float:
    """ε after this many samples, from algorithm.anneal if it sets epsilon, otherwise from falling_epsilon."""
    annealing = annealings.get("epsilon")
    return falling_epsilon(config, progress) if annealing is None else annealing(samples)
