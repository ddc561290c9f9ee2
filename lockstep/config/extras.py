"""The optional libraries that lockstep can use, and the command that installs them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit


class Extra(NamedTuple):
    """An extra: the library that it installs, and its purpose."""

    module: str
    """The module whose presence shows that the extra is installed."""
    purpose: str
    environments: tuple[str, ...] = ()
    """Distributions whose versions affect environments, and therefore belong to the platform of a run."""

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


EXTRAS = {
    "atari": Extra("ale_py", "Atari games", ("ale-py",)),
    "classic": Extra("pygame", "videos of CartPole and of gymnasium's other classic-control tasks"),
    "envpool": Extra("envpool", "Atari, MuJoCo and more, in C++", ("envpool",)),
    "minatar": Extra("minatar", "MinAtar's five small games", ("minatar",)),
    "minari": Extra("minari", "datasets of transitions"),
    "mpe": Extra("mpe2", "particle worlds for several agents", ("mpe2", "pettingzoo")),
    "mujoco": Extra("mujoco", "MuJoCo through gymnasium", ("gymnasium", "mujoco")),
    "pettingzoo": Extra("pettingzoo", "games for several agents", ("pettingzoo", "pygame-ce")),
    "procgen": Extra("PyQt5", "Procgen's games", ("envpool", "PyQt5-Qt5")),
    "robotics": Extra("gymnasium_robotics", "Fetch, AntMaze and more", ("gymnasium-robotics", "mujoco")),
    "vizdoom": Extra("vizdoom", "Doom", ("envpool", "pettingzoo", "vizdoom")),
    "optuna": Extra("optuna", "searches for settings"),
    "ray": Extra("ray", "runs and sweeps on Ray clusters"),
    "slurm": Extra("submitit", "runs and sweeps on Slurm clusters"),
    "wandb": Extra("wandb", "metrics in Weights & Biases"),
    "trackio": Extra("trackio", "metrics in trackio"),
    "export": Extra("onnxruntime", "policies as ONNX files"),
    "hub": Extra("huggingface_hub", "runs on the Hugging Face Hub"),
}


def install_command(extra: str) -> str:
    """The command that installs an extra, or several separated by commas, into this Python.

    lockstep is not on a package index, and the PyPI package of this name is another project. So pip needs the folder or
    address of the repository from which lockstep was installed.
    """
    checkout = Path(__file__).parents[2]
    if _is_repository(checkout):
        return f"{_pip_install()} -e {_in_folder(checkout, extra)}"
    origin = _origin()
    url = origin.get("url", "")
    if url.startswith("file:") and _is_repository(folder := Path(unquote(urlsplit(url).path))):
        return f"{_pip_install()} {_in_folder(folder, extra)}"
    if "vcs_info" in origin:
        revision = origin["vcs_info"].get("requested_revision") or origin["vcs_info"]["commit_id"]
        return f'{_pip_install()} "lockstep[{extra}] @ {origin["vcs_info"]["vcs"]}+{url}@{revision}"'
    return f'{_pip_install()} ".[{extra}]" (in the folder of lockstep\'s repository)'


def _pip_install() -> str:
    """The command that installs packages into this Python, whichever pip comes first on the path."""
    python = shlex.quote(sys.executable or "python")
    if importlib.util.find_spec("pip") is None:  # for example in virtual environments made by uv
        return f"uv pip install --python {python}"
    first = shutil.which("pip")
    ours = first is not None and os.path.dirname(first) == os.path.dirname(sys.executable)
    return "pip install" if ours else f"{python} -m pip install"


def _is_repository(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file() and (folder / "lockstep").is_dir()


def _in_folder(folder: Path, extra: str) -> str:
    return f'".[{extra}]"' if folder.resolve() == Path.cwd().resolve() else f'"{folder}[{extra}]"'


def _origin() -> dict[str, Any]:
    """The origin of the installed lockstep, as recorded by installers (PEP 610)."""
    try:
        return json.loads(importlib.metadata.distribution("lockstep").read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return {}
