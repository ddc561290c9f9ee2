"""Makes environments, one or a batch, from a gymnasium or PettingZoo id or from a user's callable."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from lockstep.config.boundary import ENVIRONMENT_SETTINGS
from lockstep.config.extras import install_command
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import load_object
from lockstep.envs.adapters import MIXED
from lockstep.envs.settings import EnvConfig
from lockstep.envs.torch_env import TorchEnv

_REGISTERED_BY = {"ALE/": "ale_py", "lockstep/": "lockstep.envs.tasks", "MinAtar/": "lockstep.envs.minatar"}
_EXTRAS = {
    "mujoco": "mujoco",
    "ale_py": "atari",
    "minatar": "minatar",
    "pygame": "classic",
    "gymnasium_robotics": "robotics",
    "pettingzoo": "pettingzoo",
    "vizdoom": "vizdoom",
}
"""Modules that an error may name, and the extras that install them."""


_OF_TORCH = (
    "{0} makes an environment in torch. Name the class itself (--env.id file.py:Name), which lockstep calls with "
    "num_envs, device and --env.options."
)
PREFIX = "pettingzoo/"
"""The prefix of ids of environments with several agents; an id of PettingZoo or a callable follows."""


def is_callable(env_id: str) -> bool:
    """Whether the id refers to a user's callable ("module:make", "file.py:make") instead of a registered id."""
    return ":" in env_id and not env_id.startswith(MIXED) and not re.search(r"-v\d+$", env_id)


def makes_batch(env_id: str) -> bool:
    """Whether the id refers to a user's callable that makes many environments at once: it takes num_envs."""
    if not is_callable(env_id) or env_id.startswith(PREFIX):
        return False
    found = load_object(env_id)
    if isinstance(found, type) and issubclass(found, (gymnasium.Env, VectorEnv)):
        return issubclass(found, VectorEnv)
    try:
        return "num_envs" in inspect.signature(found).parameters
    except (TypeError, ValueError):  # not a callable, or without a signature
        return False


def construct(config: EnvConfig, render: bool = False) -> Any:
    """Make one gymnasium or PettingZoo environment. Errors of a user's constructor are raised unchanged.

    Raises:
        SettingsError: an option is unknown, or a library that the environment needs is not installed.
    """
    options: dict[str, Any] = copy.deepcopy(config.options)  # an environment may change a list among its options
    if render:
        options.setdefault("render_mode", "rgb_array")
    if is_callable(config.id):
        make = load_object(config.id.removeprefix(PREFIX))
        with _unknown_options(config), ENVIRONMENT_SETTINGS.applied(thorough=True):
            made = make(**options)
        several = config.id.startswith(PREFIX)
        if several == has_agents(made) and (several or isinstance(made, gymnasium.Env)):
            return made
        if _is_batch(made):
            raise SettingsError(
                f"env.id={config.id} returned a {type(made).__name__}, which is a batch of environments, but "
                "env.adapter=gymnasium steps single ones. Let it take the argument num_envs, or use --env.adapter "
                "vector."
            )
        wanted = "a PettingZoo environment" if several else "a gymnasium.Env"
        raise SettingsError(
            f"env.id={config.id} returned {made!r}, but must return {wanted}. An environment of the old gym needs a "
            f"wrapper, such as shimmy's, and the id of a PettingZoo environment begins with {PREFIX}, as in "
            f"{PREFIX}file.py:make."
        )
    with _of_library(config):
        if config.id.startswith(PREFIX):
            return _of_pettingzoo(config.id, options)
        return gymnasium.make(config.id, disable_env_checker=True, **options)


def construct_batch(config: EnvConfig, num_envs: int, render: bool = False, **given: Any) -> Any:
    """Make num_envs environments in one object: a VectorEnv, or the result of a user's callable.

    Args:
        given: further arguments of a user's callable, which env.options cannot set.

    Raises:
        SettingsError: as for construct, or the callable makes a single environment.
    """
    options: dict[str, Any] = copy.deepcopy(config.options)
    if "num_envs" in options:
        raise SettingsError("env.options cannot set num_envs: use --env.num-envs, which counts those of all shards.")
    if taken := given.keys() & options:
        raise SettingsError(f"env.options cannot set {min(taken)}, which the layout decides (--layout). Leave it out.")
    if not is_callable(config.id):
        if render:
            options.setdefault("render_mode", "rgb_array")
        with _of_library(config):
            try:
                return gymnasium.make_vec(config.id, num_envs=num_envs, **options)
            except gymnasium.error.DependencyNotInstalled:
                raise
            except (ValueError, gymnasium.error.Error) as error:
                raise SettingsError(
                    f"gymnasium.make_vec cannot make env.id={config.id} with env.options {options}: {error}"
                ) from error
    make = load_object(config.id)
    if render and "render_mode" in inspect.signature(make).parameters:
        options.setdefault("render_mode", "rgb_array")
    with _unknown_options(config, "num_envs"), ENVIRONMENT_SETTINGS.applied(thorough=True):
        made = make(num_envs=num_envs, **given, **options)
    if isinstance(made, TorchEnv) and "device" not in given:
        raise SettingsError(_OF_TORCH.format(config.id))
    if isinstance(made, (VectorEnv, TorchEnv)) or _is_batch(made):
        return made
    single = isinstance(made, gymnasium.Env)
    raise SettingsError(
        f"env.id={config.id} returned {made!r}, "
        + (
            "which is one environment. Use --env.adapter gymnasium, or return a batch of num_envs environments."
            if single
            else "but env.adapter=vector takes a gymnasium.vector.VectorEnv, or an object with num_envs, "
            "observation_space, action_space, reset(rows, seeds) and step(actions)."
        )
    )


