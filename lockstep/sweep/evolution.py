"""Sample Factory's rule for populations: which members take over weights, and which settings mutate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.sweep.search import Between, OneOf, is_whole

_DECAYS = (".discount", ".gae_lambda", ".betas.0", ".betas.1", ".optimizer.decay")
"""Settings between 0 and 1 whose distance from 1 is multiplied: 0.9 becomes 0.88, and not 1.08."""


@dataclass(frozen=True)
class SampleFactory:
    """The rule of Petrenko et al. 2020 (https://arxiv.org/abs/2006.11751, appendix A.3.1). All members begin with the
    run's own settings. After each generation, each setting of the worse members is multiplied or divided by a factor
    with some probability, and the worst continue with the weights of members drawn from the best, with settings of
    their own."""

    mutated: float = 0.7
    """Share of the members, from the worst up, whose settings mutate. Higher searches more widely."""
    rate: float = 0.15
    """Probability that a setting of such a member changes. Higher searches faster and loses good settings sooner."""
    factor: float = 1.2
    """The factor by which a number is multiplied or divided. Higher takes larger steps."""
    replaced: float = 0.3
    """Share of the members that take over weights, and of the members that these come from. Higher selects harder."""
    gap: float = 0.0
    """By how much the objective of the other member must be higher before its weights are taken over. Higher keeps more
    variety (the paper's Duel: a win rate higher by 0.35)."""

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        for name in ("mutated", "rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingsError(f"evolution.{name}={getattr(self, name)} must be between 0 and 1.")
        if not 0 < self.replaced <= 0.5:
            raise SettingsError(f"evolution.replaced={self.replaced} must be above 0 and at most 0.5.")
        if not self.factor > 1:
            raise SettingsError(f"evolution.factor={self.factor} must be above 1, for example 1.2.")
        if not self.gap >= 0:
            raise SettingsError(f"evolution.gap={self.gap} must be at least 0.")

    def succession(
        self, ranked: Sequence[int], scores: Sequence[float | None], random: Sequence[np.random.Generator]
    ) -> list[int]:
        """The member from which each member continues: itself, or one of the best.

        Args:
            ranked: the members with a score, the best first.
            scores: the scores of all members.
            random: a generator for each member.
        """
        count = max(1, int(self.replaced * len(scores)))
        best, worst = ranked[:count], ranked[max(count, len(ranked) - count) :]
        chosen = [best[int(random[member].integers(len(best)))] for member in range(len(scores))]

        def succeeds(member: int) -> bool:
            own, other = scores[member], scores[chosen[member]]
            if member not in ranked or own is None or other is None:
                return True
            return member in worst and other - own > self.gap

        return [chosen[member] if succeeds(member) else member for member in range(len(scores))]

    def worse(self, ranked: Sequence[int], members: int) -> set[int]:
        """The members whose settings mutate: those without a score, and the worst of the others."""
        spared = members - int(self.mutated * members)
        return set(range(members)) - set(ranked[:spared])

    def mutate(
        self, space: Mapping[str, Between | OneOf], values: Mapping[str, Any], random: np.random.Generator
    ) -> dict[str, Any]:
        """A member's settings, some of them changed. Listed values are drawn anew."""
        found = {}
        for name, of in space.items():
            changes, up, place = random.random() < self.rate, random.random() < 0.5, random.random()
            value = values[name]
            if not changes:
                found[name] = value
            elif isinstance(of, OneOf):
                found[name] = of.values[int(place * len(of.values))]
            else:
                found[name] = self._multiplied(name, of, value, up)
        return found

    def _multiplied(self, name: str, of: Between, value: Any, up: bool) -> Any:
        by = self.factor if up else 1 / self.factor
        if is_whole(of, value):
            moved = max(value + 1, round(value * by)) if up else min(value - 1, round(value * by))
            return min(max(moved, int(of.low)), int(of.high))
        moved = 1 - (1 - value) * by if name.endswith(_DECAYS) else value * by
        return float(of.near(min(max(moved, of.low), of.high)))
