"""Suggestions for flags and recipes that do not exist."""

from __future__ import annotations

import contextlib
import difflib
import re
from typing import Any

from lockstep.cli.help import Row, rows
from lockstep.cli.values import lacks
from lockstep.config.settings import SettingsError
from lockstep.config.synonyms import meaning_of, settings_called, synonyms


def check_flags(verb: str, groups: list[list[str]], arguments: Any) -> None:
    """Reject flags that do not exist, and suggest existing ones.

    Args:
        verb: the command, followed by the recipe if there is one.
        groups: each flag with its values.
        arguments: the settings that flags change: an instance, or the class if every field has a default.

    Raises:
        SettingsError: a flag does not exist.
    """
    known = list(rows(arguments))
    positional = {row.path: row for row in known if row.positional}
    flags = {row.path: row for row in known if not row.positional}  # resume has both RUN and --run
    settings = {path: row.default for path, row in flags.items()}
    words = sum(not word.startswith("--") for group in groups for word in group)
    if lacking := [row for row in positional.values() if not row.optional][words:]:
        raise SettingsError(lacks(verb, lacking))
    if groups and not groups[0][0].startswith("--") and not positional:
        word = groups[0][0]
        written = f"--{word.lstrip('-')}" if word.startswith("-") or "=" in word else f"--env.id {word}"
        raise SettingsError(f"{word} is not a flag. Flags begin with two dashes, as in {written} or --total-steps 1M.")
    for first, *values in groups:
        flag = first.partition("=")[0]
        path = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or path in settings or re.sub(r"(^|\.)no_(\w+)$", r"\1\2", path) in settings:
            continue
        if path in positional:
            value = first.partition("=")[2] or " ".join(values) or positional[path].value
            raise SettingsError(f"There is no flag {flag}: write {value} alone, before all flags.")
        meant = _meant(path, settings) or _spelled_alike(path, list(flags.values()))
        raise SettingsError(f"There is no setting {flag}{meant or f'. lockstep {verb} --help-all lists all settings.'}")


def _spelled_alike(path: str, known: list[Row]) -> str:
    """The end of the error's sentence if a setting has a similar name; else empty."""
    group = f"{path.partition('.')[0]}."  # left out, since it would make all names of the group alike
    inside = {row.path.removeprefix(group): row.left for row in known if row.path.startswith(group)}
    whole = inside or {row.path: row.left for row in known}
    last = {row.path.rpartition(".")[2]: row.left for row in known}
    name = path.removeprefix(group) if inside else path
    close = [whole[each] for each in difflib.get_close_matches(name, whole, 2, 0.75)]
    close = close or [last[name] for name in difflib.get_close_matches(path.rpartition(".")[2], last, 2, 0.75)]
    return f". Did you mean {' or '.join(close)}?" if close else ""


def _meant(path: str, settings: dict[str, Any]) -> str:
    """The end of the error's sentence if the name is a known synonym; else empty."""
    found = meaning_of(path, settings)
    if not found:
        elsewhere = [each.setting for each in synonyms(path)] or settings_called(path)
        known = "env.id" in settings and elsewhere  # otherwise it is not a setting of the experiment
        if known and _flag(elsewhere[0]) == f"--{path.replace('_', '-')}":
            return " for this recipe. Recipes of other algorithms have it."
        return f" for this recipe, but other algorithms have {_flag(elsewhere[0])}." if known else ""
    flags = [_flag(each.setting) for each in found if each.setting]
    told = [f". Did you mean {' or '.join(flags)}?"] if flags else ["."]
    if len(found) == 1 and flags:
        value = settings[found[0].setting]
        if isinstance(value, bool):
            told.append(f"It is {'on' if value else 'off'} unless {_flag(found[0].setting, off=value)} is given.")
        elif value not in (None, "", (), {}):
            told.append(f"It is {' '.join(map(str, value)) if isinstance(value, tuple) else value} by default.")
    for each in found:
        with contextlib.suppress(KeyError):  # a note may name settings that this algorithm does not have
            told += [each.note.format_map(_facts(settings))] if each.note else []
    return " ".join(told)


def _flag(setting: str, *, off: bool = False) -> str:
    part, dot, name = setting.replace("_", "-").rpartition(".")
    return f"--{part}{dot}{'no-' * off}{name}"


def _facts(settings: dict[str, Any]) -> dict[str, Any]:
    """Values of a recipe that notes mention."""
    short = {path.rpartition(".")[2]: value for path, value in settings.items() if path.count(".") == 1}
    samples = short.get("rollout", 0) * short.get("num_envs", 0)
    return {**short, "samples": f"{samples:,}", "batch": f"{samples // short.get('minibatches', 1):,}"}


def recipes_like(name: str) -> str:
    """A sentence about the recipes for an algorithm, task or environment of this name; empty if there are none."""
    from lockstep.recipes import RECIPES

    word = name.lower()
    tasks = {recipe: make().env.id.lower().partition("-v")[0] for recipe, make in RECIPES.items()}
    if found := [recipe for recipe, task in tasks.items() if word in (task, *recipe.split("-"))]:
        known = f"Recipes for {name} are" if len(found) > 1 else f"The recipe for {name} is"
        return f"{known} {', '.join(found)}. For example: lockstep train {found[0]}"
    return _for_environment(name)


def _for_environment(name: str) -> str:
    """A sentence about the recipes for an environment's kinds of observations and actions; empty if there are none."""
    import gymnasium

    from lockstep import envs
    from lockstep.envs.settings import EnvConfig
    from lockstep.recipes import RECIPES

    game, other = envs.atari_game(name), ""
    if game:  # Atari's emulator is noisy
        kind = "atari"
    else:
        try:
            seen, actions = envs.spaces(envs.resolve(EnvConfig(id=name)))
        except SettingsError:
            return ""
        pictures = len(seen.shape or ()) == 3
        kind = "mujoco" if isinstance(actions, gymnasium.spaces.Box) else "atari" if pictures else "cartpole"
        other = " --env.protocol none --env.adapter auto" if kind == "atari" else ""
    found = [recipe for recipe in RECIPES if recipe.endswith(kind)]
    return (
        f"{name} is an environment, not a recipe. Recipes for such observations and actions are {', '.join(found)}. "
        f"For example: lockstep train {found[0]} --env.id {game or name}{other}"
    )
