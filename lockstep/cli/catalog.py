"""`lockstep envs`, `lockstep recipes` and `lockstep schemes`."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass

import tyro

from lockstep.cli.common import parse, say, say_json, unknown


@dataclass(frozen=True)
class EnvsArguments:
    """List the environments that this installation can run, and the adapters for each."""

    pattern: tyro.conf.Positional[str] = ""
    """Show only ids that contain this text (case does not matter)."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class RecipesArguments:
    """List recipes: complete experiments that train takes by name."""

    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class SchemesArguments:
    """Draw the presets that train takes: well-known schemes, and which processes wait for which."""

    preset: tyro.conf.Positional[str] = ""
    """Draw only this preset."""
    json: bool = False
    """Print one JSON document."""


def envs(arguments: list[str]) -> int:
    """Run `lockstep envs`."""
    given = parse(EnvsArguments, "envs", arguments)
    from lockstep.envs import list_envs

    everything = {name: list(adapters) for name, adapters in list_envs().items() if adapters}
    found = {name: adapters for name, adapters in everything.items() if given.pattern.lower() in name.lower()}
    if not found:
        raise unknown(
            "environment",
            given.pattern,
            everything,
            "lockstep envs lists all; more come with the extras atari, envpool, mujoco.",
        )
    if given.json:
        say_json(found)
        return 0
    width = max(map(len, found))
    for name, adapters in found.items():
        say(f"{name:<{width}}  {', '.join(adapters)}")
    return 0


def recipes(arguments: list[str]) -> int:
    """Run `lockstep recipes`."""
    given = parse(RecipesArguments, "recipes", arguments)
    from lockstep.recipes import RECIPES

    found = {name: (inspect.getdoc(recipe) or "").partition("\n\n")[0] for name, recipe in RECIPES.items()}
    if given.json:
        say_json(found)
        return 0
    width = max(map(len, found))
    for name, text in found.items():
        say(f"{name:<{width}}  {' '.join(text.split())}")
    say("\nlockstep train RECIPE --help shows a recipe's settings; --dry-run prints all their values.")
    return 0


def schemes(arguments: list[str]) -> int:
    """Run `lockstep schemes`."""
    given = parse(SchemesArguments, "schemes", arguments)
    from lockstep.recipes.presets import PRESETS

    found = {name: inspect.getdoc(preset) or "" for name, preset in PRESETS.items() if given.preset in ("", name)}
    if not found:
        raise unknown("preset", given.preset, PRESETS, "lockstep schemes draws all of them.")
    if given.json:
        say_json(found)
        return 0
    names: dict[str, list[str]] = {}
    for name, text in found.items():
        names.setdefault(text, []).append(name)
    for text, called in names.items():
        say(f"{', '.join(called)}\n{textwrap.indent(text, '    ')}\n")
    say("lockstep train RECIPE --preset NAME sets scheme and layout; further flags change them (docs/schemes.md).")
    return 0
