"""From settings to environments: which library serves an id, and what it is called there."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from lockstep.config.extras import install_command
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import import_module, load_object
from lockstep.envs.base import EnvConfig, ShardEnv
from lockstep.envs.convert import Seeds
from lockstep.envs.random_actions import RandomActions
from lockstep.system.output import reserve_streams

if TYPE_CHECKING:
    from lockstep.envs.gym import GymShard
    from lockstep.envs.subprocess import SteppingPool

_PACKAGES = {"ale": "ale_py", "envpool": "envpool", "gymnasium": "gymnasium"}
_EXTRAS = {"ale": "atari", "envpool": "envpool"}
_DOOM = "vizdoom/"
"""How the ids of our own Doom scenarios begin; EnvPool steps them."""


def make(
    config: EnvConfig,
    *,
    seed: int,
    first_index: int,
    num_envs: int,
    threads: int = 1,
    purpose: str = "train",
    render: bool = False,
    pool: SteppingPool | None = None,
) -> ShardEnv:
    """Make one shard's environments.

    Args:
        config: which environments; num_envs in it is not used here.
        seed: the run's seed.
        first_index: the global index of the shard's first environment.
        num_envs: environments in this shard.
        threads: threads that step them (ALE and EnvPool).
        purpose: "train", "eval", …: environments with different purposes never share a seed, and only those of "train"
            follow the curriculum.
        render: whether pictures will be asked for.
        pool: child processes that step them instead of this one (gymnasium). They draw no pictures.

    Raises:
        SettingsError: an unknown id or option, a library that is not installed, or a pool with another adapter.
    """
    config = resolve(config)
    curriculum = config.curriculum if purpose == "train" else {}
    if curriculum:
        config = config.training()
    try:
        env = _make(config, seed, first_index, num_envs, threads, purpose, render, pool)
    except SettingsError as error:
        if not curriculum:
            raise
        raise SettingsError(f"{error} (Of these options, {', '.join(curriculum)} came from env.curriculum.)") from error
    return RandomActions(env, seed, first_index) if config.random_actions and purpose == "train" else env


def _make(
    config: EnvConfig,
    seed: int,
    first_index: int,
    num_envs: int,
    threads: int,
    purpose: str,
    render: bool,
    pool: SteppingPool | None,
) -> ShardEnv:
    if pool is not None:
        from lockstep.envs.subprocess import PooledShard

        if config.adapter != "gymnasium":
            raise SettingsError(
                f"Environment processes step what --env.adapter gymnasium makes, but env.id={config.id} is served by "
                f"{config.adapter}, which steps in threads of its own: use env_threads=N in --layout, or --env.adapter "
                "gymnasium (another result)."
            )
        return PooledShard(config, seed=seed, purpose=purpose, first_index=first_index, num_envs=num_envs, pool=pool)
    seeds = Seeds(seed, purpose, first_index)
    if config.adapter == "ale":
        from lockstep.envs.ale import AleShard

        return AleShard(config, seeds=seeds, num_envs=num_envs, threads=threads, render=render)
    if config.adapter == "envpool" and config.id.startswith(_DOOM):
        from lockstep.envs.vizdoom import VizdoomShard

        return VizdoomShard(config, seeds=seeds, num_envs=num_envs, threads=threads, render=render)
    if config.adapter == "envpool":
        from lockstep.envs.envpool import EnvPoolShard

        return EnvPoolShard(config, seeds=seeds, num_envs=num_envs, threads=threads, render=render)
    return python_shard(config, seeds=seeds, num_envs=num_envs, render=render)


def python_shard(config: EnvConfig, *, seeds: Seeds, num_envs: int, render: bool = False) -> GymShard:
    """The environments of a shard that Python steps."""
    from lockstep.envs.gym import GymShard
    from lockstep.envs.multiagent.pettingzoo import MatchShard, agents_of

    kind = MatchShard if agents_of(config) else GymShard
    shard = kind(config, seeds=seeds, num_envs=num_envs, render=render)
    reserve_streams()  # which a constructor may have closed
    return shard


def whole_matches(config: EnvConfig, num_envs: int) -> int:
    """The least number of environments from num_envs on that a shard can have: all that a match takes."""
    from lockstep.envs.multiagent.pettingzoo import agents_of

    size = max(1, agents_of(config))
    return -(-num_envs // size) * size


def check_matches(config: EnvConfig, num_envs: int) -> None:
    """Raise SettingsError for a number of a shard's environments that is none of whole matches."""
    size, shards = whole_matches(config, 1), config.num_envs // num_envs
    if whole_matches(config.training(), 1) != size:
        raise SettingsError(
            f"With env.curriculum={config.curriculum} a match has another number of agents than without it, in "
            "evaluations. Name only options that leave it as it is."
        )
    if num_envs % size:
        raise SettingsError(
            f"A shard has {num_envs} environments (env.num_envs / scheme.shards), but a match of env.id={config.id} "
            f"takes {size}, one for each agent: use --env.num-envs {-(-num_envs // size) * size * shards}."
        )


