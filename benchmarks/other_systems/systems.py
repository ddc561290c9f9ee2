"""The other systems: what to install, what they can train, and which of their own layouts to try."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.settings import SettingsError
from lockstep.run.platform import version

Task = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A system to compare with."""

    name: str
    """As it is shown."""
    environment: str
    """Which virtual environment it runs in."""
    requirements: tuple[str, ...]
    script: str
    packages: tuple[str, ...]
    """Whose versions are reported."""
    unable: Callable[[Task], str]
    """Why it cannot train a task; empty if it can."""
    layouts: Callable[[Task], list[dict[str, Any]]]
    """How it may use the machine. The fastest is compared."""


def _same(package: str) -> tuple[str, ...]:
    """The very version that lockstep itself uses, without the label of its build."""
    found = version(package)
    return (f"{package}=={found.partition('+')[0]}",) if found else ()


_COMMON = (*_same("torch"), *_same("envpool"))


def _synchronous(task: Task, algorithms: tuple[str, ...] = ("ppo",)) -> str:
    """Stable-Baselines3's and torchrl's algorithms: no recurrent core, no Doom."""
    if task["algorithm"]["name"] not in algorithms:
        return f"it has no {task['algorithm']['name'].upper()}"
    if task["model"]["core"] != "none":
        return "its script knows no recurrent core"
    if task["env"]["image"] and task["model"]["encoder"] != "nature":
        return "its script knows the Nature CNN alone"
    return ""


def _cleanrl(task: Task) -> str:
    if not task["env"]["atari"]:
        return "the file plays Atari alone"
    return _synchronous(task)


def _threads(task: Task) -> list[dict[str, Any]]:
    """Convolutions are worth all cores; a small MLP is faster on one, as a rule."""
    cores = task["threads"]
    return [{"torch_threads": count} for count in ([cores] if task["env"]["image"] else sorted({1, cores}))]


def _sample_factory_layouts(task: Task) -> list[dict[str, Any]]:
    """Asynchronous with double-buffered sampling, asynchronous with a worker a core, and everything in one process."""
    cores, count, pooled = task["threads"], task["num_envs"], task["env"]["library"] == "envpool"
    serial = {"num_workers": 1, "num_envs_per_worker": 1 if pooled else count, "worker_num_splits": 1}
    serial |= {"async_rl": False, "serial_mode": True}
    layouts = [{**serial, "torch_threads": each["torch_threads"]} for each in _threads(task)]
    for workers, splits in ((1, 2), (cores, 1)) if pooled else ((cores, 2), (4 * cores, 2)):
        envs = splits if pooled else count // workers
        if count % (workers * splits) == 0 and envs % splits == 0:
            asynchronous = {"num_workers": workers, "num_envs_per_worker": envs, "worker_num_splits": splits}
            layouts.insert(0, {**asynchronous, "async_rl": True, "serial_mode": False})
    return layouts


def _file_layouts(path: str, flags: tuple[str, ...], task: Task) -> list[dict[str, Any]]:
    return [{**each, "file": path, "flags": list(flags)} for each in _threads(task)]


PEERS = {
    "sample-factory": Peer(
        name="Sample Factory",
        environment="sample-factory",
        requirements=(
            *_COMMON,
            "sample-factory==2.1.1",
            "gymnasium[classic-control]==0.29.1",
            "numpy==1.26.4",
            "vizdoom==1.2.4",
        ),
        script="_sample_factory.py",
        packages=("sample-factory", "torch", "envpool", "vizdoom"),
        unable=lambda task: "" if task["algorithm"]["name"] in ("ppo", "appo") else "it learns from no replay",
        layouts=_sample_factory_layouts,
    ),
    "stable-baselines3": Peer(
        name="Stable-Baselines3",
        environment="stable-baselines3",
        requirements=(*_COMMON, "stable-baselines3==2.9.2", *_same("gymnasium")),
        script="_stable_baselines3.py",
        packages=("stable-baselines3", "torch", "envpool", "gymnasium"),
        unable=functools.partial(_synchronous, algorithms=("ppo", "dqn", "sac")),
        layouts=_threads,
    ),
    "torchrl": Peer(
        name="torchrl",
        environment="torchrl",
        requirements=(*_COMMON, "torchrl==0.14.1", "tensordict==0.14.3", *_same("gymnasium")),
        script="_torchrl.py",
        packages=("torchrl", "tensordict", "torch", "envpool", "gymnasium"),
        unable=_synchronous,
        layouts=_threads,
    ),
}
"""What can be installed, by the name that the command line knows it by."""

_FILES = {"cleanrl": ("CleanRL", ()), "leanrl": ("LeanRL, compiled", ("--compile",))}
"""Published single files, which the user downloads: how they are shown, and their flags."""
_FILE_REQUIREMENTS = (
    *_COMMON,
    "gym==0.26.2",
    "numpy==1.26.4",
    "setuptools<81",
    "tensorboard",
    "tensordict==0.14.3",
    "torchrl==0.14.1",
    "tqdm",
    "tyro",
    "wandb",
)


def find(text: str) -> Peer:
    """The peer that a text names: `sample-factory`, or `cleanrl=path/to/ppo_atari_envpool.py`.

    Raises:
        SettingsError: there is no such peer, or no such file.
    """
    name, equals, path = text.partition("=")
    if name in PEERS and not equals:
        return PEERS[name]
    if name not in _FILES:
        known = ", ".join([*PEERS, *(f"{each}=FILE" for each in _FILES)])
        raise SettingsError(f"There is no peer {text!r}. Known are {known}.")
    if not Path(path).is_file():
        raise SettingsError(
            f"{text!r} must name your copy of {_FILES[name][0].partition(',')[0]}'s published file, as in "
            f"{name}=downloads/ppo_atari_envpool.py{': there is no such file' if path else ''}."
        )
    shown, flags = _FILES[name]
    return Peer(
        name=shown,
        environment="single-files",
        requirements=_FILE_REQUIREMENTS,
        script="_single_file.py",
        packages=("torch", "envpool", "gym"),
        unable=_cleanrl,
        layouts=functools.partial(_file_layouts, str(Path(path).resolve()), flags),
    )
