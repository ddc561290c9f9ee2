"""The ids of Doom's matches, and the library that they need."""

from __future__ import annotations

import importlib.util

import gymnasium

from lockstep.envs.construct import PREFIX, needs_library

DEATHMATCH, DUEL = "vizdoom/Deathmatch", "vizdoom/Duel"
_OF_PETTINGZOO = f"{PREFIX}{DUEL}"

gymnasium.register(DEATHMATCH, entry_point="lockstep.envs.doom.deathmatch:Deathmatch")
if importlib.util.find_spec("pettingzoo"):
    import pettingzoo.env_registry.registration

    pettingzoo.env_registry.registration.register("parallel", DUEL, entry_point="lockstep.envs.doom.duel:Duel")


def canonical_id(env_id: str) -> str:
    """The id with which a library makes an environment. A duel is a PettingZoo environment. Other ids are unchanged.

    Raises:
        SettingsError: the id is a match, and the package `vizdoom` is not installed.
    """
    if env_id not in (DEATHMATCH, DUEL, _OF_PETTINGZOO):
        return env_id
    if not importlib.util.find_spec("vizdoom"):
        raise needs_library(f"env.id={env_id}", ModuleNotFoundError("No module named 'vizdoom'"))
    return _OF_PETTINGZOO if env_id == DUEL else env_id