def spaces(config: EnvConfig) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Observation and action space of a single environment, as models see them.

    Raises:
        SettingsError: those of training and of evaluation differ; and as make does.
    """
    found = _spaces_of(config)
    plain = dataclasses.replace(config, curriculum={})
    if config.curriculum and _spaces_of(plain) != found:
        raise SettingsError(
            f"With env.curriculum={config.curriculum} the environments of training have other observations or actions "
            "than those of evaluation, which are made without it. Name only options that leave these as they are."
        )
    return found


def _spaces_of(config: EnvConfig) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    config = dataclasses.replace(config, opponents=())  # who are trained, perhaps, on this very environment
    env = make(config, seed=0, first_index=0, num_envs=whole_matches(config, 1))
    try:
        return env.observation_space, env.action_space
    finally:
        env.close()


def first_seeds(config: EnvConfig, seed: int) -> list[int]:
    """The seed that each environment of a run starts from, by global index.

    Raises:
        SettingsError: two are equal, which happens to one of 4 million runs with 32 environments.
    """
    index = np.arange(config.num_envs)
    seeds = Seeds(seed, "train", 0).derive(index, np.zeros_like(index)).tolist()
    if len(set(seeds)) < len(seeds):
        raise SettingsError(f"With seed={seed}, two environments would start from the same seed: use another --seed.")
    return seeds


def resolve(config: EnvConfig) -> EnvConfig:
    """Fix what is left open: the adapter, the spelling of a game's name, and what the protocol implies.

    Raises:
        SettingsError: an unknown id, a protocol for something other than an Atari game, a missing library.
    """
    from lockstep.envs.gym import is_callable

    if is_callable(config.id):
        if config.adapter not in ("auto", "gymnasium"):
            raise SettingsError(f"env.id={config.id} is a callable, which only --env.adapter gymnasium can serve.")
        load_object(config.id.removeprefix("pettingzoo/"))
        adapters: tuple[str, ...] = ("gymnasium",)
        env_id, atari = config.id, False
    else:
        env_id, adapters, atari = _settled(config.id, config.adapter) or _lookup(config.id)
    if config.protocol != "none" and not atari:
        game = atari_game(config.id)
        raise SettingsError(
            f"env.protocol={config.protocol} is for Atari games by name (such as Breakout), but env.id={config.id}. "
            f"Use {f'--env.id {game}' if game else '--env.protocol none'}."
        )
    if config.num_levels:
        drawing = tuple(a for a in adapters if _has_levels(a, env_id))
        if not drawing or config.adapter not in ("auto", *drawing):
            raise SettingsError(
                f"env.num_levels={config.num_levels} needs an adapter that can begin every episode on a level of its "
                f"own: gymnasium, or EnvPool for Procgen's games. {config.id} is served by {' and '.join(adapters)}: "
                f"use {'--env.adapter ' + ' or '.join(drawing) if drawing else 'another task, or --env.num-levels 0'}."
            )
        adapters = drawing
    able = tuple(a for a in adapters if a != "envpool") if config.decorrelate else adapters
    installed = tuple(a for a in able if _installed(a))
    adapter = config.adapter
    if adapter == "auto":
        if not able:
            raise SettingsError(
                f"env.decorrelate={config.decorrelate} needs an adapter that can start single episodes from a seed "
                f"(ale, gymnasium), but {config.id} is only served by envpool. Use --env.decorrelate 0."
            )
        if not installed:
            raise _missing(config.id, able[0])
        adapter = installed[0]
    elif adapter not in adapters:
        raise SettingsError(
            f"env.adapter={adapter} cannot serve env.id={config.id}. Use {' or '.join(adapters)}, or auto."
        )
    elif adapter not in able:
        raise SettingsError(
            f"env.decorrelate={config.decorrelate} does not work with env.adapter=envpool, which cannot start single "
            "episodes from a seed. Use --env.adapter ale or gymnasium, or --env.decorrelate 0."
        )
    elif not _installed(adapter):
        raise _missing(config.id, adapter)
    reward_clip = config.reward_clip or config.protocol != "none"
    return dataclasses.replace(config, id=env_id, adapter=adapter, reward_clip=reward_clip)  # type: ignore[arg-type]


def list_envs() -> dict[str, tuple[str, ...]]:
    """Every known id with the adapters that can serve it here, the one that auto takes first."""
    return {env_id: tuple(a for a in adapters if _installed(a)) for env_id, adapters in sorted(_catalog().items())}


def _has_levels(adapter: str, env_id: str) -> bool:
    """Whether an adapter can begin every episode of a task on a level of its own."""
    if adapter == "envpool" and _installed(adapter):
        from lockstep.envs import envpool

        return envpool.has_levels(env_id)
    return adapter == "gymnasium"


def _installed(adapter: str) -> bool:
    return importlib.util.find_spec(_PACKAGES[adapter]) is not None


def _missing(env_id: str, adapter: str) -> SettingsError:
    return SettingsError(
        f"env.id={env_id} needs the adapter {adapter}, whose library {_PACKAGES[adapter]} is not installed. Install it "
        f"with: {install_command(_EXTRAS[adapter])}."
    )


@functools.lru_cache
def _atari_games() -> frozenset[str]:
    names: set[str] = set()
    if _installed("ale"):
        from lockstep.envs import ale

        names |= set(ale.games())
    if _installed("envpool"):
        from lockstep.envs import envpool

        names |= set(envpool.games())
    return frozenset(names)


def _register() -> None:
    """Make gymnasium know our own environments."""
    import lockstep.envs.minatar
    import lockstep.envs.tasks  # noqa: F401


def _catalog() -> dict[str, tuple[str, ...]]:
    """Ids and the adapters that serve them, fastest first."""
    _register()
    catalog: dict[str, tuple[str, ...]] = {}
    if _installed("envpool"):
        from lockstep.envs import envpool, vizdoom

        catalog |= {env_id: ("envpool",) for env_id in (*envpool.ids(), *vizdoom.ids())}
        catalog |= {game: ("ale", "envpool") for game in envpool.games()}
    if _installed("ale"):
        from lockstep.envs import ale

        for game in ale.games():
            catalog[game] = ("ale", "envpool") if game in catalog or not _installed("envpool") else ("ale",)
    for env_id in gymnasium.registry:
        if env_id.startswith("GymV"):
            continue
        catalog[env_id] = (*catalog.get(env_id, ()), "gymnasium")
    if importlib.util.find_spec("pettingzoo"):
        from lockstep.envs.multiagent import pettingzoo

        catalog |= {env_id: ("gymnasium",) for env_id in pettingzoo.ids()}
    return catalog


def _settled(env_id: str, adapter: str) -> tuple[str, tuple[str, ...], bool] | None:
    """As _lookup, where EnvPool has no say: it takes a second to import, in every process."""
    if adapter in ("ale", "auto") and _installed("ale"):
        from lockstep.envs import ale

        game = _game(env_id, ale.games())
        return None if game is None else (game, ("ale",), True)
    _register()
    return (env_id, ("gymnasium",), False) if adapter == "gymnasium" and env_id in gymnasium.registry else None


def atari_game(env_id: str) -> str | None:
    """The Atari game that one of gymnasium's ids, such as ALE/Pong-v5 or PongNoFrameskip-v4, or of EnvPool's is for."""
    bare = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?(-ram)?-v\d+$", "", env_id)
    return _game(bare, _atari_games())


def _game(env_id: str, games: Iterable[str]) -> str | None:
    """The Atari game that an id names."""
    return {game.lower(): game for game in games}.get(env_id.removesuffix("-v5").replace("_", "").lower())


def _lookup(env_id: str) -> tuple[str, tuple[str, ...], bool]:
    """The canonical id, the adapters that can serve it, installed or not, and whether it is an Atari game's name."""
    if env_id.startswith("ALE/") and _installed("ale"):
        importlib.import_module("ale_py")
    catalog = _catalog()
    games = _atari_games()
    game = _game(env_id, games)
    if game is not None:
        return game, catalog[game], True
    if env_id in catalog:
        return env_id, catalog[env_id], False
    if env_id.startswith(_DOOM) and not _installed("envpool"):
        raise _missing(env_id, "envpool")
    if env_id.startswith("pettingzoo/") and not importlib.util.find_spec("pettingzoo"):
        from lockstep.envs.gym import needs_library

        raise needs_library(f"env.id={env_id}", ModuleNotFoundError("No module named 'pettingzoo'"))
    if not games and re.fullmatch(r"[A-Z][A-Za-z]+(-v5)?", env_id):
        raise _missing(env_id, "ale")
    module, _, name = env_id.rpartition(":")
    if module:  # gymnasium's "module:id" imports the module that registers the id
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            from lockstep.envs.gym import needs_library

            raise needs_library(f"env.id={env_id}", error) from error
        catalog = _catalog()
        if name in catalog:
            return env_id, ("gymnasium",), False
    folded = {name.lower(): name for name in catalog}
    close = [folded[c] for c in difflib.get_close_matches(name.lower(), folded, 4)]
    hint = f"Did you mean {', '.join(close)}? " if close else ""
    raise SettingsError(
        f"There is no environment {env_id!r}. {hint}Allowed are Atari games by name (Breakout), gymnasium and EnvPool "
        'ids, and callables of your own ("module:make", "file.py:make"); `lockstep envs` lists what is installed. '
        f"The extras atari, mujoco and envpool add more: {install_command('atari,mujoco,envpool')}."
    )
