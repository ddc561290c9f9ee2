"""Makes environments from settings: chooses the adapter for an id, and checks settings for all adapters."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from lockstep.config.extras import EXTRAS, install_command
from lockstep.config.settings import Names, SettingsError
from lockstep.envs.adapters import ADAPTERS, AUTO, entry_of, not_installed, recorded_name
from lockstep.envs.atari import atari_name
from lockstep.envs.base import Adapter, ShardEnv, load_adapter
from lockstep.envs.construct import PREFIX, is_callable, makes_batch
from lockstep.envs.episodes import Seeds
from lockstep.envs.pool.pool import SteppingPool
from lockstep.envs.pool.shard import PooledShard
from lockstep.envs.random_actions import RandomActions
from lockstep.envs.settings import RANDOM, SHARED, EnvConfig


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
    device: str = "cpu",
) -> ShardEnv:
    """Make one shard's environments.

    Args:
        config: the settings; num_envs in it is ignored.
        seed: the run's seed.
        first_index: the global index of the shard's first environment.
        num_envs: environments in this shard.
        threads: threads that step them, if the adapter declares `threads`.
        purpose: "train", "eval", …: environments with different purposes never share a seed, and only those of "train"
            follow the curriculum.
        render: whether images will be requested.
        pool: child processes that step the environments instead of this one, if the adapter declares `processes`. They
            cannot render.
        device: the policy's device. Environments run there if the adapter declares `devices`.

    Raises:
        SettingsError: the id or an option is unknown, a library is not installed, or the adapter cannot use a pool.
    """
    config = dataclasses.replace(resolve(config), metrics=config.metrics)
    curriculum = config.curriculum if purpose == "train" else {}
    if curriculum:
        config = config.training()
    adapter = load_adapter(config.adapter)
    if pool is not None and not adapter.processes:
        raise SettingsError(
            f"env_processes cannot step env.id={config.id} with env.adapter={config.adapter}. Leave env_processes out "
            f"of --layout{', or use env_threads=N' if adapter.threads else ''}."
        )
    try:
        if pool is not None:
            env: ShardEnv = PooledShard(
                config, seed=seed, purpose=purpose, first_index=first_index, num_envs=num_envs, pool=pool
            )
        else:
            seeds = Seeds(seed, purpose, first_index)
            place = {"device": device} if adapter.devices else {}
            env = adapter.make(config, seeds=seeds, num_envs=num_envs, threads=threads, render=render, **place)
    except SettingsError as error:
        if not curriculum:
            raise
        raise SettingsError(f"{error} (Of these options, {', '.join(curriculum)} came from env.curriculum.)") from error
    return RandomActions(env, seed, first_index) if config.random_actions and purpose == "train" else env


def whole_matches(config: EnvConfig, num_envs: int) -> int:
    """num_envs rounded up to whole matches: a shard has all environments of a match or none."""
    config = resolve(config)
    size = load_adapter(config.adapter).group_size(config)
    return -(-num_envs // size) * size


def check_matches(config: EnvConfig, num_envs: int) -> None:
    """Raise SettingsError if a shard of num_envs environments would split a match."""
    size, shards = whole_matches(config, 1), config.num_envs // num_envs
    if config.curriculum and whole_matches(config.training(), 1) != size:
        raise SettingsError(
            f"env.curriculum={config.curriculum} changes the number of agents in a match, so training and evaluation "
            "would differ. Name only options that do not change it."
        )
    if num_envs % size:
        raise SettingsError(
            f"A shard has {num_envs} environments (env.num_envs / scheme.shards), but env.id={config.id} takes groups "
            f"of {size}, one for each agent of a match or each task: use --env.num-envs "
            f"{-(-num_envs // size) * size * shards}."
        )


def spaces(config: EnvConfig) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """The observation and action space of one environment, as models see them.

    Raises:
        SettingsError: the spaces of training and evaluation differ, or as for make.
    """
    found = _spaces_of(config)
    plain = dataclasses.replace(config, curriculum={})
    if config.curriculum and _spaces_of(plain) != found:
        raise SettingsError(
            f"env.curriculum={config.curriculum} changes the observation or action space, so training and evaluation "
            "would differ. Name only options that do not change these spaces."
        )
    return found


def _spaces_of(config: EnvConfig) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    # Loading a trained opponent would ask for its environment's spaces, which may be these.
    played = tuple(f"{name}={RANDOM}" for name in config.players()) if config.several_policies else ()
    config = dataclasses.replace(config, opponents=played)
    env = make(config, seed=0, first_index=0, num_envs=whole_matches(config, 1))
    try:
        return env.observation_space, env.action_space
    finally:
        env.close()


def first_seeds(config: EnvConfig, seed: int) -> list[int]:
    """The seed from which each environment of a run starts, by global index.

    Raises:
        SettingsError: two seeds are equal, which happens in one of 4 million runs with 32 environments.
    """
    index = np.arange(config.num_envs)
    seeds = Seeds(seed, "train", 0).derive(index, np.zeros_like(index)).tolist()
    own = config.adapter != AUTO and load_adapter(config.adapter).own_seeds
    if len(set(seeds)) < len(seeds) and not own:
        raise SettingsError(f"With seed={seed}, two environments would start from the same seed: use another --seed.")
    return seeds


def resolve(config: EnvConfig) -> EnvConfig:
    """Determine the adapter, the canonical spelling of the id, and settings that the protocol implies.

    Raises:
        SettingsError: the id or the adapter is unknown, no adapter supports the settings, the protocol is for other
            ids, or a library is not installed.
    """
    given = entry_of(config.adapter) if config.adapter != AUTO else None
    if given is not None and not given.installed:
        raise not_installed(config.id, config.adapter)
    names = [config.adapter] if given is not None else _candidates(config.id)
    if given is not None and (owners := _owners(config.id)) and config.adapter not in owners:
        raise SettingsError(
            f"env.adapter={config.adapter} cannot serve env.id={config.id}, which names the adapters of its tasks. Use "
            f"--env.adapter {AUTO}, and ID@{config.adapter} in the id."
        )
    refusals: list[SettingsError] = []
    for name in names:
        adapter = load_adapter(name)
        env_id = adapter.find(config.id)
        if env_id is None:
            continue
        refusal = _refusal(config, env_id, name, adapter)
        if refusal is not None:
            refusals.append(refusal)
            continue
        found = dataclasses.replace(config, id=env_id, adapter=recorded_name(name))
        asked = _asked(found, adapter)
        if asked and not adapter.reports(env_id):
            # Another adapter plays other episodes, and a metric must not change what is learned.
            raise _reports_nothing(asked, name, env_id)
        clip = config.reward_clip or (config.protocol != "none" and not config.raw_rewards)
        return dataclasses.replace(found, reward_clip=clip, metrics=(*adapter.own_metrics(found), *asked))
    raise refusals[0] if refusals else _not_served(config)


def asked_metrics(config: EnvConfig) -> Names:
    """The entries of env.metrics that these environments would not report by default. Raises SettingsError as
    resolve."""
    config = resolve(config)
    return _asked(config, load_adapter(config.adapter))


def _asked(config: EnvConfig, adapter: Adapter) -> Names:
    own = adapter.own_metrics(config)
    return tuple(text for text in config.metrics if text not in own)


def adapter_of(config: EnvConfig) -> Adapter:
    """The adapter that serves these environments. Raises SettingsError as resolve."""
    return load_adapter(resolve(config).adapter)


def _candidates(env_id: str) -> list[str]:
    """The installed adapters that may serve an id, the fastest first."""
    if owners := _owners(env_id):
        return owners
    of_user, batch = is_callable(env_id), makes_batch(env_id)
    return [
        name
        for name, entry in ADAPTERS.items()
        if entry.installed and (entry.callables or not of_user) and (entry.batches or not batch)
    ]


def _owners(env_id: str) -> list[str]:
    """The adapter that alone serves ids with this id's prefix, if there is one."""
    return [name for name, entry in ADAPTERS.items() if entry.prefix and env_id.startswith(entry.prefix)]