def _is_batch(made: Any) -> bool:
    """Whether an object looks like a VectorEnv or a BatchEnv."""
    if isinstance(made, VectorEnv):
        return True
    methods = all(callable(getattr(made, name, None)) for name in ("reset", "step"))
    return methods and hasattr(made, "num_envs") and not isinstance(made, gymnasium.Env)


@contextlib.contextmanager
def _of_library(config: EnvConfig) -> Iterator[None]:
    """Import the module that registers the id, and turn the library's errors about missing packages into
    SettingsErrors."""
    for prefix, module in _REGISTERED_BY.items():
        if config.id.startswith(prefix):
            importlib.import_module(module)
    try:
        with (
            warnings.catch_warnings(),
            _unknown_options(config),
            ENVIRONMENT_SETTINGS.applied(thorough=True),
        ):  # users name old versions on purpose, for example to compare with published scores
            warnings.filterwarnings("ignore", ".*out of date", DeprecationWarning)
            warnings.filterwarnings(
                "ignore", ".*not in the possible render_modes", UserWarning
            )  # an error follows if images are requested
            yield
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise needs_library(config.id, error) from error


def needs_library(env_id: str, error: Exception) -> SettingsError:
    """The error for an environment whose library is not installed."""
    absent = (e for name, e in _EXTRAS.items() if name in str(error) and not importlib.util.find_spec(name))
    extra = next(absent, None)
    hint = f"Install it with: {install_command(extra)}." if extra else "Install that, or correct the id."
    return SettingsError(f"{env_id} needs a library that is not installed: {str(error).rstrip('.')}. {hint}")


@contextlib.contextmanager
def _unknown_options(config: EnvConfig, *given: str) -> Iterator[None]:
    """Turn a constructor's TypeError about an option that the user gave into a SettingsError.

    Args:
        given: further arguments of the constructor.
    """
    try:
        yield
    except TypeError as error:
        raised_here = traceback.extract_tb(error.__traceback__)[-1].filename == __file__
        named = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        refused = named[1] if named is not None else None
        if raised_here and str(error).endswith("() takes no arguments"):  # a class without a constructor
            refused = [*given, *config.options, "render_mode"][0]
        taken = re.search(r"multiple values for (?:keyword )?argument '(\w+)'", str(error))
        if taken is not None and raised_here and taken[1] in config.options:
            raise SettingsError(
                f"env.options cannot set {taken[1]}, an argument that lockstep gives to {config.id}. Leave it out."
            ) from error
        if refused in config.options:
            raise SettingsError(
                f"env.options names {refused!r}, which {config.id} does not take: {error}. Give arguments of its "
                "constructor only. --env.options without any arguments removes the recipe's."
            ) from error
        if refused == "render_mode":
            raise SettingsError(
                f"{config.id} cannot render images, because its constructor does not take render_mode. Use a callable "
                "that takes render_mode and passes it on."
            ) from error
        if refused == "num_envs" and raised_here:
            raise SettingsError(
                f"{config.id} makes one environment, because its constructor does not take num_envs. Use --env.adapter "
                "gymnasium, or let it take num_envs and return a batch."
            ) from error
        if refused == "device":
            raise SettingsError(
                f"{config.id} is an environment in torch whose constructor takes no device. Let it take (num_envs, "
                "device, …) and call super().__init__(num_envs, device)."
            ) from error
        missing = re.search(r"missing \d+ required .*argument", str(error))
        if missing is not None and re.search(r"'device'", str(error)):
            raise SettingsError(_OF_TORCH.format(config.id)) from error
        if missing is not None and raised_here:
            raise SettingsError(
                f"{config.id} lacks arguments: {error}. Give them with --env.options NAME=VALUE."
            ) from error
        raise


def _of_pettingzoo(env_id: str, options: dict[str, Any]) -> Any:
    """Make one of PettingZoo's environments, in its parallel form if it has one.

    Raises:
        ImportError: the environment or a library that it needs is not installed.
    """
    import pettingzoo
    from pettingzoo.env_registry.exceptions import FailedToImport

    name = env_id.removeprefix(PREFIX)
    try:
        return pettingzoo.make("parallel" if name in pettingzoo.parallel_registry else "aec", name, **options)
    except FailedToImport as error:
        raise ImportError(f"{error.__cause__} (pip install '{PREFIX[:-1]}[{name.partition('/')[0]}]')") from error


def has_agents(env: Any) -> bool:
    """Whether an object is a PettingZoo environment."""
    pettingzoo = sys.modules.get("pettingzoo")
    return pettingzoo is not None and isinstance(env, (pettingzoo.AECEnv, pettingzoo.ParallelEnv))
