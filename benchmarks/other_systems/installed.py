"""Installs every peer in a separate virtual environment, and clones those that have no package. Both happen on first
use and are kept."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lockstep.system.machine import user_cache

_MARK = "installed"
"""The file that says that an environment is complete."""


JAX = ("jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "optax==0.2.8", "tfp-nightly==0.26.0.dev20261027")
"""What peers in JAX need."""


class PeerError(RuntimeError):
    """A peer cannot be installed or run here; it is left out, and the comparison goes on."""


def cache() -> Path:
    """Where the environments lie: LOCKSTEP_PEERS, or below the user's cache."""
    return Path(os.environ.get("LOCKSTEP_PEERS") or user_cache() / "peers")


def python_of(peer: str, requirements: Sequence[str], say: Callable[[str], None] = lambda text: None) -> Path:
    """The Python of a peer's environment, with exactly these requirements; makes it if there is none.

    Raises:
        PeerError: it cannot be made; the text ends with what pip said.
    """
    key = hashlib.sha256("\n".join([platform.python_version(), *requirements]).encode()).hexdigest()[:12]
    folder = cache() / f"{peer}-{key}"
    python = folder / "bin" / "python"
    with _locked(folder):
        if (folder / _MARK).exists():
            return python
        say(f"installing {peer} into {folder} (once; some minutes) …")
        shutil.rmtree(folder, ignore_errors=True)  # what an interruption left
        _run([sys.executable, "-m", "venv", str(folder)], peer)
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements], peer)
        (folder / _MARK).write_text("\n".join(requirements) + "\n", encoding="utf-8")
    return python


def clone_of(peer: str, source: str, commit: str, say: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of a peer's repository at this commit, for one that has no package.

    Args:
        source: where git finds it: an address, or the folder of a clone.

    Raises:
        PeerError: it cannot be cloned; the text ends with what git said.
    """
    folder = cache() / f"{peer}-{commit[:12]}"
    with _locked(folder):
        if not (folder / _MARK).exists():
            say(f"cloning {source} into {folder} (once) …")
            shutil.rmtree(folder, ignore_errors=True)
            _run(["git", "clone", "--quiet", "--no-checkout", source, str(folder)], peer)
            _run(["git", "-C", str(folder), "checkout", "--quiet", "--detach", commit], peer)
            (folder / _MARK).write_text(f"{source}\n{commit}\n", encoding="utf-8")
    return folder


def _run(command: list[str], peer: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"{peer} cannot be installed: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise PeerError(f"{peer} cannot be installed: `{' '.join(command)}` says:\n" + "\n".join(said[-6:]))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time make an environment."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.with_name(folder.name + ".lock").touch()
    except OSError as error:
        raise PeerError(f"{folder.parent} cannot be written: {error}. Set LOCKSTEP_PEERS to another folder.") from error
    with folder.with_name(folder.name + ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