def _refusal(config: EnvConfig, env_id: str, name: str, adapter: Adapter) -> SettingsError | None:
    """The error for an adapter that serves an id but does not support the settings; None if it does."""
    if config.protocol != "none" and not adapter.plays_atari(env_id):
        game = atari_game(config.id)
        return SettingsError(
            f"env.protocol={config.protocol} is for Atari games by name (such as Breakout), but env.id={config.id}. "
            f"Use {f'--env.id {game}' if game else '--env.protocol none'}."
        )
    if config.num_levels and not adapter.has_levels(env_id):
        return SettingsError(
            f"env.num_levels={config.num_levels}: env.adapter={name} cannot choose the levels of env.id={config.id}. "
            f"{_instead(config, 'num_levels', lambda other: other.has_levels(env_id))}"
        )
    states = adapter.central_states(env_id)
    served = {
        "policies": config.policies == SHARED or adapter.several_policies(env_id),
        "central_state": config.central_state in ("none", *states),
    }
    for setting, does in served.items():
        if not does and not states:
            return SettingsError(
                f"env.{setting}={getattr(config, setting)} is for environments with several agents, but env.id="
                f"{config.id} has one. Leave it out, or use an id that begins with {PREFIX}."
            )
        if not does:
            known = SHARED if setting == "policies" else " or ".join(("none", *states))
            return SettingsError(
                f"env.{setting}={getattr(config, setting)}: env.adapter={name} knows only {known} for env.id="
                f"{config.id}. Use that, or an id that begins with {PREFIX}."
            )
    if config.opponents and states and not adapter.opponents(env_id):
        return SettingsError(
            f"env.opponents={' '.join(config.opponents)}: env.adapter={name} lets policies play all agents of "
            f"env.id={config.id}. Leave it out, or use an id that begins with {PREFIX}."
        )
    if config.decorrelate and not adapter.decorrelates:
        return SettingsError(
            f"env.decorrelate={config.decorrelate}: env.adapter={name} cannot cut the first episodes of single "
            f"environments. {_instead(config, 'decorrelate', lambda other: other.decorrelates)}"
        )
    return None


