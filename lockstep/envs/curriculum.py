"""Curricula: a user's function changes options of training environments over a run, given metrics.

Versions carry the current options to collectors, as numbers in the order of their names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.config.settings import SettingsError
from lockstep.envs.factory import adapter_of
from lockstep.envs.settings import EnvConfig


def first_options(config: EnvConfig) -> dict[str, Any]:
    """The options that a curriculum begins with: the numbers among env.curriculum, sorted by name."""
    return {name: x for name, x in sorted(config.curriculum.items()) if isinstance(x, (bool, int, float))}


def pack(options: dict[str, Any]) -> Tensor:
    """Options as numbers: float64 [K]."""
    return torch.tensor([float(x) for x in options.values()], dtype=torch.float64)


def unpack(config: EnvConfig, packed: Tensor) -> dict[str, Any]:
    """The inverse of pack. Each option has its initial type."""
    return typed(first_options(config), packed.tolist())


def typed(like: dict[str, Any], numbers: list[float]) -> dict[str, Any]:
    """Numbers as options with the names and types of `like`."""
    return {name: type(x)(value) for (name, x), value in zip(like.items(), numbers, strict=True)}


def check_curriculum(config: EnvConfig, name: str) -> None:
    """Raise SettingsError if no curriculum can change the options of these environments.

    Args:
        config: resolved.
        name: the value of the setting `curriculum`.
    """
    if not first_options(config):
        raise SettingsError(
            f"curriculum={name} changes the options that --env.curriculum begins with, but that has no numbers. Add "
            "them, as in --env.curriculum difficulty=0.1."
        )
    if not adapter_of(config).changes_options(config.id):
        raise SettingsError(
            f"curriculum={name} changes options between episodes, which env.adapter={config.adapter} cannot do for "
            f"env.id={config.id}. Use --env.adapter gymnasium if that serves the id, and environments for one agent. A "
            "batch of yours needs get_state, set_state and set_options(options)."
        )
