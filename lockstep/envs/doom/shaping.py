"""Shaped rewards of Doom's matches and battles: rewards for changes of game variables from one step to the next.

The paper (Petrenko et al. 2020, arXiv:2006.11751, appendix A.3) names the rewarded changes. The numbers come from
Sample Factory's published settings.

Shape legend: V variables of the game, B games.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.config.settings import SettingsError

SLOTS = range(1, 8)
"""Weapons' slots, as in a press of SELECT_WEAPON1: fist and chainsaw, pistol, shotguns, chaingun, rocket launcher,
plasma gun, BFG."""
_WORTH = {1: 1.0, 2: 1.0, 3: 5.0, 4: 5.0, 5: 5.0, 6: 10.0, 7: 10.0}
"""The relative value of each slot's weapons and of their ammunition."""
_MOST = {"DAMAGECOUNT": 200.0, "HITCOUNT": 5.0}
"""The largest gain of one step that counts. It limits the value of weapons that hit many players at once."""
_KEPT = 5
"""Steps for which a weapon must have been selected before it is rewarded."""


@dataclass(frozen=True)
class Weights:
    """Rewards and penalties. Penalties are positive numbers, too."""

    frag: float = 1.0
    """For each frag: a player's death that this player caused."""
    frag_lost: float = 1.5
    """Penalty for each frag that the player loses by killing itself."""
    death: float = 0.75
    """Penalty for each death."""
    hit: float = 0.01
    """For each hit of another player, at most 5 per step."""
    damage: float = 0.003
    """For each point of damage to others, at most 200 per step."""
    health: float = 0.005
    """For each point of health found."""
    health_lost: float = 0.003
    """Penalty for each point of health lost."""
    armor: float = 0.005
    """For each point of armor found."""
    armor_lost: float = 0.001
    """Penalty for each point of armor lost."""
    weapon: float = 0.02
    """For each new weapon, times 1 (fist, pistol), 5 (shotguns, chaingun, rocket launcher) or 10 (plasma gun, BFG)."""
    weapon_lost: float = 0.01
    """Penalty for each weapon lost, times the same factor."""
    ammo: float = 0.0002
    """For each unit of ammunition found, times the same factor."""
    ammo_spent: float = 0.0001
    """Penalty for each unit of ammunition spent, times the same factor."""
    ready: float = 0.0002
    """For each step with a loaded weapon that has been selected for five steps, times the same factor. It discourages
    frequent changes of weapons."""


SELF_PLAY = Weights(frag_lost=0.001, death=1.0, hit=0.0, damage=0.01, health=0.01, health_lost=0.01)
"""Sample Factory's weights for self-play: a frag gains one player what the death costs the other."""

COUNTED = (
    *("FRAGCOUNT", "DEATHCOUNT", "HITCOUNT", "DAMAGECOUNT", "HEALTH", "ARMOR"),
    *(f"WEAPON{n}" for n in SLOTS),
    *(f"AMMO{n}" for n in SLOTS),
)
"""Variables [V] whose changes are rewarded."""
NEEDED = (*COUNTED, "SELECTED_WEAPON", "SELECTED_WEAPON_AMMO", "DEAD")
"""All variables that a reward depends on."""


SUPPLIES = ("health", "health_lost", "ammo", "ammo_spent")
"""The weights of a battle, which has one weapon and no other players."""


def weight(name: str, value: Any) -> float:
    """A user's value of the option `name`, which is a weight.

    Raises:
        SettingsError: the value is not a number, or below 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise SettingsError(
            f"env.options.{name}={value!r} must be a number that is 0 or larger: a weight of the shaped reward. "
            "Penalties are positive, too."
        )
    return float(value)


def switch(name: str, value: Any) -> bool:
    """A user's value of the option `name`, which is true or false. Raises SettingsError if it is neither."""
    if not isinstance(value, bool):
        raise SettingsError(f"env.options.{name}={value!r} must be true or false.")
    return value


def _rates(w: Weights) -> dict[str, tuple[float, float]]:
    """By variable: the reward for each unit by which it rises, and the penalty for each unit by which it falls."""
    return {
        "FRAGCOUNT": (w.frag, w.frag_lost),
        "DEATHCOUNT": (-w.death, -w.death),
        "HITCOUNT": (w.hit, w.hit),
        "DAMAGECOUNT": (w.damage, w.damage),
        "HEALTH": (w.health, w.health_lost),
        "ARMOR": (w.armor, w.armor_lost),
        **{f"WEAPON{n}": (w.weapon * _WORTH[n], w.weapon_lost * _WORTH[n]) for n in SLOTS},
        **{f"AMMO{n}": (w.ammo * _WORTH[n], w.ammo_spent * _WORTH[n]) for n in SLOTS},
    }


class Shaping:
    """Computes the shaped rewards of one player's episode. Call `begin`, then `reward` after every step."""

    def __init__(self, weights: Weights) -> None:
        self._rates = _rates(weights)
        self._ready = {n: weights.ready * _WORTH[n] for n in SLOTS}
        self._before: Mapping[str, float] = {}
        self._selected: deque[int] = deque(maxlen=_KEPT)

    def begin(self, now: Mapping[str, float]) -> None:
        """Begin an episode with these values of the variables."""
        self._before = now
        self._selected.clear()

    def reward(self, now: Mapping[str, float]) -> float:
        """The reward of a step after which the variables have these values. It is 0 in the step in which the player
        respawns, because the player has not caused these changes."""
        before, self._before = self._before, now
        self._selected.append(max(0, int(now["SELECTED_WEAPON"])))
        if before["DEAD"] and not now["DEAD"]:
            return 0.0
        parts = []
        for name, (up, down) in self._rates.items():
            change = min(_alive(name, now) - _alive(name, before), _MOST.get(name, math.inf))
            parts.append(change * (up if change > 0 else down))
        kept = len(self._selected) == _KEPT and len(set(self._selected)) == 1
        if kept and now["SELECTED_WEAPON_AMMO"] > 0:
            parts.append(self._ready.get(self._selected[-1], 0.0))
        return math.fsum(parts)


def _alive(name: str, variables: Mapping[str, float]) -> float:
    """A variable's value. Health below 0 counts as 0."""
    return max(0.0, variables[name]) if name == "HEALTH" else variables[name]


def supplies(weights: Weights, before: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray]) -> np.ndarray:
    """The rewards of B games of a battle for health and ammunition found and lost in a step, float64 [B].

    Args:
        before, now: the variables [B] before and after the step.
    """
    reward = np.zeros(len(now["HEALTH"]))
    for name, (up, down) in _rates(weights).items():
        if name == "HEALTH" or (name.startswith("AMMO") and name in now):
            change = np.maximum(now[name].astype(np.float64), 0.0) - np.maximum(before[name].astype(np.float64), 0.0)
            reward += change * np.where(change > 0, up, down)
    return reward