def _reports_nothing(asked: Names, name: str, env_id: str) -> SettingsError:
    """The error for metrics of an adapter that returns no info."""
    others = [other for other in _serving(env_id) if load_adapter(other).reports(env_id)]
    instead = f"Use --env.adapter {' or '.join(others)} (its results differ), or leave" if others else "Leave"
    if load_adapter(name).central_states(env_id):
        instead = f"Use an environment whose id begins with {PREFIX} and whose agents have infos, or leave"
    return SettingsError(
        f"env.metrics={','.join(asked)}: env.adapter={name} does not pass on what env.id={env_id} reports in its info. "
        f"{instead} out --env.metrics."
    )


def _instead(config: EnvConfig, setting: str, can: Callable[[Adapter], bool]) -> str:
    """Advice for an adapter that lacks a feature: another adapter that serves the id and has it, or no setting."""
    others = [name for name in _serving(config.id) if can(load_adapter(name))]
    without = f"--env.{setting.replace('_', '-')} 0"
    return f"Use --env.adapter {' or '.join(others)}, or {without}." if others else f"Use {without}."


def _serving(env_id: str) -> list[str]:
    """The installed adapters that serve an id."""
    return [name for name in _candidates(env_id) if load_adapter(name).find(env_id) is not None]


def _not_served(config: EnvConfig) -> SettingsError:
    """The error for an id that no adapter serves, or that the named adapter does not serve."""
    serving = _serving(config.id) if config.adapter != AUTO else []
    if serving:
        return SettingsError(
            f"env.adapter={config.adapter} cannot serve env.id={config.id}. Use --env.adapter {' or '.join(serving)}, "
            f"or {AUTO}."
        )
    for name, entry in ADAPTERS.items():
        if not entry.installed and entry.claims and re.fullmatch(entry.claims, config.id):
            return not_installed(config.id, name)
    ids = list_envs() if config.adapter == AUTO else load_adapter(config.adapter).ids()
    known = {env_id.lower(): env_id for env_id in ids}
    close = [known[found] for found in difflib.get_close_matches(config.id.rpartition(":")[2].lower(), known, 4)]
    hint = f"Did you mean {', '.join(close)}? " if close else ""
    more = [extra for extra in ("atari", "mujoco", "envpool") if not EXTRAS[extra].installed]
    offer = f" More come with {' and '.join(more)}: {install_command(','.join(more))}." if more else ""
    return SettingsError(
        f"There is no environment {config.id!r}. {hint}Use the name of an Atari game (Breakout), an id of gymnasium or "
        'EnvPool, or your own callable ("module:make" or "file.py:make"). `lockstep envs` lists all ids that are '
        "installed."
        f"{offer}"
    )


def list_envs() -> dict[str, tuple[str, ...]]:
    """Every known id with the installed adapters that serve it. auto takes the first."""
    found: dict[str, tuple[str, ...]] = {}
    for name, entry in ADAPTERS.items():
        if entry.installed:
            for env_id in load_adapter(name).ids():
                found[env_id] = (*found.get(env_id, ()), name)
    return dict(sorted(found.items()))


def atari_game(env_id: str) -> str | None:
    """The Atari game of a gymnasium or EnvPool id, such as ALE/Pong-v5 or PongNoFrameskip-v4; None if there is none."""
    bare = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?(-ram)?-v\d+$", "", env_id)
    games = [game for name, entry in ADAPTERS.items() if entry.installed for game in load_adapter(name).games()]
    return atari_name(bare, games)
